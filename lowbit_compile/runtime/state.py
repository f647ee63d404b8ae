"""Runtime state of one root model: the tensors of its linears, and the one update per optimizer step.

Inside graphs only ``acc = max(acc, amax)`` happens (idempotent); everything else happens in :meth:`State.step`, so
recompute, gradient accumulation and graph replay can't count twice. A step counter never reaches a traced frame:
graphs depend on the schedule only through a guard on the state's entry in :mod:`.phases`.
"""

from __future__ import annotations

import copy
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..errors import LowbitWarning, StateError
from ..formats import get_format
from ..policy import Policy, strip_wrappers
from ..schedule import boundaries, phase_index, spec_at
from ..spec import LinearSpec
from ..windows import Oscillation
from . import oscillation, phases
from .site import SiteState

WATCHED_BITS = 8  # OsciReset is for weights of at most so many bits


class State:
    """All linears of one root model under one policy. Compared by identity; doesn't hold the model."""

    def __init__(self, policy: Policy, seed: int = 0) -> None:
        self.policy = policy
        self.seed = seed
        self.step_number = 0
        self.phase_name = f"state{next(_numbers)}"
        self._loads = 0
        self._set_phase()
        self.sites: dict[str, SiteState] = {}
        self.peak_rate = 0.0
        self.oscillation_start = policy.oscillation.start_step if policy.oscillation else None
        self._hooked = False
        self._unclaimed: dict[str, dict[str, Any]] = {}  # loaded, but not compiled here yet
        self._warned = False
        _live.add(self)

    @property
    def phase(self) -> int:
        """What compiled graphs are guarded by: it changes when the numerics of some linear may have."""
        return int(getattr(phases, self.phase_name))

    def _set_phase(self) -> None:
        """The schedule boundaries passed; a load counts as one, since graphs know which channels were chosen."""
        index = phase_index(self.policy, self.step_number)
        setattr(phases, self.phase_name, index + self._loads * (1 + len(boundaries(self.policy))))

    def site(
        self,
        path: str,
        spec: LinearSpec,
        weight: Callable[[], Tensor | None],
        device: torch.device,
        *,
        width: int,
        transposed: bool = False,
    ) -> SiteState:
        """Get or create; a second compile of the same layer shares its tensors.

        Args:
            spec: the policy's numerics of this layer, before any schedule.
            weight: gives the parameter as it is now, [N, K], or [K, N] where ``transposed``; K is ``width``.
        """
        if path not in self.sites or self.sites[path].seed.device != device:
            created = SiteState.create(path, spec, self.policy.amax.window, self.seed, device, width)
            created.seed[2] = created.steps = self.step_number
            if path in self.sites:  # the model was moved to another device
                created.load(self.sites[path].state_dict())
            elif path in self._unclaimed:
                created.load(self._unclaimed.pop(path))
            self.sites[path] = created
        site = self.sites[path]
        if site.width != width:
            raise StateError(f"{path}: two linears have this name, of {site.width} and of {width} input channels")
        site.weight, site.transposed = weight, transposed
        return site

    def numerics(self, site: SiteState) -> LinearSpec:
        """What ``site`` computes at this step, training or not."""
        now = spec_at(self.policy, site.spec, self.step_number)
        if site.channels is None:
            return replace(now, outliers=None, watch=False)
        return now if site.channels.chosen else replace(now, outliers=None)

    @torch.no_grad()
    def before_step(self, parameters: Iterable[Tensor]) -> None:
        """Before an optimizer's step: keep the weights of open windows, until the step is over."""
        self._hooked = True
        owned = {id(p) for p in parameters}
        for site in self.sites.values():
            if site.window is not None and id(site.weight()) in owned:
                weight = site.matrix()
                site.before = None if weight is None else weight.clone()

    @torch.no_grad()
    def step(self, parameters: Iterable[Tensor] | None = None, *, learning_rate: float | None = None) -> None:
        """Once per optimizer step: roll windows, set scales, choose channels, reset oscillating weights, advance seeds
        and the schedule.

        With several optimizers each rolls its own linears; the clock of the schedule is that of the linear with the
        most steps.

        Args:
            parameters: only linears whose weight is among them (or that nobody trains) are rolled; None = all.
            learning_rate: of this step; a policy whose OsciReset starts at a learning rate needs it.
        """
        owned = None if parameters is None else {id(p) for p in parameters}
        trained = [s for s in self.sites.values() if owned is None or id(s.weight()) in owned]
        advance = any(s.steps >= self.step_number for s in trained)
        chosen = {s.path for s in trained}
        sites = [s for s in self.sites.values() if s.path in chosen or (advance and s.frozen())]
        if not sites:
            return
        if advance:
            self._start_oscillation(learning_rate)
        self._roll([s for s in sites if s.observed])
        self._oscillate(sites)
        torch._foreach_add_([s.seed[2] for s in sites], 1)
        for site in sites:
            site.steps += 1
        if advance:
            self.step_number += 1
            for site in self.sites.values():
                if site.channels:
                    site.channels.after_step(self.step_number)
            self._set_phase()
            self._warn_unclaimed()

    def _warn_unclaimed(self) -> None:
        """Once, after the first step that follows a load: what was loaded for linears that this model doesn't have."""
        if self._unclaimed and not self._warned:
            self._warned = True
            names = ", ".join(list(self._unclaimed)[:5])
            message = f"loaded state of {len(self._unclaimed)} linears belongs to none that has run: {names}"
            warnings.warn(message, LowbitWarning, stacklevel=2)

    @property
    def needs_rate(self) -> bool:
        """True while OsciReset waits for the learning rate to fall."""
        rule = self.policy.oscillation
        return rule is not None and rule.start_lr is not None and self.oscillation_start is None

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
                before = site.amax * 2.0**-rule.margin
                value = torch.where(site.amax > 0, 0.9 * before + 0.1 * site.history[0], site.history[0])
            else:
                value = site.history.amax(0)
            site.amax.copy_(torch.where(good, value * 2.0**rule.margin, site.amax))
            site.ignored = [n + int(not ok) for n, ok in zip(site.ignored, good.tolist(), strict=True)]
            site.acc_x.zero_()
            site.acc_g.zero_()

    def _start_oscillation(self, rate: float | None) -> None:
        """Note the step at which the learning rate ``rate`` has fallen far enough for OsciReset."""
        rule = self.policy.oscillation
        if rule is None or rule.start_lr is None or self.oscillation_start is not None:
            return
        if rate is None:
            raise StateError("oscillation.start_lr: the learning rate is unknown; pass learning_rate to step()")
        self.peak_rate = max(self.peak_rate, rate)
        if rate < rule.start_lr * self.peak_rate:
            self.oscillation_start = self.step_number

    def _oscillate(self, sites: list[SiteState]) -> None:
        """OsciReset."""
        rule = self.policy.oscillation
        if rule is None:
            return
        for site in sites:
            at = oscillation.place(rule, self.oscillation_start, site.steps)
            if at is None:
                continue
            weight, quantizer = site.matrix(), site.quantizer(self.numerics(site))
            if site.window is not None and at > 0 and (quantizer is None or quantizer.cast != site.window.cast):
                message = f"{site.path}: the cast of its weight changed inside an OsciReset window, which is dropped"
                warnings.warn(message, LowbitWarning, stacklevel=2)
                site.window = site.before = None
            if weight is None or quantizer is None or get_format(quantizer.cast.spec.format).bits > WATCHED_BITS:
                continue
            if at == 0:
                site.window = oscillation.Window.open(weight, quantizer)
            elif site.window is not None:
                self._watch(site, site.window, rule, at, weight, quantizer)
            site.before = weight.clone() if site.window is not None and not self._hooked else None

    @staticmethod
    def _watch(
        site: SiteState,
        window: oscillation.Window,
        rule: Oscillation,
        at: int,
        weight: Tensor,
        quantizer: oscillation.Quantizer,
    ) -> None:
        """One step inside an open window: track, or act and close."""
        if at <= rule.window:
            if site.before is None:
                raise StateError(f"{site.path}: OsciReset's window is open, but the weight before this step is unknown")
            window.track(weight, site.before, quantizer)
            return
        found = window.oscillating(rule)
        site.resets += int(found.sum())
        if rule.action == "reset":
            centres = quantizer.values(quantizer.payload(weight), weight.shape[1])
            weight.copy_(torch.where(found, centres.to(weight.dtype), weight))
        site.window = None

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors, numbers and texts: enough to resume bit for bit, in the middle of a window too."""
        return {
            "version": 1,
            "policy": self.policy.id,
            "step": self.step_number,
            "peak_rate": self.peak_rate,
            "oscillation_start": self.oscillation_start,
            "sites": self._unclaimed | {path: site.state_dict() for path, site in self.sites.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Copies in place, so compiled graphs stay valid. What belongs to linears not compiled yet waits for them."""
        if saved["policy"] != self.policy.id:
            raise StateError(f"state was saved under policy {saved['policy']}, this model runs policy {self.policy.id}")
        missing = {"step", "peak_rate", "oscillation_start", "sites"} - set(saved)
        if missing:
            raise StateError(f"what was saved lacks {', '.join(sorted(missing))}; it holds {', '.join(saved)}")
        sites = {strip_wrappers(path): site for path, site in saved["sites"].items()}
        for path in self.sites.keys() & sites.keys():
            self.sites[path].check(sites[path])
        for path, site in sites.items():
            if path in self.sites:
                self.sites[path].load(site)
            else:
                self._unclaimed[path] = copy.deepcopy(site)
        self._warned = False
        self.step_number = saved["step"]
        self.peak_rate = saved["peak_rate"]
        self.oscillation_start = saved["oscillation_start"]
        self._loads += any(site.channels for site in self.sites.values())
        self._set_phase()


_numbers = itertools.count()
_live: weakref.WeakSet[State] = weakref.WeakSet()
_hook: Any = None


def states() -> Iterator[State]:
    return iter(list(_live))


def install_step_hook() -> None:
    """Make every optimizer's ``step()`` advance the states whose weights it owns. Idempotent."""
    global _hook
    if _hook is None:
        _hook = (register_optimizer_step_pre_hook(_before_step), register_optimizer_step_post_hook(_after_step))


def _owned(optimizer: torch.optim.Optimizer) -> Iterator[tuple[State, list[Tensor]]]:
    """The states of which ``optimizer`` trains some weight, and all that it trains."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    ids = {id(p) for p in parameters}
    for state in states():
        if any(id(w) in ids for s in state.sites.values() if (w := s.weight()) is not None):
            yield state, parameters


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for state, parameters in _owned(optimizer):
        state.before_step(parameters)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for state, parameters in _owned(optimizer):
        rates = [group["lr"] for group in optimizer.param_groups if group.get("lr") is not None]
        rate = max(map(float, rates)) if rates and state.needs_rate else None
        state.step(parameters, learning_rate=rate)
