"""An eager reference of a policy: every nn.Linear swapped for one that calls the op directly, state kept by hand.

No Dynamo, no graph pass, no optimizer hook: what the backend has to reproduce bit for bit.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

import lowbit_compile.linear  # noqa: F401  (registers the op)
from lowbit_compile.policy import Policy
from lowbit_compile.policy_file import load_policy
from lowbit_compile.runtime.state import State


class EagerLinear(nn.Module):
    def __init__(self, inner: nn.Linear, path: str, state: State, policy: Policy) -> None:
        super().__init__()
        self.inner, self.path, self.state, self.policy = inner, path, state, policy
        weight, spec = inner.weight, policy.resolve(path, "linear").spec
        self.site = spec and state.site(path, spec, lambda: inner.weight, weight.device, width=weight.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        if self.site is None:
            return self.inner(x)
        s, c = self.site, self.site.channels
        now, train = self.state.numerics(s), torch.is_grad_enabled()
        now = replace(now, observe=now.observe and train, watch=now.watch and train)
        s.observed |= now.observe
        return torch.ops.lowbit.linear(
            x, self.inner.weight, self.inner.bias, s.amax, s.acc_x, s.acc_g, s.seed,
            c.index if c else None, c.acc if c else None, str(now), "eager",
        )  # fmt: skip


def eager_twin(model: nn.Module, policy: object) -> tuple[nn.Module, State]:
    """A deep copy of ``model`` under ``policy``, and its state, to be stepped by hand."""
    twin = copy.deepcopy(model)
    loaded = load_policy(policy)  # type: ignore[arg-type]
    state = State(loaded)
    for path, module in list(twin.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, name = path.rpartition(".")
            setattr(twin.get_submodule(parent), name, EagerLinear(module, path, state, loaded))
    return twin, state


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {n.replace(".inner", ""): p for n, p in model.named_parameters()}
