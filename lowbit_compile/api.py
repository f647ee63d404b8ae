"""What a user calls on a compiled model: its report, its state, a step, a load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from .errors import UnsupportedError
from .policy import Policy
from .policy_file import load_policy
from .registry import compiled_models, save_load
from .report import Report
from .runtime.state import State


def report(model: nn.Module) -> Report:
    """The records, graphs and recompiles of ``model``. Empty if it was never compiled by this backend."""
    result = Report()
    for compiled in compiled_models(model):
        result.records += compiled.records.values()
        result.graphs += sum(compiled.frames.values())
        result.recompiles += sum(n - 1 for n in compiled.frames.values())
    return result


def state(model: nn.Module, policy: str | os.PathLike[str] | Mapping[str, Any] | Policy | None = None) -> State:
    """The runtime state of ``model``, for saving, and for own training loops.

    ``policy`` says which, where the model was compiled under several. Before the first compile there is none: see
    :func:`load_state_dict`.
    """
    found = [c.state for c in compiled_models(model)]
    if policy is not None:
        wanted = load_policy(policy).id
        found = [s for s in found if s.policy.id == wanted]
    if len(found) != 1:
        raise UnsupportedError(
            f"{type(model).__name__} has {len(found)} states here, one is needed: it must have run once, "
            "and under several policies state() needs the policy"
        )
    return found[0]


def load_state_dict(model: nn.Module, saved: dict[str, Any]) -> None:
    """Restore what ``state(model).state_dict()`` gave; before the model has run, it waits for the first compile."""
    if compiled_models(model):
        state(model).load_state_dict(saved)
    else:
        save_load(model, saved)


def step(model: nn.Module, *, learning_rate: float | None = None) -> None:
    """Advance ``model``'s state by one step: for training loops that don't use a torch optimizer.

    ``learning_rate`` of this step is needed where the policy's OsciReset starts at a learning rate (``start_lr``).
    """
    state(model).step(learning_rate=learning_rate)
