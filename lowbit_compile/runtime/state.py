"""Runtime state of one root model: per-linear tensors that graphs read, and the one update per optimizer step.

Inside graphs only ``acc = max(acc, amax)`` happens (idempotent); everything else happens in :meth:`State.step`, so
recompute, gradient accumulation and graph replay can't count twice. A step counter never reaches a traced frame:
graphs depend on the schedule only through a guard on the state's entry in :mod:`.phases`.
"""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..errors import StateError
from ..policy import Policy
from ..schedule import phase_index
from . import phases

ROLES = ("x", "w", "g")


@dataclass
class SiteState:
    """Tensors of one linear; they never move, so compiled graphs keep their pointers.

    ``amax`` f32[3]: amax of x, w, g used for delayed scaling, 0 = nothing observed yet; read-only in graphs.
    ``acc_x``, ``acc_g`` f32[]: running max of this step, written by forward and by backward only.
    ``seed`` i64[4]: key words, optimizer step, site number (see :mod:`..random_bits`); read-only in graphs.
    ``history`` f32[window, 3], newest first. ``ignored``: zero or non-finite amaxes that kept the old scale, per role.
    """

    path: str
    amax: Tensor
    acc_x: Tensor
    acc_g: Tensor
    seed: Tensor
    history: Tensor
    ignored: list[int] = field(default_factory=lambda: [0, 0, 0])
    observed: bool = False
    weight: Callable[[], Tensor | None] = lambda: None

    @classmethod
    def create(cls, path: str, window: int, seed: int, device: torch.device) -> SiteState:
        words = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, 0, zlib.crc32(path.encode())]

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        key = torch.tensor(words, dtype=torch.int64, device=device)
        return cls(path, zeros(3), zeros(), zeros(), key, zeros(window, 3))

    def tensors(self) -> dict[str, Tensor]:
        return {"amax": self.amax, "acc_x": self.acc_x, "acc_g": self.acc_g, "seed": self.seed, "history": self.history}


class State:
    """All sites of one root model under one policy. Compared by identity; holds the model weakly."""

    def __init__(self, root: nn.Module | None, policy: Policy, seed: int = 0) -> None:
        self.policy = policy
        self.seed = seed
        self.step_number = 0
        self.phase_name = f"state{next(_numbers)}"
        self.phase = 0
        self.sites: dict[str, SiteState] = {}
        self._root = weakref.ref(root) if root is not None else None
        self._primary: weakref.ref[Any] | None = None
        _live.add(self)

    @property
    def phase(self) -> int:
        """Number of schedule boundaries passed."""
        return int(getattr(phases, self.phase_name))

    @phase.setter
    def phase(self, value: int) -> None:
        setattr(phases, self.phase_name, value)

    @property
    def root(self) -> nn.Module | None:
        return self._root() if self._root else None

    def site(self, path: str, weight: Callable[[], Tensor | None], device: torch.device) -> SiteState:
        """Get or create; a second compile of the same layer shares its tensors."""
        if path not in self.sites:
            created = SiteState.create(path, self.policy.amax.window, self.seed, device)
            created.seed[2] = self.step_number
            self.sites[path] = created
        self.sites[path].weight = weight
        return self.sites[path]

    @torch.no_grad()
    def step(self, parameters: Iterable[Tensor] | None = None, *, advance: bool = True) -> None:
        """Once per optimizer step: roll windows, set scales, advance seeds and the schedule.

        ``parameters``: only sites whose weight is among them (or that nobody trains) are rolled; None = all.
        """
        owned = None if parameters is None else {id(p) for p in parameters}
        sites = [s for s in self.sites.values() if owned is None or self._belongs(s, owned, advance)]
        if sites:
            self._roll([s for s in sites if s.observed])
            torch._foreach_add_([s.seed[2] for s in sites], 1)
        if advance:
            self.step_number += 1
            self.phase = phase_index(self.policy, self.step_number)

    @staticmethod
    def _belongs(site: SiteState, owned: set[int], advance: bool) -> bool:
        weight = site.weight()
        trained = weight is not None and weight.requires_grad
        return id(weight) in owned if trained else advance

    def _roll(self, sites: list[SiteState]) -> None:
        if not sites:
            return
        weights = [w.detach() if (w := s.weight()) is not None else s.amax[1:2] for s in sites]
        norms = torch._foreach_norm(weights, float("inf"))
        rule = self.policy.amax
        for site, norm in zip(sites, norms, strict=True):
            now = torch.stack([site.acc_x, norm.float().reshape(()), site.acc_g])
            good = torch.isfinite(now) & (now > 0)
            rolled = torch.cat([now[None], site.history[:-1]])
            site.history.copy_(torch.where(good, rolled, site.history))
            if rule.algorithm == "most_recent":
                value = site.history[0]
            elif rule.algorithm == "ema":
                value = torch.where(site.amax > 0, 0.9 * site.amax + 0.1 * site.history[0], site.history[0])
            else:
                value = site.history.amax(0)
            site.amax.copy_(torch.where(good, value * 2.0**rule.margin, site.amax))
            site.ignored = [n + int(not ok) for n, ok in zip(site.ignored, good.tolist(), strict=True)]
            site.acc_x.zero_()
            site.acc_g.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers: enough to resume bit for bit."""
        return {
            "version": 1,
            "policy": self.policy.id,
            "step": self.step_number,
            "sites": {p: {k: t.clone() for k, t in s.tensors().items()} for p, s in self.sites.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Copies in place, so compiled graphs stay valid. Sites not compiled yet are created."""
        if saved["policy"] != self.policy.id:
            raise StateError(f"state was saved under policy {saved['policy']}, this model runs policy {self.policy.id}")
        for path, tensors in saved["sites"].items():
            site = self.sites.get(path) or self.site(path, lambda: None, tensors["amax"].device)
            for name, tensor in site.tensors().items():
                if tensor.shape != tensors[name].shape:
                    saved_shape, shape = tuple(tensors[name].shape), tuple(tensor.shape)
                    raise StateError(f"{path}.{name}: saved shape {saved_shape}, here {shape}")
                tensor.copy_(tensors[name])
        self.step_number = saved["step"]
        self.phase = phase_index(self.policy, self.step_number)


_numbers = itertools.count()
_live: weakref.WeakSet[State] = weakref.WeakSet()
_hook: Any = None


def states() -> Iterator[State]:
    return iter(list(_live))


def install_step_hook() -> None:
    """Make every optimizer's ``step()`` advance the states whose weights it owns. Idempotent."""
    global _hook
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    ids = {id(p) for p in parameters}
    for state in states():
        weights = [w for s in state.sites.values() if (w := s.weight()) is not None]
        if not any(id(w) in ids for w in weights):
            continue
        # Two optimizers may share one model: the first seen carries the clock, each rolls its own layers.
        if state._primary is None or state._primary() is None:
            state._primary = weakref.ref(optimizer)
        state.step(parameters, advance=state._primary() is optimizer)
