"""What a policy says about state between steps: the amax window and OsciReset."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field

from .schedule import FileModel

ALGORITHMS = ("max", "most_recent", "ema")


@dataclass(frozen=True)
class AmaxWindow:
    """Runtime state of delayed scaling: ``window`` steps, how they become one amax, and bits of headroom."""

    window: int = 64
    algorithm: str = "max"
    margin: int = 0

    def fault(self) -> str:
        """Why this has no meaning, or an empty string."""
        if self.window < 1 or self.margin < 0 or self.algorithm not in ALGORITHMS:
            return f"{self} is out of range; algorithm is one of {', '.join(ALGORITHMS)}"
        return ""


@dataclass(frozen=True)
class Oscillation:
    """OsciReset (TetraJet-v2, arXiv 2510.27527): weights that flip between two codes go to the centre of their bin.

    Every ``period`` steps from the start on, one step takes a first look at each weight that fprop quantizes to eight
    bits or fewer, ``window`` steps add up |change of w| and |change of Q(w)|, and the step after them acts on the
    elements where the second sum is at least ``threshold`` times the first and Q(w) changed ``min_flips`` times.

    Fields:
        start_step: optimizer step at which the first window opens, or None for ``start_lr``.
        start_lr: it opens once the learning rate has fallen below this fraction of its greatest value so far.
        action: ``reset`` writes Q(w) to the master weight; ``monitor`` only counts.
    """

    start_step: int | None
    start_lr: float | None = None
    period: int = 200
    window: int = 50
    threshold: float = 8.0
    min_flips: int = 2
    action: str = "reset"

    def fault(self) -> str:
        """Why this has no meaning, or an empty string."""
        if (self.start_step is None) == (self.start_lr is None):
            return "needs exactly one of start_step, start_fraction with total_steps, and start_lr"
        if not 1 <= self.window <= 255:  # flips are counted in a byte
            return f"window is {self.window}; allowed: 1 to 255 steps"
        if self.period < self.window + 2:
            return f"period is {self.period}; a window of {self.window} steps needs at least {self.window + 2}"
        if self.threshold <= 0 or self.min_flips < 0 or self.action not in ("reset", "monitor"):
            return f"{self} is out of range; action is reset or monitor"
        return ""


class AmaxModel(FileModel):
    """An amax window as a policy file writes it."""

    window: Annotated[int, Field(ge=1)] = 64
    algorithm: Literal["max", "most_recent", "ema"] = "max"
    margin: Annotated[int, Field(ge=0)] = 0

    def freeze(self) -> AmaxWindow:
        return AmaxWindow(**self.model_dump())


class OscillationModel(FileModel):
    """OsciReset as a policy file writes it."""

    start_step: Annotated[int, Field(ge=0)] | None = None
    start_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    total_steps: Annotated[int, Field(gt=0)] | None = None
    start_lr: Annotated[float, Field(gt=0, le=1)] | None = None
    period: Annotated[int, Field(gt=0)] = 200
    window: Annotated[int, Field(gt=0)] = 50
    threshold: Annotated[float, Field(gt=0)] = 8.0
    min_flips: Annotated[int, Field(ge=0)] = 2
    action: Literal["reset", "monitor"] = "reset"

    def fault(self) -> str:
        """Why the keys don't go together, or an empty string."""
        if (self.start_fraction is None) != (self.total_steps is None):
            return "start_fraction and total_steps go together; one of them is missing"
        if self.start_fraction is not None and self.start_step is not None:
            return "start_step and start_fraction say the same thing; drop one"
        return self.freeze().fault()

    def freeze(self) -> Oscillation:
        """A fraction becomes a step by exact decimal arithmetic, rounded down."""
        start = self.start_step
        if self.start_fraction is not None:
            start = int(Fraction(repr(self.start_fraction)) * (self.total_steps or 0))
        given = self.model_dump(include={"period", "window", "threshold", "min_flips", "action"})
        return Oscillation(start, self.start_lr, **given)
