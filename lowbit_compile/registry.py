"""What was compiled for which model: one :class:`Compiled` a root model, policy and seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from .passes import fqn
from .policy import Policy
from .report import SiteRecord
from .runtime.state import State


@dataclass
class Compiled:
    """What is known of one root model under one policy and seed."""

    state: State
    records: dict[str, SiteRecord]
    frames: Counter[tuple[Any, ...]]
    told: set[str] = field(default_factory=set)


_loads: MutableMapping[nn.Module, dict[str, Any]] = WeakIdKeyDictionary()  # saved, waiting for the first compile


def get(home: fqn.Home, policy: Policy, seed: int) -> Compiled:
    """Get or create, under this policy and seed; what was loaded beforehand for its model goes in."""
    key = (policy.id, seed)
    if key not in home.compiled:
        home.compiled[key] = Compiled(State(policy, seed), {}, Counter())
        root = home.root()
        for model in [m for m in _loads if isinstance(root, nn.Module) and _related(m, root)]:
            home.compiled[key].state.load_state_dict(_loads.pop(model))
    found: Compiled = home.compiled[key]
    return found


def _related(one: nn.Module, other: nn.Module) -> bool:
    """True where one of two models is the other or holds it."""
    return any(m is other for m in one.modules()) or any(m is one for m in other.modules())


def save_load(model: nn.Module, saved: dict[str, Any]) -> None:
    """Keep a saved state for the first compile of ``model``, or of one that holds it or is in it."""
    _loads[getattr(model, "_orig_mod", model)] = saved


def compiled_models(model: nn.Module) -> list[Compiled]:
    """Everything compiled for ``model`` (or for the model inside torch.compile's wrapper): as a root itself, as a part
    of one, or as a whole of several."""
    homes = fqn.homes_of(getattr(model, "_orig_mod", model))
    return [entry for home in homes for entry in home.compiled.values()]
