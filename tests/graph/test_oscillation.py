"""OsciReset: which weights a window finds, when it is open, what it costs, and what happens to the weights."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from test_backend import Mlp, assert_same, compiled, train
from test_outliers import recipe, resumed, run_both, sgd
from torch import nn

import lowbit_compile
from lowbit_compile.errors import LowbitWarning, PolicyError, StateError
from lowbit_compile.jobs import Cast
from lowbit_compile.policy_file import load_policy
from lowbit_compile.quantize import fake_quantize
from lowbit_compile.recipe import OPERANDS
from lowbit_compile.runtime.oscillation import Quantizer, Window
from lowbit_compile.runtime.state import State
from lowbit_compile.spec import OperandSpec
from lowbit_compile.windows import Oscillation

FP4, PLAIN = OPERANDS["nvfp4_double"], OperandSpec("e2m1", block=(1, 16))
TV6 = [[2.48, 2.52, 2.49, 2.51, 2.49, 2.52], [2.40, 2.44, 2.48, 2.52, 2.56, 2.60], [2.48] * 6]


def policy(rule: dict, outliers: dict | None = None, **keys: object) -> dict:
    recipes, rules = {"r": recipe(False, outliers)}, [{"match": "*", "use": "r"}]
    return {"version": 1, "recipes": recipes, "rules": rules, "oscillation": rule, **keys}


class Script(torch.optim.Optimizer):
    """Writes given weights: frame after frame, one a step."""

    def __init__(self, parameters, frames, lr: float = 1.0) -> None:
        super().__init__(list(parameters), {"lr": lr})
        self.frames = iter(frames)

    @torch.no_grad()
    def step(self, closure=None):
        frame = next(self.frames)
        for parameter in self.param_groups[0]["params"]:
            parameter.copy_(frame)


def play(model: nn.Module, given: object, frames: list, after=lambda state: None, width: int = 0) -> State:
    """Run ``model`` and write one frame a step to all its weights; gives its state."""
    run, optimizer = compiled(model, given), Script(model.parameters(), frames)
    for _ in frames:
        run(torch.randn(4, width or frames[0].shape[1])).sum().backward()
        optimizer.step()
        after(lowbit_compile.state(model))
    return lowbit_compile.state(model)


def layer(rows: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, rows, bias=False))


# ---- the rule


def columns(*sequences: list[float]) -> list[torch.Tensor]:
    """Frames [1, 16] that hold one sequence a column; the 6 in the last pins the block's scale to 1."""
    frames = torch.zeros(len(sequences[0]), 1, 16)
    for i, sequence in enumerate(sequences):
        frames[:, 0, i] = torch.tensor(sequence)
    frames[:, 0, 15] = 6.0
    return list(frames)


def watch(frames: list[torch.Tensor], spec: OperandSpec = PLAIN) -> tuple[Window, Quantizer]:
    seed = torch.zeros(4, dtype=torch.int64)
    quantizer = Quantizer(Cast("fprop.w", spec), "eager", torch.zeros(3), seed, None)
    window = Window.open(frames[0], quantizer)
    for before, weight in pairwise(frames):
        window.track(weight, before, quantizer)
    return window, quantizer


def test_published_sequences():
    frames = columns(*TV6)
    window, quantizer = watch(frames)
    ratio = window.jumped[0].float() / window.moved[0].float()
    # bfloat16 holds 8 bits: 5 terms and 4 additions err by at most 2^-9 each
    torch.testing.assert_close(ratio[:2], torch.tensor([5 / 0.14, 1 / 0.20]), rtol=9 * 2.0**-9, atol=0)
    assert window.flips[0, :3].tolist() == [5, 1, 0]

    def found(threshold: float, flips: int) -> list[int]:
        return window.oscillating(Oscillation(0, threshold=threshold, min_flips=flips))[0].nonzero().flatten().tolist()

    assert (found(8, 2), found(8, 0), found(4, 2), found(4, 0)) == ([0], [0], [0], [0, 1])
    centres = quantizer.values(quantizer.payload(frames[-1]), 16)
    assert centres[0, :3].tolist() == [3.0, 3.0, 2.0]


def test_one_crossing_is_spared_by_min_flips():
    window, _ = watch(columns([2.499] * 2 + [2.501] * 4, [-0.001, 0.001] * 3))
    found = [window.oscillating(Oscillation(0, min_flips=n))[0, :2].tolist() for n in (0, 1, 2)]
    assert found == [[True, False], [True, False], [False, False]]  # zeros of both signs are one value


def test_extremes():
    window, _ = watch(columns([2.48, float("nan"), 2.48, 2.52, 2.48, 2.52], [2.48, float("inf"), 2.48] * 2))
    assert not window.oscillating(Oscillation(0, threshold=1e-6, min_flips=0)).any()
    assert watch(columns([2.48, 2.52] * 140))[0].flips[0, 0] == 255


# ---- whole runs


@pytest.mark.parametrize("action", ["reset", "monitor"])
def test_a_run_resets_the_oscillating_weights_alone(action):
    rule = {"start_step": 2, "period": 9, "window": 5, "action": action}
    frames = [torch.full((8, 256), 0.25) for _ in range(20)]
    for i, frame in enumerate(frames):
        frame[:, ::16] = 6.0  # each block's scale is 1
        frame[:, 3] = 2.5 + 0.02 * (-1) ** i  # flips by steps of 0.04
        frame[2, 37] = -0.75 + 0.01 * (-1) ** i
        frame[:, 5] = 2.0 + (-1) ** i  # jumps as far as it moves
        frame[:, 7] = 2.499 if i < 5 else 2.501  # one crossing
        frame[:, 9] = 0.26 + 0.01 * i  # drifts
    model, seen = layer(8, 256), []

    def after(state: State) -> None:
        site, i = state.sites["0"], len(seen)
        seen.append((site.window is not None, site.resets))
        assert site.before is None
        assert (site.window is not None) == any(k.startswith("window") for k in site.tensors())
        acts = i in (8, 17) and action == "reset"
        mask = torch.zeros(8, 256, dtype=torch.bool)
        mask[:, 3] = mask[2, 37] = acts
        expected = torch.where(mask, fake_quantize(frames[i], FP4), frames[i])
        assert torch.equal(model[0].weight, expected), i

    play(model, policy(rule), frames, after)
    assert [i for i, (is_open, _) in enumerate(seen) if is_open] == [*range(2, 8), *range(11, 17)]
    assert [count for _, count in seen] == [0] * 8 + [9] * 9 + [18] * 3


def stepped(given: dict, rates: list[float], state: State | None = None) -> tuple[State, list[bool]]:
    """A state stepped by hand at these learning rates, and after which steps its window is open."""
    weight, state = nn.Parameter(torch.randn(4, 32)), state or State(load_policy(given))
    spec = state.policy.resolve("a", "linear").spec
    site = state.site("a", spec, lambda: weight, weight.device, width=32)
    opened = []
    for rate in rates:
        state.before_step([weight])
        state.step([weight], learning_rate=rate)
        opened.append(site.window is not None)
    return state, opened


SHORT = {"period": 3, "window": 1}  # open for steps 0 and 1 of 3


BY_FRACTION = {"start_fraction": 0.29, "total_steps": 20}  # 5.8, rounded down


@pytest.mark.parametrize(("start", "first"), [({"start_step": 4}, 4), (BY_FRACTION, 5), ({"start_lr": 0.5}, 6)])
def test_where_it_starts(start, first):
    rates = [0.1, 0.4, 0.8, 1.0, 0.8, 0.5, 0.49, 0.3, 0.6, 0.6, 0.2, 0.1]
    _, opened = stepped(policy({**start, **SHORT}), rates)
    assert opened == [i >= first and (i - first) % 3 < 2 for i in range(12)]


@pytest.mark.parametrize("cut", [2, 4, 6, 7])
def test_start_by_learning_rate_is_saved_and_restored(cut):
    given, rates = policy({"start_lr": 0.5, **SHORT}), [0.1, 0.5, 1.0, 0.6, 0.6, 0.3, 0.3, 0.9, 0.9, 0.9]
    _, whole = stepped(given, rates)
    first, _ = stepped(given, rates[:cut])
    second = State(load_policy(given))
    second.load_state_dict(first.state_dict())
    assert stepped(given, rates[cut:], second)[1] == whole[cut:]
    assert whole.index(True) == 5


def test_counted_resets_survive_loading_before_the_layer_is_compiled():
    given = policy({"start_step": 0, **SHORT})
    first = stepped(given, [1.0])[0]
    first.sites["a"].resets = 7
    second = State(load_policy(given))
    second.load_state_dict(first.state_dict())
    assert second.state_dict()["sites"]["a"]["counters"]["resets"] == 7
    assert stepped(given, [], second)[0].sites["a"].resets == 7


def test_bytes_a_parameter():
    frames, found = [torch.randn(64, 256) for _ in range(6)], []

    def after(state: State) -> None:
        site = state.sites["0"]
        assert site.before is None
        tensors = [t for k, t in site.tensors().items() if k.startswith("window")]
        found.append(sum(t.untyped_storage().nbytes() for t in tensors) / frames[0].numel())

    play(layer(64, 256), policy({"start_step": 1, "period": 6, "window": 3}), frames, after)
    assert found[0] == found[5] == 0
    assert 5.5 < min(found[1:5]) <= max(found[1:5]) <= 5.7


# ---- against the eager twin, and resumed

OFTEN = {"start_step": 1, "period": 7, "window": 4, "threshold": 1.5, "min_flips": 1}


def test_equals_eager_reference_across_windows_and_resets():
    model = Mlp()
    assert run_both(model, policy(OFTEN), [torch.randn(24, 40) for _ in range(16)]) == [1] * 16
    assert min(site.resets for site in lowbit_compile.state(model).sites.values()) > 0


def test_equals_eager_reference_under_inductor():
    given = policy(OFTEN)
    given["recipes"]["r"] = {"fprop": "nvfp4_double", "bwd": "bf16"}
    model, batches = nn.Sequential(nn.Linear(40, 40)), [torch.randn(24, 40) for _ in range(8)]
    assert run_both(model, given, batches, inner="inductor", reference="compiled") == [1] * 8
    assert lowbit_compile.state(model).sites["0"].resets > 0


@pytest.mark.parametrize("cut", [2, 4, 6])  # just opened, inside, before the reset
def test_resume_is_bitwise(cut):
    batches, given = [torch.randn(24, 40) for _ in range(9)], policy(OFTEN)
    whole = Mlp()
    first, second = copy.deepcopy(whole), Mlp()
    train(compiled(whole, given), sgd(whole, 1e-3), batches)
    train(compiled(first, given), sgd(first, 1e-3), batches[:cut])
    run = resumed(first, second, given, batches[0])
    sites, expected = lowbit_compile.state(second).sites, lowbit_compile.state(whole).sites
    assert all(site.window is not None for site in sites.values())
    train(run, sgd(second, 1e-3), batches[cut:])
    assert_same(second, whole, lowbit_compile.state(second), lowbit_compile.state(whole))
    assert [s.resets for s in sites.values()] == [s.resets for s in expected.values()]
    assert sites["mid"].resets > 0


# ---- which axis, which channels, which cast

BUSY = {"start_step": 1, "period": 50, "window": 4, "threshold": 1.5, "min_flips": 0}  # acts in step 6


def walk(rows: int, width: int, steps: int = 7) -> list[torch.Tensor]:
    """Frames of a random walk, slow against the bins."""
    return list((torch.randn(rows, width) / 16 + 0.001 * torch.randn(steps, rows, width).cumsum(0)).unbind())


def assert_reset(weight: torch.Tensor, frames: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """``weight`` is the last frame, or Q(w) where Q moved 1.5 times as far as w; ratios within bfloat16's error of 1.5
    may go either way. ``frames`` and their ``values`` are those of the steps from the first look on."""
    moved, jumped = (sum((b - a).abs() for a, b in pairwise(part[:-1])) for part in (frames, values))
    ratio = torch.where(moved > 0, jumped / moved, 0.0)
    sure = ratio > 1.5 * 1.05
    assert sure.any()
    assert torch.equal(weight[sure], values[-1][sure])
    assert torch.equal(weight[ratio < 1.5 / 1.05], frames[-1][ratio < 1.5 / 1.05])


def test_the_contraction_axis_is_watched():
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(160, 48))

        def forward(self, x):
            return x @ self.w

    frames, model = walk(48, 160), Product()
    play(model, policy(BUSY), [f.t() for f in frames], width=160)
    assert_reset(model.w.detach().t(), frames[1:], [fake_quantize(f, FP4) for f in frames[1:]])


OUTLIERS = {"fraction": 0.25, "format": "mxfp8", "observe": [0, 1]}


def test_outlier_channels_are_never_reset():
    frames, model = walk(48, 160), layer(48, 160)
    index = play(model, policy(BUSY, OUTLIERS), frames).sites["0"].channels.index
    weight = model[0].weight.detach()
    assert torch.equal(weight[:, index], frames[-1][:, index])
    assert_reset(weight, frames[1:], [fake_quantize(f.index_fill(1, index, 0.0), FP4) for f in frames[1:]])


@pytest.mark.parametrize(
    ("outliers", "schedule"),
    [
        ({**OUTLIERS, "observe": [0, 3]}, []),
        (None, [{"from_step": 3, "fprop": "bf16"}]),
        (None, [{"from_step": 3, "use": "keep"}]),
        (None, [{"from_step": 3, "until_step": 5, "use": "keep"}]),
    ],
)
def test_a_change_of_the_cast_inside_a_window_drops_it(outliers, schedule):
    frames, model, opened = walk(48, 160), layer(48, 160), []
    given = policy(BUSY, outliers, schedule=schedule)
    with pytest.warns(LowbitWarning, match=r"0: the cast of its weight changed inside an OsciReset window"):
        state = play(model, given, frames, lambda state: opened.append(state.sites["0"].window is not None))
    assert opened == [False, True, True, False, False, False, False]
    assert state.sites["0"].before is None
    assert torch.equal(model[0].weight, frames[-1])


def test_an_earlier_checkpoint_brings_its_own_cast_back():
    frames, model, saved = walk(48, 160, 9), layer(48, 160), []
    given = policy(BUSY, {**OUTLIERS, "observe": [0, 7]})  # used from step 7 on, after the window
    state = play(model, given, frames, lambda state: saved.append(copy.deepcopy(state.state_dict())))
    resets = state.sites["0"].resets
    assert resets > 0
    state.load_state_dict(saved[3])
    with torch.no_grad():
        model[0].weight.copy_(frames[3])
    play(model, given, frames[4:7])
    assert state.sites["0"].resets == resets


# ---- own training loops, several optimizers


def test_own_loop_needs_no_optimizer():
    frames, model = walk(48, 160), layer(48, 160)
    run = compiled(model, policy(BUSY))
    for frame in frames:
        run(torch.randn(4, 160)).sum().backward()
        with torch.no_grad():
            model[0].weight.copy_(frame)
        lowbit_compile.step(model)
    assert_reset(model[0].weight.detach(), frames[1:], [fake_quantize(f, FP4) for f in frames[1:]])


def test_own_loop_must_tell_the_learning_rate():
    model = layer(48, 160)
    given = {"version": 1, "extends": ["fp8_delayed"], "oscillation": {"start_lr": 0.5}}
    compiled(model, given)(torch.randn(4, 160)).sum().backward()
    state = lowbit_compile.state(model)
    before = copy.deepcopy(state.state_dict())
    with pytest.raises(StateError, match="learning_rate"):
        lowbit_compile.step(model)
    after = state.state_dict()["sites"]["0"]["tensors"]
    assert all(torch.equal(tensor, after[name]) for name, tensor in before["sites"]["0"]["tensors"].items())
    state.step(learning_rate=0.1)


def two_layers() -> nn.Module:
    return nn.Sequential(layer(160, 160), nn.ReLU(), layer(160, 160))


def test_two_optimizers_have_their_own_windows():
    model, frames, opened = two_layers(), walk(160, 160, 14), []
    run = compiled(model, policy(BUSY))
    a, b = Script(model[0].parameters(), frames), Script(model[2].parameters(), frames)
    for i in range(14):
        run(torch.randn(4, 160)).sum().backward()
        a.step()
        if i % 2:
            b.step()
        sites = lowbit_compile.state(model).sites
        opened.append([s.window is not None for s in sites.values()])
        if i in (6, 13):
            weight = model[0 if i == 6 else 2][0].weight.detach()
            assert_reset(weight, frames[1:7], [fake_quantize(f, FP4) for f in frames[1:7]])
    assert opened == [[1 <= i < 6, 3 <= i < 13] for i in range(14)]
    assert [s.steps for s in sites.values()] == [14, 7]


def test_a_second_optimizer_with_a_small_rate_starts_nothing():
    model, frames = two_layers(), walk(160, 160, 4)
    run = compiled(model, policy({"start_lr": 0.35}))
    optimizers = [Script(model[0].parameters(), frames, 0.02), Script(model[2].parameters(), frames, 0.001)]
    for _ in frames:
        run(torch.randn(4, 160)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert lowbit_compile.state(model).oscillation_start is None


# ---- policies


@pytest.mark.parametrize(
    ("rule", "place", "word"),
    [
        ({"start_step": 0, "period": 51}, "oscillation", "at least 52"),
        ({"start_step": 0, "window": 256, "period": 999}, "oscillation", "1 to 255"),
        ({"start_step": 0, "start_lr": 0.5}, "oscillation", "exactly one of start_step"),
        ({"period": 100}, "oscillation", "exactly one of start_step"),
        ({"start_fraction": 0.5}, "oscillation", "total_steps"),
        ({"start_fraction": 0.5, "total_steps": 9, "start_step": 1}, "oscillation", "drop one"),
        ({"start_step": 0, "action": "rest"}, "oscillation.action", "did you mean 'reset'"),
        ({"start_step": 0, "treshold": 4}, "oscillation.treshold", "did you mean 'threshold'"),
    ],
)
def test_a_bad_policy_is_one_error_with_its_place(rule, place, word):
    with pytest.raises(PolicyError) as caught:
        load_policy(policy(rule))
    assert str(caught.value).startswith(f"<mapping>: {place}: ")
    assert word in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
