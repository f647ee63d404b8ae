"""Which numerics hold at which step: phases of a policy, as pure functions of the step.

A phase covers steps ``from_step <= step < until_step``. Phases never overlap, so a step has at most one. Compiled code
changes only where :func:`phase_index` does, which makes it the part of a compile key that stands for the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from .spec import GEMMS, GemmSpec, LinearSpec, OperandSpec

if TYPE_CHECKING:
    from .policy import Policy


@dataclass(frozen=True)
class Phase:
    """One stretch of steps with its own numerics.

    Fields:
        from_step: first step of the phase.
        until_step: first step after it, None = it never ends.
        keep: all three GEMMs of every linear stay in high precision.
        high: GEMMs that stay in high precision while the others follow the rules; empty under ``keep``.
        observe: under ``keep``, linears with delayed scaling fill their amax windows, so that scales exist afterwards.
    """

    from_step: int
    until_step: int | None = None
    keep: bool = False
    high: tuple[str, ...] = ()
    observe: bool = False

    def covers(self, step: int) -> bool:
        return self.from_step <= step and (self.until_step is None or step < self.until_step)


class FileModel(BaseModel):
    """Base of the models that check a policy file: unknown keys are errors, and no value is converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PhaseModel(FileModel):
    """A phase as a policy file writes it."""

    from_step: Annotated[int, Field(ge=0)] | None = None
    until_step: Annotated[int, Field(gt=0)] | None = None
    from_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    total_steps: Annotated[int, Field(gt=0)] | None = None
    use: Literal["keep"] | None = None
    observe: bool = False
    fprop: Literal["bf16"] | None = None
    dgrad: Literal["bf16"] | None = None
    wgrad: Literal["bf16"] | None = None

    def fault(self) -> str:
        """Why the keys don't go together, or an empty string; :func:`fault` judges the phases themselves."""
        if (self.from_fraction is None) != (self.total_steps is None):
            return "from_fraction and total_steps go together; one of them is missing"
        if self.from_fraction is not None and self.from_step is not None:
            return "from_step and from_fraction say the same thing; drop one"
        return ""

    def freeze(self) -> Phase:
        """The phase; a fraction becomes a step by exact decimal arithmetic, rounded down."""
        start = int(Fraction(repr(self.from_fraction or 0)) * (self.total_steps or 0)) + (self.from_step or 0)
        high = tuple(gemm for gemm in GEMMS if getattr(self, gemm) is not None)
        return Phase(start, self.until_step, self.use is not None, high, self.observe)


def fault(phases: Sequence[Phase]) -> tuple[int, str] | None:
    """The first phase that can't stand, as (index, message), or None."""
    for i, phase in enumerate(phases):
        if phase.from_step < 0 or (phase.until_step is not None and phase.until_step <= phase.from_step):
            return i, f"covers no step: from {phase.from_step} until {phase.until_step}"
        if not phase.from_step and phase.until_step is None:
            return i, "covers every step; give from_step, from_fraction or until_step, or change the rules instead"
        if phase.keep == bool(phase.high):
            return i, "needs exactly one of use: keep, or bf16 for some of fprop, dgrad, wgrad"
        if set(phase.high) - set(GEMMS):
            return i, f"unknown GEMM in {phase.high}; allowed: {', '.join(GEMMS)}"
        if phase.observe and not phase.keep:
            return i, "observe goes with use: keep only; otherwise delayed scaling observes by itself"
        for j, other in enumerate(phases[:i]):
            first = max(phase.from_step, other.from_step)
            if phase.covers(first) and other.covers(first):
                return i, f"overlaps schedule[{j}] at step {first}; phases must be disjoint"
    return None


def phase_at(policy: Policy, step: int) -> Phase | None:
    """The phase that covers ``step``, or None where the rules hold as they are."""
    return next((p for p in policy.schedule if p.covers(step)), None)


def boundaries(policy: Policy) -> tuple[int, ...]:
    """Distinct steps > 0 at which compiled code changes, ascending: ends of phases, watching and use of outliers."""
    ends = {p.from_step for p in policy.schedule} | {p.until_step for p in policy.schedule if p.until_step is not None}
    found = [rule.spec.outliers for rule in policy.rules if rule.spec and rule.spec.outliers]
    return tuple(sorted((ends | {o.start for o in found} | {o.stop for o in found}) - {0}))


def phase_index(policy: Policy, step: int) -> int:
    """How many boundaries lie at or before ``step``."""
    return sum(b <= step for b in boundaries(policy))


def spec_at(policy: Policy, spec: LinearSpec, step: int) -> LinearSpec:
    """What ``spec`` becomes at ``step``.

    Only linears with delayed scaling observe in a ``keep`` phase: nothing would ever read the windows of the others.
    Where fprop is held in high precision, backward's ``source=dequantized`` becomes ``original``: what fprop used is
    then the tensor itself. Outlier channels are watched in their steps whatever the phase, and used from then on.
    """
    outliers = spec.outliers
    watch = outliers is not None and outliers.start <= step < outliers.stop
    if outliers is not None and step < outliers.stop:
        outliers = None
    phase = phase_at(policy, step)
    if phase is None:
        return replace(spec, outliers=outliers, watch=watch)
    if phase.keep:
        return LinearSpec(observe=phase.observe and spec.observe, watch=watch)
    gemms = {name: GemmSpec() if name in phase.high else getattr(spec, name) for name in GEMMS}
    if "fprop" in phase.high:
        gemms = {name: GemmSpec(_original(gemm.a), _original(gemm.b)) for name, gemm in gemms.items()}
    return LinearSpec(**gemms, outliers=outliers, observe=spec.observe, watch=watch)


def _original(operand: OperandSpec) -> OperandSpec:
    return replace(operand, source="original")
