"""Outlier channels (OutControl): when they are chosen, which ones, and what the three GEMMs do with them."""

from __future__ import annotations

import copy
import io
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import eager_twin
from test_backend import assert_same, compiled, train
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowbit_compile
from lowbit_compile.errors import LowbitWarning, PolicyError
from lowbit_compile.jobs import OUTLIERS, REST, Cast, Job, parse_job
from lowbit_compile.policy_file import load_policy
from lowbit_compile.quantize import fake_quantize
from lowbit_compile.random_bits import SIGN_STREAMS, STREAMS
from lowbit_compile.recipe import OPERANDS
from lowbit_compile.spec import GemmSpec, LinearSpec, Outliers, parse_linear

FP4, MX = OPERANDS["nvfp4_double"], OPERANDS["mxfp8"]
NOISE = {"rounding": "stochastic", "hadamard": 16}
DEFAULT = {"fraction": 0.25, "format": "mxfp8", "observe": [2, 4]}


def recipe(noise: bool = True, outliers: dict | None = DEFAULT) -> dict:
    """Double-block NVFP4 as in TetraJet-v2; without ``noise`` backward rounds to nearest and rotates nothing."""
    cast = {"format": "nvfp4_double", **(NOISE if noise else {})}
    again = {**cast, "source": "dequantized"}
    found = {"fprop": "nvfp4_double", "dgrad": {"g": cast, "w": again}, "wgrad": {"g": cast, "x": again}}
    return found if outliers is None else {**found, "outliers": outliers}


def policy(noise: bool = True, outliers: dict | None = DEFAULT, **keys: object) -> dict:
    rules = [{"match": "*", "use": "r"}]
    return {"version": 1, "recipes": {"r": recipe(noise, outliers)}, "rules": rules, **keys}


class Net(nn.Module):
    """Widths that are whole blocks of 128 and that are not, with and without bias, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(128, 160), nn.Linear(160, 256, bias=False), nn.Linear(256, 128)

    def forward(self, x):
        return x + self.down(F.relu(self.mid(F.relu(self.up(x)))))


def sgd(model: nn.Module, rate: float = 1e-4) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), rate)


def run_both(model: nn.Module, given: dict, batches: list, **options: object) -> list[int]:
    """Compiled and eager, compared bit for bit; gives the number of graphs after each step."""
    graphs: list[int] = []
    twin, twin_state = eager_twin(model, given)
    run = compiled(model, given, **options)
    losses = train(run, sgd(model), batches, lambda: graphs.append(lowbit_compile.report(model).graphs))
    assert torch.equal(losses, train(twin, sgd(twin), batches))
    state = lowbit_compile.state(model)
    assert_same(model, twin, state, twin_state)
    for path, site in twin_state.sites.items():
        found = state.sites[path]
        assert found.tensors().keys() == site.tensors().keys(), path
        assert found.resets == site.resets, path
        assert site.channels is None or (site.channels.chosen and found.channels.chosen), path
    return graphs


def resumed(first: nn.Module, second: nn.Module, given: dict, x: torch.Tensor) -> nn.Module:
    """``second`` compiled, with all that a checkpoint of ``first`` holds."""
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "lowbit": lowbit_compile.state(first).state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second.load_state_dict(saved["model"])
    run = compiled(second, given)
    with torch.no_grad():
        run(x)
    lowbit_compile.state(second).load_state_dict(saved["lowbit"])
    return run


@pytest.mark.parametrize(
    ("schedule", "graphs"),
    [
        ([], [1, 1, 2, 2, 3, 3, 3, 3, 3, 3]),
        ([{"until_step": 3, "use": "keep"}], [1, 1, 2, 3, 4, 4, 4, 4, 4, 4]),
        ([{"from_step": 6, "wgrad": "bf16"}], [1, 1, 2, 2, 3, 3, 4, 4, 4, 4]),
        ([{"from_step": 6, "fprop": "bf16"}], [1, 1, 2, 2, 3, 3, 4, 4, 4, 4]),
    ],
)
def test_equals_eager_reference_and_compiles_once_a_boundary(schedule, graphs):
    batches = [torch.randn(24, 128) * (1 + i % 3) for i in range(10)]
    model = Net()
    assert run_both(model, policy(schedule=schedule), batches) == graphs
    assert lowbit_compile.report(model).recompiles == 0


def test_equals_eager_reference_under_inductor():
    model, given = nn.Sequential(nn.Linear(160, 160)), policy(False, {**DEFAULT, "observe": [0, 1]})
    batches = [torch.randn(24, 160) for _ in range(3)]
    assert run_both(model, given, batches, inner="inductor", reference="compiled") == [1, 2, 2]


# ---- what the three GEMMs compute


def assert_product(actual: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """actual = a . b^T up to float32 rounding: K products summed in any order err by at most K 2^-24 |a| . |b|^T,
    and both sides do."""
    bound = a.shape[1] * 2.0**-23 * (a.abs() @ b.abs().t())
    error = (actual - a @ b.t()).abs()
    assert (error <= bound).all(), f"{(error > bound).sum()} of {error.numel()} differ, by {error.max()}"


def trained_layer(given: dict, width: int, steps: int) -> tuple[nn.Linear, nn.Module, torch.Tensor]:
    """A layer with fixed weights after ``steps`` steps, its compiled model, and its outlier channels."""
    layer = nn.Linear(width, 64, bias=False)
    model = nn.Sequential(layer)
    run = compiled(model, given)
    for _ in range(steps):
        run(torch.randn(32, width, requires_grad=True)).sum().backward()
        sgd(model, 0.0).step()
    layer.weight.grad = None
    return layer, run, lowbit_compile.state(model).sites["0"].channels.index


def rest(t: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return fake_quantize(t.index_fill(1, index, 0.0), FP4)


@pytest.mark.parametrize("width", [128, 160])
@pytest.mark.parametrize("noise", [False, True])
def test_fprop_dgrad_wgrad_equal_an_independent_computation(noise, width):
    layer, run, index = trained_layer(policy(noise), width, 4)
    w = layer.weight.detach()
    seed = lowbit_compile.state(run).sites["0"].seed.clone()
    x, g = torch.randn(32, width, requires_grad=True), torch.randn(32, 64)
    y = run(x)
    y.backward(g)
    xs, ws = ([rest(t, index), fake_quantize(t[:, index], MX)] for t in (x.detach(), w))
    assert_product(y.detach(), torch.cat(xs, 1), torch.cat(ws, 1))

    def again(t: torch.Tensor, name: str) -> torch.Tensor:
        spec = replace(FP4, **NOISE) if noise else FP4
        sign = SIGN_STREAMS[name.partition(".")[0]]
        return fake_quantize(t, spec, seed=seed, stream=STREAMS[name], sign_stream=sign)

    whole = ws[0].index_copy(1, index, ws[1])
    assert_product(x.grad, again(g, "dgrad.g"), again(whole.t(), "dgrad.w"))
    fp4 = torch.ones(width, dtype=torch.bool).index_fill(0, index, False)
    assert_product(layer.weight.grad[:, fp4], again(g.t(), "wgrad.g"), again(xs[0].t(), "wgrad.x")[fp4])
    assert_product(layer.weight.grad[:, index], fake_quantize(g.t(), MX), fake_quantize(xs[1].t(), MX))


def test_no_noise_in_the_outlier_columns_of_wgrad():
    layer, run, index = trained_layer(policy(), 128, 4)
    optimizer = sgd(layer, 0.0)
    x, g, grads = torch.randn(32, 128), torch.randn(32, 64), []
    for _ in range(2):  # of two steps, so with other noise and other signs
        optimizer.zero_grad()
        run(x).backward(g)
        grads.append(layer.weight.grad.clone())
        optimizer.step()
    assert torch.equal(grads[0][:, index], grads[1][:, index])
    fp4 = torch.ones(128, dtype=torch.bool).index_fill(0, index, False)
    assert (grads[0] != grads[1])[:, fp4].any(0).all()


@pytest.mark.parametrize(
    ("count", "form"),
    [(5, "e4m3fn"), (5, "fp8_row"), (16, "nvfp4"), (16, "nvfp4_2d"), (16, "nvfp4_double"), (5, "int4_row")],
)
def test_other_formats_of_the_outlier_channels(count, form):
    given = policy(False, {"count": count, "format": form, "observe": [0, 1]})
    layer, run, index = trained_layer(given, 128, 1)
    assert index.shape == (count,)
    x = torch.randn(32, 128, requires_grad=True)
    y, g = run(x), torch.randn(32, 64)
    y.backward(g)
    spec = OPERANDS[form]
    xs, ws = ([rest(t, index), fake_quantize(t[:, index], spec)] for t in (x.detach(), layer.weight.detach()))
    assert_product(y.detach(), torch.cat(xs, 1), torch.cat(ws, 1))
    whole = ws[0].index_copy(1, index, ws[1])
    assert_product(x.grad, fake_quantize(g, FP4), fake_quantize(whole.t(), FP4))
    assert_product(layer.weight.grad[:, index], fake_quantize(g.t(), spec), fake_quantize(xs[1].t(), spec))


# ---- which channels


def test_hot_channels_are_chosen_in_their_natural_order():
    hot = torch.randperm(160)[:32]
    model = nn.Sequential(nn.Linear(160, 160))
    x = [torch.randn(24, 160).index_fill(1, hot, 1) * torch.ones(160).index_fill(0, hot, 50) for _ in range(5)]
    x[0], x[4] = x[0].flip(1), x[4].flip(1)  # before and after the watched steps: must not matter
    given = policy(outliers={"count": 32, "format": "mxfp8", "observe": [1, 4]})
    train(compiled(model, given), sgd(model, 0.0), x)
    assert torch.equal(lowbit_compile.state(model).sites["0"].channels.index, hot.sort().values)


def test_channels_have_the_greatest_sums_of_l2_norms():
    model = nn.Sequential(nn.Linear(256, 256))
    x = [torch.randn(24, 256) * torch.randn(24, 256).exp() * torch.randn(256).mul(2).exp() for _ in range(4)]
    train(compiled(model, policy(outliers={**DEFAULT, "observe": [0, 4]})), sgd(model, 0.0), x)
    channels = lowbit_compile.state(model).sites["0"].channels
    norms = torch.stack([t.double().norm(dim=0) for t in x])
    torch.testing.assert_close(channels.norms.double(), norms.sum(0), rtol=1e-6, atol=0)
    found = set(channels.index.tolist())
    assert found == set(norms.sum(0).topk(64).indices.tolist())
    others = [norms.square().sum(0), norms.amax(0), torch.cat(x).abs().amax(0)]
    assert all(found != set(other.topk(64).indices.tolist()) for other in others)


@pytest.mark.parametrize(
    ("width", "size", "count"),
    [
        (128, {"count": 33}, 64),
        (128, {"count": 100}, 64),
        (256, {"fraction": 0.1}, 32),
        (256, {"fraction": 0.5}, 128),
        (72, {"fraction": 0.5}, 32),
    ],
)
def test_count_is_rounded_up_to_blocks_and_at_most_half(width, size, count):
    model = nn.Sequential(nn.Linear(width, width))
    given = policy(outliers={**size, "format": "mxfp8", "observe": [0, 1]})
    train(compiled(model, given), sgd(model), [torch.randn(16, width) for _ in range(2)])
    index = lowbit_compile.state(model).sites["0"].channels.index
    assert index.shape == (count,)
    assert index.diff().gt(0).all()
    assert index[0] >= 0
    assert index[-1] < width
    assert lowbit_compile.report(model).records[0].state == f"{count} of {width} channels in e4m3fn from step 1"


def test_too_narrow_a_layer_has_none_and_says_so():
    first = nn.Sequential(nn.Linear(40, 40))
    second = copy.deepcopy(first)
    batches = [torch.randn(16, 40) for _ in range(6)]
    losses = train(compiled(first, policy()), sgd(first), batches)
    assert torch.equal(losses, train(compiled(second, policy(outliers=None)), sgd(second), batches))
    assert lowbit_compile.state(first).sites["0"].channels is None
    assert "no outlier channels: 40" in lowbit_compile.report(first).records[0].state


# ---- what the statistics see


def test_checkpoint_changes_no_statistics():
    class Checkpointed(Net):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    plain, other = Net(), Checkpointed()
    other.load_state_dict(plain.state_dict())
    batches = [torch.randn(24, 128) for _ in range(6)]
    losses = [train(compiled(m, policy()), sgd(m), batches) for m in (plain, other)]
    assert torch.equal(*losses)
    assert_same(other, plain, lowbit_compile.state(other), lowbit_compile.state(plain))
    assert lowbit_compile.state(plain).sites["down"].channels.chosen


def test_gradient_accumulation_takes_the_greatest_micro_batch():
    model = Net()
    run = compiled(model, policy(outliers={**DEFAULT, "observe": [0, 3]}))
    optimizer, expected = sgd(model), torch.zeros(128)
    for _ in range(2):
        micro = [torch.randn(8, 128) * scale for scale in (1, 3, 2)]
        for x in micro:
            run(x).sum().backward()
        optimizer.step()
        expected += torch.stack([x.norm(dim=0) for x in micro]).amax(0)
    channels = lowbit_compile.state(model).sites["up"].channels
    torch.testing.assert_close(channels.norms, expected, rtol=1e-6, atol=0)
    assert not channels.acc.any()


def test_eval_leaves_the_statistics_alone():
    model = Net()
    run = compiled(model, policy())
    train(run, sgd(model), [torch.randn(8, 128) for _ in range(3)])
    before = copy.deepcopy(lowbit_compile.state(model).state_dict()["sites"])
    model.eval()
    with torch.no_grad():
        run(100 * torch.randn(8, 128))
    with torch.inference_mode():
        run(100 * torch.randn(8, 128))
    for path, site in lowbit_compile.state(model).state_dict()["sites"].items():
        for key, tensor in site["tensors"].items():
            assert torch.equal(tensor, before[path]["tensors"][key]), (path, key)


def test_a_watched_step_with_nan_is_ignored_and_counted():
    model = nn.Sequential(nn.Linear(128, 128))
    run, optimizer = compiled(model, policy(outliers={**DEFAULT, "observe": [0, 3]})), sgd(model)
    batches = [torch.randn(16, 128) for _ in range(3)]
    batches[1][3, 5] = float("nan")
    for x in (*batches, batches[0]):
        loss = run(x).sum()
        loss.backward()
        if not loss.isfinite():
            optimizer.zero_grad()  # as a loss scaler would
        optimizer.step()
    channels = lowbit_compile.state(model).sites["0"].channels
    assert channels.ignored == 1
    torch.testing.assert_close(channels.norms, batches[0].norm(dim=0) + batches[2].norm(dim=0), rtol=1e-6, atol=0)
    assert torch.equal(channels.index, channels.norms.topk(32).indices.sort().values)
    assert run(batches[0]).isfinite().all()


@pytest.mark.parametrize("cut", [3, 6])
def test_resume_is_bitwise(cut):
    batches = [torch.randn(24, 128) for _ in range(8)]
    whole = Net()
    first, second = copy.deepcopy(whole), Net()
    train(compiled(whole, policy()), sgd(whole), batches)
    train(compiled(first, policy()), sgd(first), batches[:cut])
    run = resumed(first, second, policy(), batches[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", LowbitWarning)
        train(run, sgd(second), batches[cut:])
    assert_same(second, whole, lowbit_compile.state(second), lowbit_compile.state(whole))


def test_an_input_that_was_never_watched_warns_and_has_none():
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.late, self.use = nn.Linear(128, 128), nn.Linear(128, 128), False

        def forward(self, x):
            y = self.always(x)
            return self.late(F.relu(y)) if self.use else y

    model = Late()
    run, optimizer = compiled(model, policy()), sgd(model)
    train(run, optimizer, [torch.randn(16, 128) for _ in range(5)])
    model.use = True
    with pytest.warns(LowbitWarning, match="late: no outlier channels"):
        losses = train(run, optimizer, [torch.randn(16, 128) for _ in range(2)])
    assert losses.isfinite().all()
    always, late = lowbit_compile.state(model).sites.values()
    assert always.channels.chosen
    assert not late.channels.chosen
    assert (late.channels.index == -1).all()


# ---- policies and texts


@pytest.mark.parametrize(
    ("change", "place", "word"),
    [
        ({"fprop": "bf16", "dgrad": "nvfp4", "wgrad": "nvfp4"}, "outliers", "fprop"),
        ({"outliers": {**DEFAULT, "format": {"format": "mxfp8", "rounding": "stochastic"}}}, "outliers.format", "rne"),
        ({"outliers": {**DEFAULT, "format": "bf16"}}, "outliers.format", "quantized"),
        ({"outliers": {**DEFAULT, "count": 32}}, "outliers", "one of fraction and count"),
        ({"outliers": {**DEFAULT, "observe": [4, 2]}}, "outliers.observe", "[4, 2]"),
        ({"outliers": {**DEFAULT, "fractoin": 0.1}}, "outliers.fractoin", "did you mean 'fraction'"),
    ],
)
def test_a_bad_policy_is_one_error_with_its_place(change, place, word):
    given = policy()
    given["recipes"]["r"] |= change
    with pytest.raises(PolicyError) as caught:
        load_policy(given)
    assert str(caught.value).startswith(f"<mapping>: recipes.r.{place}: ")
    assert word in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


_more = [replace(FP4, **NOISE), replace(FP4, source="dequantized", target=5e-7)]
_operands, _number = st.sampled_from([*OPERANDS.values(), *_more]), st.integers(0, 99999)
_outliers = st.builds(Outliers, _operands, st.floats(0, 0.5), _number, _number, _number)
_gemms = st.builds(GemmSpec, _operands, _operands)
_casts = st.builds(Cast, st.sampled_from(list(STREAMS)), _operands, st.sampled_from(["", REST, OUTLIERS]))


@settings(deadline=None)
@given(st.builds(LinearSpec, _gemms, _gemms, _gemms, st.none() | _outliers, st.booleans(), st.booleans()))
def test_spec_text_reads_back(spec):
    assert parse_linear(str(spec)) == spec


@settings(deadline=None)
@given(st.builds(Job, _casts, st.booleans(), st.lists(_casts, max_size=2).map(tuple)))
def test_job_text_reads_back(job):
    assert parse_job(str(job)) == job
