"""Quantize kernels give the reference's bytes: on a CUDA device where there is one, else in Triton's interpreter."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from lowbit_compile.codegen import plan
from lowbit_compile.codegen.cast_kernel import Side, cast
from lowbit_compile.codegen.select import cast_jobs
from lowbit_compile.errors import LowbitWarning
from lowbit_compile.jobs import Cast, Job
from lowbit_compile.ops import run_jobs
from lowbit_compile.policy_file import load_policy
from lowbit_compile.quantize import quantize
from lowbit_compile.spec import GEMMS, OperandSpec, parse_operand

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PRESETS = ("fp8_rowwise", "fp8_delayed", "mxfp8", "nvfp4_nvidia", "tetrajet_v2", "hif8_max_window")
SEED = [7, 2**31 + 5, 3, 4]

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # NumPy on NaN and infinity

OTHERS = (
    "e4m3fn(block=1x128)", "e4m3fn(block=128x128)", "e4m3fn(block=1x32,scale=e8m0,rule=rceil_satfinite)",
    "e4m3fn(block=1x32,scale=e8m0,rule=nearest)", "e5m2(block=1x32,scale=e8m0,rule=ceil)",
    "e5m2(block=1x128,rounding=stochastic)", "e2m1(block=1x32,scale=e8m0,rule=floor)",
    "e2m1(block=1x32,scale=e8m0,rule=even)", "e2m1(block=1x32,scale=e8m0,hadamard=32)",
    "e2m1(block=1x32,scale=e8m0,hadamard=64,rounding=rna)",
    "e2m1(block=1x16,scale=e4m3fn,outer=-1x-1,four_over_six=true)",
    "e2m1(block=1x16,scale=e4m3fn,rounding=stochastic,four_over_six=true)", "e2m1(block=1x16,scale=e4m3fn,rule=ceil)",
    "e2m1(block=1x16,scale=e4m3fn,outer=1x128,rule=floor,hadamard=128)",
    "e2m1(block=1x16,scale=e4m3fn,outer=1x128,target=6.375,rounding=stochastic)", "hif8(target=15.0)",
    "hif8(block=1x128,rounding=stochastic)", "int8(block=1x-1)", "int8(scaling=delayed)", "int4(block=1x32)",
)  # fmt: skip


def specs() -> list[OperandSpec]:
    """Every cast of the presets and some more, once."""
    found = {}
    for preset in PRESETS:
        linear = load_policy(preset).resolve("fc", "linear").spec
        assert linear is not None
        for gemm in GEMMS:
            for operand in (getattr(linear, gemm).a, getattr(linear, gemm).b):
                if operand.quantized:
                    found[str(operand)] = operand
    return [*found.values(), *map(parse_operand, OTHERS)]


def awkward(rows: int, k: int, finite: bool) -> Tensor:
    """Sizes over twelve decades, zeros of both signs, subnormals, and unless ``finite`` NaN and infinities."""
    x = torch.randn(rows, max(k, 12)) * torch.logspace(-6, 6, rows)[:, None]
    x[3], x[10, :16], x[11, :20] = 0.0, 1e-40, -0.0
    x[12] *= 1e30
    if not finite:
        x[5, 7], x[9, 11], x[8, 2] = float("nan"), float("inf"), -float("inf")
    return x[:, :k].to(DEVICE)


def seed() -> Tensor:
    return torch.tensor(SEED, device=DEVICE)


def assert_same(mine: list[Tensor], theirs: list[Tensor]) -> None:
    assert [(t.shape, t.dtype) for t in mine] == [(t.shape, t.dtype) for t in theirs]
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a.nan_to_num(-1.0), b.nan_to_num(-1.0))


@pytest.mark.parametrize(("shape", "finite"), [((40, 200), True), ((17, 33), False), ((13, 1), True)], ids=str)
@pytest.mark.parametrize("spec", specs(), ids=str)
def test_payload_is_the_references(spec: OperandSpec, shape: tuple[int, int], finite: bool) -> None:
    x = awkward(*shape, finite)
    if plan.refusal(spec, *x.shape):
        pytest.skip("refused, see test_refusals")
    for amax_seen in (None,) if spec.scaling == "current" else (0.0, 3.0):
        window = None if amax_seen is None else torch.full((1,), amax_seen, device=DEVICE)
        made, _ = cast(x, seed(), window, Side(spec, 3, 17), None, b_from_a=False, keep_a=True)
        amax = None if window is None else window[0]
        assert_same(made, quantize(x, spec, amax=amax, seed=seed(), stream=3, sign_stream=17))


def couples() -> list[tuple[Job, ...]]:
    """Straight and transposed casts of one tensor, as the presets pair them."""
    found = []
    for preset in ("fp8_rowwise", "mxfp8", "nvfp4_nvidia", "tetrajet_v2"):
        s = load_policy(preset).resolve("fc", "linear").spec
        assert s is not None
        for name, a, other, b in (
            ("fprop.x", s.fprop.a, "wgrad.x", s.wgrad.b),
            ("fprop.w", s.fprop.b, "dgrad.w", s.dgrad.b),
            ("dgrad.g", s.dgrad.a, "wgrad.g", s.wgrad.a),
        ):
            first = Cast(name, a)
            found.append((Job(first), Job(Cast(other, b), True, (first,) if b.source == "dequantized" else ())))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(40, 200), (130, 33)], ids=str)
@pytest.mark.parametrize("jobs", couples(), ids=lambda jobs: " | ".join(map(str, jobs)))
def test_both_orientations_are_the_references(
    jobs: tuple[Job, ...], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x = (torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]).to(DEVICE, dtype)
    x[3, 7] = float("nan")
    text = " | ".join(map(str, jobs))
    amax = torch.zeros(3, device=DEVICE)
    assert_same(run_jobs("triton", x, amax, seed(), None, text), run_jobs("eager", x, amax, seed(), None, text))


def test_one_launch_makes_both_orientations(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowbit_compile.codegen import cast_kernel

    launches = []
    monkeypatch.setattr(cast_kernel, "cast", lambda *a, **k: launches.append(a) or cast(*a, **k))
    jobs = next(pair for pair in couples() if pair[1].via)
    made = cast_jobs(torch.randn(32, 64, device=DEVICE), torch.zeros(3, device=DEVICE), seed(), jobs)
    assert set(made) == set(jobs)
    assert len(launches) == 1


@pytest.mark.parametrize("how", ["transposed", "strided columns", "expanded", "slice of NaN"])
def test_strides_are_obeyed(how: str) -> None:
    base = torch.full((96, 160), float("nan"), device=DEVICE)
    x = {
        "transposed": torch.randn(80, 48, device=DEVICE).t(),
        "strided columns": torch.randn(48, 160, device=DEVICE)[:, ::2],
        "expanded": torch.randn(1, 80, device=DEVICE).expand(48, 80),
        "slice of NaN": base[16:64, 40:120],
    }[how]
    if how == "slice of NaN":
        x.copy_(torch.randn(48, 80))
    spec = parse_operand("e2m1(block=1x16,scale=e4m3fn,outer=1x128,rounding=stochastic,hadamard=16)")
    made, other = cast(x, seed(), None, Side(spec, 3, 17), Side(spec, 2, 17), b_from_a=False, keep_a=True)
    assert_same(made, quantize(x.contiguous(), spec, seed=seed(), stream=3, sign_stream=17))
    assert_same(other, quantize(x.t().contiguous(), spec, seed=seed(), stream=2, sign_stream=17))


REFUSALS = {
    "e4m3fn(block=1x48)": "block 1x48",
    "e4m3fn(block=-1x32)": "block -1x32",
    "int8(rounding=stochastic)": "K is 33",
    "e2m1(block=1x16,scale=e4m3fn,outer=1x48)": "outer block 1x48",
    "e2m1(block=16x16,scale=e4m3fn,four_over_six=true)": "two-dimensional",
}


@pytest.mark.parametrize("text", REFUSALS)
def test_refusals_name_what_is_wrong_and_the_reference_takes_over(text: str) -> None:
    spec = parse_operand(text)
    assert REFUSALS[text] in plan.refusal(spec, 17, 33)
    assert "empty" in plan.refusal(spec, 0, 33)
    x, amax = torch.randn(17, 33, device=DEVICE), torch.zeros(3, device=DEVICE)
    job = str(Job(Cast("fprop.x", spec)))
    if "48" in text or "-1x32" in text:
        with pytest.warns(LowbitWarning, match=f"fprop.x: the reference casts it.*{REFUSALS[text]}"):
            run_jobs("triton", x, amax, seed(), None, job)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(run_jobs("triton", x, amax, seed(), None, job), run_jobs("eager", x, amax, seed(), None, job))
