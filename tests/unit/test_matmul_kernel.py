"""The GEMM kernel against the float64 product of the same factors, and payloads against what they read back as."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowbit_compile.codegen import factor_kernel
from lowbit_compile.codegen.matmul_kernel import CHUNK, Factors, gemm, refusal
from lowbit_compile.errors import UnsupportedError
from lowbit_compile.ops import run_gemm
from lowbit_compile.quantize import dequantize, quantize
from lowbit_compile.spec import OperandSpec, parse_gemm, parse_operand

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
BLOCKS = {"none": None, "whole": (-1, -1), "row": (1, -1), "chunk": (1, CHUNK), "block": (CHUNK, CHUNK)}
EPS = 2.0**-23

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


def factors(rows: int, k: int, kind: str, dtype: torch.dtype = BF16, poisoned: bool = False) -> Factors:
    """Random factors; ``poisoned``: the values lie inside a bigger tensor of NaN."""
    values = torch.randn(rows, k, device=DEVICE).to(dtype)
    if poisoned:
        big = torch.full((rows + 3, k + 5), float("nan"), device=DEVICE).to(dtype)
        big[1 : rows + 1, 2 : k + 2] = values
        values = big[1 : rows + 1, 2 : k + 2]
    block = BLOCKS[kind]
    if block is None:
        return Factors(values)
    chunks = -(-k // CHUNK)
    shape = {"whole": (1, 1), "row": (rows, 1), "chunk": (rows, chunks), "block": (-(-rows // CHUNK), chunks)}[kind]
    return Factors(values, torch.rand(shape, device=DEVICE) + 0.5, block)


def exact(f: Factors) -> Tensor:
    """float64 [R, K]."""
    values = f.values.double()
    if f.scale is None:
        return values
    scale = f.scale.double()
    if f.block[0] == CHUNK:
        scale = scale.repeat_interleave(CHUNK, 0)[: values.shape[0]]
    if f.block[1] == CHUNK:
        scale = scale.repeat_interleave(CHUNK, 1)[:, : values.shape[1]]
    return values * scale


def assert_close(d: Tensor, terms: list[tuple[Factors, Factors]], bias: Tensor | None) -> None:
    """Inside the bound of float32 accumulation of any order, and half an ulp of the output's dtype."""
    wanted = sum(exact(a) @ exact(b).t() for a, b in terms)
    size = sum(exact(a).abs() @ exact(b).abs().t() for a, b in terms)
    if bias is not None:
        wanted, size = wanted + bias.double(), size + bias.double().abs()
    k = sum(a.values.shape[1] for a, _ in terms)
    bound = (k + 8) * EPS * size + torch.finfo(d.dtype).eps / 2 * wanted.abs() * 1.01
    assert not torch.isnan(d).any()
    assert ((d.double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize(
    "kinds",
    [("none", "none"), ("whole", "row"), ("row", "row"), ("chunk", "chunk"), ("chunk", "block"), ("whole", "chunk")],
    ids=str,
)
@pytest.mark.parametrize("shape", [(1, 17, 33), (17, 1, 1), (33, 130, 200), (130, 33, 256)], ids=str)
def test_product_is_inside_the_float32_bound(shape: tuple[int, int, int], kinds: tuple[str, str]) -> None:
    m, n, k = shape
    a, b = factors(m, k, kinds[0], poisoned=True), factors(n, k, kinds[1], poisoned=True)
    assert_close(gemm([(a, b)], None, torch.float32), [(a, b)], None)


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2), (BF16, E4M3), (torch.float16, torch.float16)], ids=str)
def test_dtypes_and_output_and_bias(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    a, b = factors(40, 96, "row", dtypes[0]), factors(24, 96, "row", dtypes[1])
    bias = torch.randn(24, device=DEVICE)
    for out in (torch.float32, BF16) if DEVICE == "cuda" else (torch.float32,):  # the interpreter's BF16 cast truncates
        assert_close(gemm([(a, b)], bias, out), [(a, b)], bias)


def test_two_terms_share_one_accumulator() -> None:
    terms = [
        (factors(33, 160, "chunk"), factors(48, 160, "chunk")),
        (factors(33, 32, "none"), factors(48, 32, "whole")),
    ]
    assert_close(gemm(terms, None, torch.float32), terms, None)


def test_square_asymmetric_and_both_layouts() -> None:
    a = factors(64, 64, "none")
    b = Factors(torch.arange(64 * 64, device=DEVICE).reshape(64, 64).to(BF16))
    assert_close(gemm([(a, b)], None, torch.float32), [(a, b)], None)
    flipped = Factors(b.values.t().contiguous().t())
    assert torch.equal(gemm([(a, b)], None, torch.float32), gemm([(a, flipped)], None, torch.float32))
    assert torch.equal(
        gemm([(a, b.flipped())], None, torch.float32),
        gemm([(a, Factors(b.values.t().contiguous()))], None, torch.float32),
    )


REFUSED = {
    "values: got torch.float64": (
        (Factors(torch.zeros(4, 8, dtype=torch.float64)), Factors(torch.zeros(4, 8, dtype=BF16))),
        None,
    ),
    "a has K = 8, b has K = 9": (
        (Factors(torch.zeros(4, 8, dtype=BF16)), Factors(torch.zeros(4, 9, dtype=BF16))),
        None,
    ),
    r"got torch.float32 \[2, 1\], block \(1, -1\) of values \[4, 8\] needs torch.float32 \[4, 1\]": (
        (Factors(torch.zeros(4, 8, dtype=BF16), torch.zeros(2, 1), (1, -1)), Factors(torch.zeros(4, 8, dtype=BF16))),
        None,
    ),
    r"bias: got \[5\].*needed \[4\]": (
        (Factors(torch.zeros(4, 8, dtype=BF16)), Factors(torch.zeros(4, 8, dtype=BF16))),
        torch.zeros(5),
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_arguments_are_named_with_both_values(message: str) -> None:
    pair, bias = REFUSED[message]
    with pytest.raises(UnsupportedError, match=message):
        gemm([pair], bias, torch.float32)
    assert "got 0" in refusal([], None, torch.float32)
    assert "got torch.int8" in refusal([pair], None, torch.int8)


FACTORED = (
    "e4m3fn", "e4m3fn(block=1x-1)", "e5m2(block=1x128)", "e4m3fn(block=128x128)", "e4m3fn(block=1x32,scale=e8m0)",
    "e5m2(block=1x32,scale=e8m0)", "e2m1(block=1x16,scale=e4m3fn,outer=-1x-1)",
    "e2m1(block=16x16,scale=e4m3fn,outer=-1x-1)",
    "e2m1(block=1x16,scale=e4m3fn,outer=1x128)", "hif8(target=15.0)", "int8(block=1x-1)", "int4(block=1x32,scale=e8m0)",
)  # fmt: skip


@pytest.mark.parametrize("text", FACTORED)
def test_factors_are_the_payloads_values(text: str) -> None:
    spec = parse_operand(text)
    assert factor_kernel.refusal(spec) == ""
    x = torch.randn(150, 200, device=DEVICE) * torch.logspace(-3, 3, 150, device=DEVICE)[:, None]
    x[3], x[4, 5] = 0.0, float("nan")
    x = x.nan_to_num(0.0) if text == "e4m3fn" or spec.block == (128, 128) or -1 in spec.outer else x
    payload = quantize(x, spec)
    found = exact(factor_kernel.factors(payload, spec)).float()
    assert torch.equal(found.nan_to_num(-7.0), dequantize(payload, spec).nan_to_num(-7.0))


@pytest.mark.parametrize("text", ["e4m3fn(block=1x16)", "int8(block=1x16,scale=e4m3fn)", "e4m3fn(scale=e8m0)"])
def test_what_bf16_cannot_hold_is_refused(text: str) -> None:
    assert factor_kernel.refusal(parse_operand(text))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("text", FACTORED)
def test_the_op_agrees_with_the_reference(text: str, bias: bool) -> None:
    spec = parse_operand(text)
    a, b = quantize(torch.randn(40, 200, device=DEVICE), spec), quantize(torch.randn(48, 200, device=DEVICE), spec)
    offset = torch.randn(48, device=DEVICE) if bias else None
    gemm_text = str(parse_gemm(f"{spec}*{spec}"))
    mine = run_gemm("triton", a, b, offset, gemm_text, "", torch.float32)
    theirs = run_gemm(
        "eager",
        [t.cpu() for t in a],
        [t.cpu() for t in b],
        None if offset is None else offset.cpu(),
        gemm_text,
        "",
        torch.float32,
    )
    torch.testing.assert_close(mine.cpu(), theirs, rtol=0, atol=300 * EPS * float(theirs.abs().max()) * 8)


def test_flipped_operands() -> None:
    spec = parse_operand("hif8(target=15.0)")
    x, w = torch.randn(40, 64, device=DEVICE), torch.randn(40, 48, device=DEVICE)
    text = f"{spec}*{OperandSpec()}"
    mine = run_gemm("triton", quantize(x, spec), [w.bfloat16()], None, text, "ab", torch.float32)
    theirs = run_gemm("eager", quantize(x, spec), [w.bfloat16()], None, text, "ab", torch.float32)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)
