"""On a CUDA device: the same bits as on the CPU, eager and compiled, and training equal to the eager reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from reference import eager_twin, parameters
from torch import nn

import lowbit_compile
from lowbit_compile.jobs import Cast
from lowbit_compile.ops import run_cast, run_dequantize
from lowbit_compile.policy_file import load_policy
from lowbit_compile.spec import GEMMS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PRESETS = ["fp8_rowwise", "fp8_delayed", "mxfp8", "nvfp4_nvidia", "tetrajet_v2", "hif8_max_window"]


def casts() -> list[Cast]:
    """Every cast that the presets make, once."""
    found = {}
    for preset in PRESETS:
        spec = load_policy(preset).resolve("fc", "linear").spec
        assert spec is not None
        for gemm, names in GEMMS.items():
            pair = getattr(spec, gemm)
            for name, operand in zip(names, (pair.a, pair.b), strict=True):
                if operand.quantized:
                    found[str(operand)] = Cast(f"{gemm}.{name}", operand)
    return list(found.values())


@pytest.mark.parametrize("cast", casts(), ids=str)
def test_a_cast_has_the_same_bits_on_both_devices(cast: Cast) -> None:
    x = torch.randn(96, 200) * torch.logspace(-6, 6, 96)[:, None]
    x[3], x[5, 7], x[9, 11], x[20, :16] = 0.0, float("nan"), float("inf"), 1e-40
    amax, seed = torch.tensor([3.0, 3.0, 3.0]), torch.tensor([1, 2, 3, 4])
    expected = run_cast("eager", x, amax, seed, cast)
    values = run_dequantize("eager", expected, cast.spec)
    for impl in ("eager", "compiled"):
        payload = run_cast(impl, x.cuda(), amax.cuda(), seed.cuda(), cast)
        for mine, theirs in zip(payload, expected, strict=True):
            assert torch.equal(mine.cpu().nan_to_num(-1.0), theirs.nan_to_num(-1.0)), impl
        read = run_dequantize(impl, payload, cast.spec).cpu()
        assert torch.equal(read.nan_to_num(-1.0), values.nan_to_num(-1.0)), impl


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(160, 288), nn.Linear(288, 288, bias=False), nn.Linear(288, 160)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.up(x))
        return x + self.down(h + F.relu(self.mid(h)))


def train(model: nn.Module, run: nn.Module, batches: list[torch.Tensor]) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    losses = []
    for x in batches:
        optimizer.zero_grad()
        loss = run(x).pow(2).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("preset", PRESETS)
def test_training_equals_the_eager_reference_over_20_steps(preset: str) -> None:
    policy = {"version": 1, "extends": [preset]} | ({"schedule": []} if preset == "hif8_max_window" else {})
    model = Mlp().cuda()
    twin, twin_state = eager_twin(model, policy)
    run = torch.compile(model, backend="lowbit", options={"policy": policy, "kernels": "off"})
    batches = [torch.randn(48, 160, device="cuda") for _ in range(20)]
    assert torch.equal(train(model, run, batches), train(twin, twin, batches))
    for (name, p), q in zip(parameters(model).items(), parameters(twin).values(), strict=True):
        assert torch.equal(p, q), name
    state = lowbit_compile.state(model)
    for path, site in twin_state.sites.items():
        for key, tensor in site.tensors().items():
            assert torch.equal(state.sites[path].tensors()[key], tensor), (path, key)
    assert lowbit_compile.report(model).recompiles == 0


@pytest.mark.parametrize("preset", PRESETS)
def test_kernels_train_like_the_reference(preset: str) -> None:
    """Casts have the reference's bits and products only another order of additions, so the losses hardly differ."""
    policy = {"version": 1, "extends": [preset]} | ({"schedule": []} if preset == "hif8_max_window" else {})
    models = [Mlp().cuda() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    batches = [torch.randn(48, 160, device="cuda") for _ in range(20)]
    losses = []
    for model, kernels in zip(models, ("auto", "off"), strict=True):
        run = torch.compile(model, backend="lowbit", options={"policy": policy, "kernels": kernels})
        with torch.autocast("cuda", torch.bfloat16):
            losses.append(train(model, run, batches))
        made = {record.implementation for record in lowbit_compile.report(model).records}
        assert made == {"triton"} if kernels == "auto" else all("reference" in m for m in made)
    torch.testing.assert_close(losses[0], losses[1], rtol=2e-2, atol=0)


def test_the_first_step_of_kernels_and_reference_agree_closely() -> None:
    """One step of tetrajet_v2: parameters move alike, to a few BF16 roundings of the gradient."""
    models = [nn.Linear(256, 512).cuda() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(192, 256, device="cuda")
    grads = []
    for model, kernels in zip(models, ("auto", "off"), strict=True):
        run = torch.compile(model, backend="lowbit", options={"policy": "tetrajet_v2", "kernels": kernels})
        with torch.autocast("cuda", torch.bfloat16):
            y = run(x)
        (y.float() * torch.linspace(-1, 1, 512, device="cuda")).sum().backward()
        grads.append(model.weight.grad)
    assert (grads[0] - grads[1]).norm() <= 1e-2 * grads[1].norm()
