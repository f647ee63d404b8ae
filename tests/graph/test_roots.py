"""Whose state is whose: wrappers, several models in a frame, functions, several optimizers; and what is listed."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from reference import eager_twin
from test_backend import FAST, Mlp, assert_same, compiled, everywhere, train
from torch import nn

import lowbit_compile
from lowbit_compile.errors import LowbitWarning, StateError
from lowbit_compile.policy import AmaxWindow
from lowbit_compile.policy_file import load_policy
from lowbit_compile.runtime.state import State, states


def sgd(model: nn.Module, rate: float = 1e-3) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), rate)


class Wrapper(nn.Module):
    """Trains through another model, as Lightning and DDP do."""

    def __init__(self, inner: nn.Module, run: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.run = [run]

    def forward(self, x):
        return self.run[0](x)


def test_an_inner_model_called_alone_finds_the_state_of_its_wrapper():
    inner = Mlp()
    run = compiled(inner, everywhere("fp8_delayed"))
    train(Wrapper(inner, run), sgd(inner), [torch.randn(8, 40) for _ in range(3)])
    state = lowbit_compile.state(inner)
    with torch.no_grad():
        run(torch.randn(8, 40))
    assert lowbit_compile.state(inner) is state
    assert state.step_number == 3
    assert set(state.sites) == {"inner.up", "inner.mid", "inner.down"}


def test_reentrant_checkpoint_recomputes_under_the_same_state():
    model = nn.Sequential(Mlp(), Mlp())
    for block in model:
        block.compile(backend="lowbit", options={"policy": everywhere("fp8_delayed"), **FAST})

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = model

        def forward(self, x):
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
            return x

    outer = Outer()
    outer(torch.randn(8, 40, requires_grad=True)).sum().backward()
    state = lowbit_compile.state(outer)
    assert set(state.sites) == {f"blocks.{i}.{n}" for i in range(2) for n in ("up", "mid", "down")}
    assert all(site.acc_g > 0 for site in state.sites.values())


def test_two_models_in_one_frame_have_a_state_each():
    first, second = Mlp(), nn.Sequential(nn.Linear(40, 40))

    def loss(a, b, x):
        return b(a(x)).pow(2).sum()

    run = torch.compile(loss, backend="lowbit", options={"policy": everywhere("fp8_delayed"), **FAST})
    run(first, second, torch.randn(8, 40)).backward()
    assert set(lowbit_compile.state(first).sites) == {"up", "mid", "down"}
    assert set(lowbit_compile.state(second).sites) == {"0"}


def test_a_plain_class_that_holds_the_model():
    class Trainer:
        def __init__(self) -> None:
            self.model = Mlp()

        def loss(self, x):
            return self.model(x).sum()

    trainer = Trainer()
    run = torch.compile(trainer.loss, backend="lowbit", options={"policy": everywhere("fp8_delayed"), **FAST})
    run(torch.randn(8, 40)).backward()
    assert [r.path for r in lowbit_compile.report(trainer.model).records] == ["up", "mid", "down"]


def test_a_weight_that_no_module_owns_has_a_state_that_advances():
    weight = nn.Parameter(torch.randn(32, 32))
    run = torch.compile(lambda x: F.linear(x, weight), backend="lowbit", options={"policy": "tetrajet_v2", **FAST})
    optimizer = torch.optim.SGD([weight], 0.0)
    x, grads = torch.randn(16, 32), []
    for _ in range(2):
        optimizer.zero_grad()
        run(x).pow(2).sum().backward()
        grads.append(weight.grad.clone())
        optimizer.step()
    assert not torch.equal(*grads)
    assert any(site.weight() is weight and site.steps == 2 for s in states() for site in s.sites.values())


class Forms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(48, 160)), nn.Parameter(torch.randn(160, 48))
        self.c, self.d = nn.Parameter(torch.randn(160, 48)), nn.Parameter(torch.randn(48, 160))
        self.e = nn.Parameter(torch.randn(48, 160, dtype=torch.float64).float())

    def forward(self, x):
        twice = self.a.t().t()
        return F.linear(x, twice), x @ self.b, F.linear(x, self.c.t()), x @ self.d.transpose(0, 1), x @ self.e.mT


def test_the_state_sees_every_weight_along_the_contraction_axis():
    model = Forms()
    compiled(model, "tetrajet_v2")(torch.randn(8, 160))
    sites = lowbit_compile.state(model).sites
    assert {path: tuple(site.matrix().shape) for path, site in sites.items()} == dict.fromkeys("abcde", (48, 160))


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("quantized", [0, 1])
def test_a_gemm_with_one_quantized_operand(gemm, quantized):
    names = {"fprop": ("x", "w"), "dgrad": ("g", "w"), "wgrad": ("g", "x")}
    recipe = {name: dict.fromkeys(operands, "bf16") for name, operands in names.items()}
    recipe[gemm][names[gemm][quantized]] = "fp8_row"
    policy = {"version": 1, "recipes": {"r": recipe}, "rules": [{"match": "*", "use": "r"}]}
    model = nn.Sequential(nn.Linear(64, 48))
    plain = copy.deepcopy(model)
    x = torch.randn(32, 64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    compiled(model, policy)(x).pow(2).sum().backward()
    plain(y).pow(2).sum().backward()
    for mine, theirs in ((x.grad, y.grad), (model[0].weight.grad, plain[0].weight.grad)):
        assert (mine - theirs).norm() < 0.05 * theirs.norm()  # e4m3 rounds by at most 2^-4 of a value


def test_ema_with_a_margin_stays_where_the_amax_is():
    policy = load_policy({"version": 1, "extends": ["fp8_delayed"], "amax": {"algorithm": "ema", "margin": 1}})
    assert policy.amax == AmaxWindow(64, "ema", 1)
    weight = nn.Parameter(torch.ones(4, 32))
    state = State(policy)
    site = state.site("a", policy.rules[0].spec, lambda: weight, weight.device, width=32)
    site.observed = True
    for _ in range(50):
        site.acc_x.fill_(1.0)
        site.acc_g.fill_(1.0)
        state.step()
    torch.testing.assert_close(site.amax, torch.full((3,), 2.0))


def test_an_error_of_the_policy_is_there_again_at_the_next_call():
    policy = {"version": 1, "extends": ["mxfp8"], "rules": [{"match": "nope", "use": "keep", "reason": "x"}]}
    run = compiled(Mlp(), policy)
    for _ in range(2):
        with pytest.raises(Exception, match="nope"):
            run(torch.randn(8, 40))


def test_a_linear_behind_a_graph_break_is_not_missed():
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.w = nn.Embedding(8, 32), nn.Parameter(torch.randn(32, 32))

        def forward(self, i):
            x = self.embed(i)
            torch._dynamo.graph_break()
            return x @ self.w

    model = Broken()
    policy = {"version": 1, "extends": ["mxfp8"], "rules": [{"match": "w", "use": "mxfp8"}]}
    compiled(model, policy)(torch.arange(8))
    assert [r.path for r in lowbit_compile.report(model).records] == ["w"]


def test_a_computed_weight_is_listed_with_what_is_in_the_way():
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), nn.Linear(32, 32))
    compiled(model, "mxfp8")(torch.randn(8, 32))
    reasons = [r.reason for r in lowbit_compile.report(model).records]
    assert len(reasons) == 2
    assert sum("computed from a parameter" in r for r in reasons) == 1


def test_linears_in_cond_are_kept_with_a_reason():
    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(32, 32) for _ in range(3))

        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: self.a(x), lambda x: self.b(x), (self.c(x),))

    model = Switch()
    with torch.no_grad():
        assert compiled(model, "mxfp8")(torch.randn(8, 32)).shape == (8, 32)
    found = {r.path: r.reason for r in lowbit_compile.report(model).records}
    assert found["c"] == ""
    assert "torch.cond" in found["a"]
    assert "torch.cond" in found["b"]


def test_a_state_loaded_before_the_first_compile_waits_for_it():
    batches = [torch.randn(24, 40) for _ in range(6)]
    whole, twin = Mlp(), Mlp()
    twin.load_state_dict(whole.state_dict())
    run = compiled(whole, "tetrajet_v2")
    train(run, sgd(whole), batches)
    train(compiled(twin, "tetrajet_v2"), sgd(twin), batches[:3])
    saved = lowbit_compile.state(twin).state_dict()
    saved["sites"] = {f"module.{path}": site for path, site in saved["sites"].items()}  # as under DDP
    resumed = Mlp()
    resumed.load_state_dict(twin.state_dict())
    lowbit_compile.load_state_dict(resumed, saved)
    train(compiled(resumed, "tetrajet_v2"), sgd(resumed), batches[3:])
    assert_same(resumed, whole, lowbit_compile.state(resumed), lowbit_compile.state(whole))


def test_loading_is_all_or_nothing_and_says_what_nobody_claims():
    model = Mlp()
    run = compiled(model, everywhere("fp8_delayed"))
    train(run, sgd(model), [torch.randn(8, 40)])
    state = lowbit_compile.state(model)
    good = state.state_dict()
    bad = copy.deepcopy(good)
    bad["sites"]["down"]["tensors"]["amax"] = torch.zeros(7)
    bad["sites"]["up"]["tensors"]["amax"] += 1
    with pytest.raises(StateError, match=r"down\.amax"):
        state.load_state_dict(bad)
    assert torch.equal(state.sites["up"].amax, good["sites"]["up"]["tensors"]["amax"])
    with pytest.raises(StateError, match=r"lacks .*step"):
        state.load_state_dict({"policy": good["policy"]})
    good["sites"]["other.layer"] = good["sites"]["up"]
    state.load_state_dict(good)
    with pytest.warns(LowbitWarning, match=r"other\.layer"):
        train(run, sgd(model), [torch.randn(8, 40)])


def test_the_clock_follows_whichever_optimizer_steps():
    model = Mlp()
    run = compiled(model, everywhere("fp8_delayed"))
    idle, used = sgd(model), sgd(model)
    train(run, idle, [torch.randn(8, 40)])
    train(run, used, [torch.randn(8, 40) for _ in range(3)])
    assert lowbit_compile.state(model).step_number == 4
    halves = [torch.optim.SGD([p], 1e-3) for p in (model.up.weight, model.down.weight)]
    for _ in range(2):
        run(torch.randn(8, 40)).sum().backward()
        for optimizer in halves:
            optimizer.step()
    assert lowbit_compile.state(model).step_number == 6


def test_an_optimizer_without_a_learning_rate():
    class Plain(torch.optim.Optimizer):
        def __init__(self, parameters) -> None:
            super().__init__(parameters, {})

        def step(self, closure=None):
            return None

    model = Mlp()
    run = compiled(model, everywhere("fp8_delayed"))
    run(torch.randn(8, 40)).sum().backward()
    Plain(model.parameters()).step()
    assert lowbit_compile.state(model).step_number == 1


def test_two_policies_on_one_model_are_told_apart():
    model = Mlp()
    for policy in ("mxfp8", "tetrajet_v2"):
        compiled(model, policy)(torch.randn(8, 40))
        torch._dynamo.reset()
    with pytest.raises(lowbit_compile.UnsupportedError, match="2 states"):
        lowbit_compile.state(model)
    assert lowbit_compile.state(model, "mxfp8").policy == load_policy("mxfp8")


@pytest.mark.parametrize("preset", ["fp8_rowwise", "nvfp4_nvidia", "hif8_max_window"])
def test_other_presets_equal_the_reference_under_inductor_for_any_token_count(preset):
    model = Mlp()
    policy = everywhere(preset)
    twin, twin_state = eager_twin(model, policy)
    run = torch.compile(model, backend="lowbit", dynamic=True, options={"policy": policy})
    batches = [torch.randn(n, 40) for n in (16, 23, 40, 17, 64)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", LowbitWarning)
        losses = train(run, sgd(model), batches)
    assert torch.equal(losses, train(twin, sgd(twin), batches))
    assert_same(model, twin, lowbit_compile.state(model), twin_state)
