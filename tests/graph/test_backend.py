"""The backend end to end on CPU: matching, bit equality with the eager reference, state, errors."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from reference import eager_twin, parameters
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowbit_compile
from lowbit_compile.policy_file import load_policy
from lowbit_compile.quantize import fake_quantize

FAST = {"inner": "aot_eager", "reference": "eager"}
QUANTIZED = ["fp8_rowwise", "fp8_delayed", "mxfp8", "nvfp4_nvidia", "tetrajet_v2", "hif8_max_window"]


class Mlp(nn.Module):
    """Widths that are no multiple of a block, with and without bias, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(40, 72), nn.Linear(72, 72, bias=False), nn.Linear(72, 40)

    def forward(self, x):
        h = F.relu(self.up(x))
        return x + self.down(h + F.relu(self.mid(h)))


def everywhere(preset: str) -> dict:
    """``preset`` from step 0: the warm-up of a schedule is tested apart."""
    policy = {"version": 1, "extends": [preset]}
    return policy if preset != "hif8_max_window" else {**policy, "schedule": []}


def compiled(model: nn.Module, policy: object, **options: object) -> nn.Module:
    return torch.compile(model, backend="lowbit", options={"policy": policy, **FAST, **options})


def train(model, optimizer, batches, after=lambda: None, dtype=None):
    losses = []
    for x in batches:
        optimizer.zero_grad()
        loss = (model(x) * torch.linspace(-1, 1, x.shape[-1])).pow(2).sum()
        loss.backward()
        optimizer.step()
        after()
        losses.append(loss.detach())
    return torch.stack(losses)


def assert_same(model, twin, state, twin_state):
    for (name, p), (other, q) in zip(parameters(model).items(), parameters(twin).items(), strict=True):
        assert name == other
        assert torch.equal(p, q), f"{name} differs in {(p != q).sum()} of {p.numel()}"
        assert torch.equal(p.grad, q.grad), f"{name}.grad differs"
    for path, site in twin_state.sites.items():
        for key, tensor in site.tensors().items():
            assert torch.equal(state.sites[path].tensors()[key], tensor), f"{path}.{key}"


def run_both(policy, batches, **options):
    model = Mlp()
    twin, twin_state = eager_twin(model, policy)
    run = compiled(model, policy, **options)
    losses = train(run, torch.optim.SGD(model.parameters(), 1e-3), batches)
    # the global hook must not step the twin's state: it belongs to no model that the optimizer owns
    twin_optimizer = torch.optim.SGD(twin.parameters(), 1e-3)
    expected = train(twin, twin_optimizer, batches)
    assert torch.equal(losses, expected)
    assert_same(model, twin, lowbit_compile.state(model), twin_state)
    return model, run


def test_registered_by_entry_point_without_import():
    code = (
        "import torch, sys; assert 'lowbit' in torch._dynamo.list_backends(); "
        "assert 'lowbit_compile' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("preset", QUANTIZED)
def test_equals_eager_reference_over_20_steps(preset):
    batches = [torch.randn(24, 40) * (1 + i % 3) for i in range(20)]
    model, _ = run_both(everywhere(preset), batches)
    report = lowbit_compile.report(model)
    assert [r.path for r in report.records] == ["up", "mid", "down"]
    assert (report.graphs, report.recompiles) == (1, 0)


@pytest.mark.parametrize("preset", ["tetrajet_v2", "fp8_delayed"])
def test_equals_eager_reference_under_inductor(preset):
    batches = [torch.randn(24, 40) for _ in range(20)]
    run_both(everywhere(preset), batches, inner="inductor", reference="compiled")


@pytest.mark.parametrize("preset", ["tetrajet_v2", "fp8_delayed"])
def test_dynamic_token_counts(preset):
    model = Mlp()
    policy = everywhere(preset)
    twin, twin_state = eager_twin(model, policy)
    run = torch.compile(model, backend="lowbit", dynamic=True, fullgraph=True, options={"policy": policy, **FAST})
    batches = [torch.randn(n, 40) for n in (16, 23, 40, 17, 64)]
    losses = train(run, torch.optim.SGD(model.parameters(), 1e-3), batches)
    expected = train(twin, torch.optim.SGD(twin.parameters(), 1e-3), batches)
    assert torch.equal(losses, expected)
    assert_same(model, twin, lowbit_compile.state(model), twin_state)
    assert lowbit_compile.report(model).graphs == 1


@pytest.mark.parametrize("preset", ["tetrajet_v2", "fp8_delayed"])
def test_checkpoint_changes_nothing(preset):
    class Checkpointed(Mlp):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    plain = Mlp()
    other = Checkpointed()
    other.load_state_dict(plain.state_dict())
    batches = [torch.randn(24, 40) for _ in range(4)]
    results = []
    for model in (plain, other):
        run = compiled(model, everywhere(preset))
        results.append(train(run, torch.optim.SGD(model.parameters(), 1e-3), batches))
    assert torch.equal(*results)
    assert_same(other, plain, lowbit_compile.state(other), lowbit_compile.state(plain))


def test_gradient_accumulation_takes_the_max_and_steps_once():
    model = Mlp()
    run = compiled(model, everywhere("fp8_delayed"))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    small, large = torch.randn(8, 40), 7 * torch.randn(8, 40)
    first, second = run(small).sum(), run(large).sum()
    first.backward()
    second.backward()
    optimizer.step()
    state = lowbit_compile.state(model)
    assert state.step_number == 1
    assert state.sites["up"].history[0, 0] == large.abs().max()
    assert state.sites["up"].history[1, 0] == 0
    assert state.sites["up"].seed[2] == 1


def test_eval_leaves_state_alone():
    model = Mlp()
    run = compiled(model, everywhere("fp8_delayed"))
    train(run, torch.optim.SGD(model.parameters(), 1e-3), [torch.randn(8, 40)])
    before = copy.deepcopy(lowbit_compile.state(model).state_dict())
    model.eval()
    with torch.no_grad():
        run(100 * torch.randn(8, 40))
    with torch.inference_mode():
        run(100 * torch.randn(8, 40))
    after = lowbit_compile.state(model).state_dict()
    for path, site in before["sites"].items():
        for key, tensor in site["tensors"].items():
            assert torch.equal(tensor, after["sites"][path]["tensors"][key]), (path, key)


def test_schedule_recompiles_once_per_boundary():
    policy = {
        "version": 1,
        "extends": ["hif8_max_window"],
        "schedule": [{"until_step": 3, "use": "keep", "observe": True}],
    }
    batches = [torch.randn(24, 40) for _ in range(8)]
    model, _ = run_both(policy, batches)
    report = lowbit_compile.report(model)
    assert report.graphs == 2
    plain = train(copy.deepcopy(Mlp()), torch.optim.SGD(Mlp().parameters(), 1e-3), batches[:1])
    assert plain.isfinite().all()


def test_resume_is_bitwise():
    batches = [torch.randn(24, 40) for _ in range(8)]
    whole = Mlp()
    start = copy.deepcopy(whole.state_dict())
    train(compiled(whole, "tetrajet_v2"), torch.optim.SGD(whole.parameters(), 1e-3), batches)
    first = Mlp()
    first.load_state_dict(start)
    train(compiled(first, "tetrajet_v2"), torch.optim.SGD(first.parameters(), 1e-3), batches[:4])
    saved = lowbit_compile.state(first).state_dict()
    second = Mlp()
    second.load_state_dict(first.state_dict())
    run = compiled(second, "tetrajet_v2")
    with torch.no_grad():
        run(batches[0])
    lowbit_compile.state(second).load_state_dict(saved)
    train(run, torch.optim.SGD(second.parameters(), 1e-3), batches[4:])
    for p, q in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)


class Forms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(32, 32)
        self.b = nn.Parameter(torch.randn(32, 32) / 6)
        self.c = nn.Parameter(torch.randn(32, 32) / 6)
        self.d = nn.Parameter(torch.randn(32, 32) / 6)
        self.e = nn.Parameter(torch.randn(32, 32) / 6)
        self.bias = nn.Parameter(torch.randn(32))

    def forward(self, x):
        return self.a(x), F.linear(x, self.b), x @ self.c, x @ self.d.T, torch.addmm(self.bias, x, self.e)


def test_every_form_is_matched_in_both_orientations():
    model = Forms()
    policy = load_policy("mxfp8")
    x = torch.randn(16, 32)
    outputs = compiled(model, policy)(x)
    records = lowbit_compile.report(model).records
    assert {(r.path, r.kind) for r in records} == {
        ("a", "linear"), ("b", "linear"), ("c", "matmul"), ("d", "matmul"), ("e", "addmm")
    }  # fmt: skip
    spec = policy.resolve("a", "linear").spec
    weights = [model.a.weight, model.b, model.c.T, model.d, model.e.T]
    biases = [model.a.bias, None, None, None, model.bias]
    for y, w, bias in zip(outputs, weights, biases, strict=True):
        expected = fake_quantize(x, spec.fprop.a) @ fake_quantize(w, spec.fprop.b).t()
        torch.testing.assert_close(y, expected if bias is None else expected + bias, rtol=1e-5, atol=1e-5)


def test_tied_head_is_named_after_the_head():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lm_head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
            self.body = nn.Linear(32, 32)
            self.lm_head.weight = self.embed.weight

        def forward(self, i):
            return self.lm_head(self.body(self.embed(i)))

    model = Tied()
    compiled(model, "tetrajet_v2")(torch.arange(16))
    kept = {r.path: r.reason for r in lowbit_compile.report(model).records}
    assert kept["body"] == ""
    assert "head" in kept["lm_head"]


def test_two_models_and_repeated_blocks_have_their_own_state():
    a, b = (nn.Sequential(Mlp(), Mlp()) for _ in range(2))
    for model in (a, b):
        for block in model:
            block.compile(backend="lowbit", options={"policy": everywhere("fp8_delayed"), **FAST})
        train(model, torch.optim.SGD(model.parameters(), 1e-3), [torch.randn(8, 40)])
    states = [lowbit_compile.state(m) for m in (a, b)]
    paths = {f"{i}.{n}" for i in range(2) for n in ("up", "mid", "down")}
    for state in states:
        assert set(state.sites) == paths
        assert all((s.amax > 0).all() for s in state.sites.values())


@pytest.mark.parametrize("preset", ["tetrajet_v2", "fp8_delayed"])
def test_autocast_grad_scaler_and_accumulation_equal_the_reference(preset):
    model = Mlp()
    twin, twin_state = eager_twin(model, everywhere(preset))
    batches = [torch.randn(24, 40) for _ in range(6)]
    for module, run in ((model, compiled(model, everywhere(preset))), (twin, twin)):
        optimizer = torch.optim.SGD(module.parameters(), 1e-4)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            optimizer.zero_grad()
            for x in (first, second):
                with torch.autocast("cpu", torch.bfloat16):
                    y = run(x)
                scaler.scale(y.float().pow(2).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert model.up.weight.grad.dtype == torch.float32
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert_same(model, twin, lowbit_compile.state(model), twin_state)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_change_no_bit(mode):
    model = Mlp()
    twin = copy.deepcopy(model)
    x = torch.randn(24, 40)
    options = {"policy": "mxfp8", "mode": mode, "reference": "eager"}
    run = torch.compile(model, backend="lowbit", options=options)
    assert torch.equal(run(x), compiled(twin, "mxfp8")(x))


def test_nan_input_is_not_laundered():
    for preset in QUANTIZED:
        model = Mlp()
        x = torch.randn(24, 40)
        x[5, 7] = float("nan")
        y = compiled(model, everywhere(preset))(x)
        assert y[5].isnan().all(), preset
        torch._dynamo.reset()


def test_a_linear_that_feeds_the_next():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    twin, twin_state = eager_twin(model, "tetrajet_v2")
    batches = [torch.randn(16, 32) for _ in range(3)]
    losses = train(compiled(model, "tetrajet_v2"), torch.optim.SGD(model.parameters(), 1e-3), batches)
    assert torch.equal(losses, train(twin, torch.optim.SGD(twin.parameters(), 1e-3), batches))
    assert_same(model, twin, lowbit_compile.state(model), twin_state)


def test_empty_batch():
    model = Mlp()
    run = compiled(model, "tetrajet_v2")
    assert run(torch.randn(0, 40)).shape == (0, 40)


@pytest.mark.parametrize("preset", QUANTIZED)
def test_backward_keeps_the_quantized_operand(preset):
    """Of x, what is saved is codes and scales; the weight is saved as itself."""
    model = nn.Sequential(nn.Linear(256, 128, bias=False))
    run = compiled(model, everywhere(preset))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run(torch.randn(64, 256))
    assert any(t.dtype == torch.uint8 for t in saved)
    weight = model[0].weight.data_ptr()
    floats = [t for t in saved if t.is_floating_point() and t.data_ptr() != weight]
    assert sum(t.nbytes for t in floats) <= 256 * 4 + 64  # a scale for each row of x^T, and the state
