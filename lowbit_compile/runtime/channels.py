"""Outlier channels of one linear (OutControl): statistics over the watched steps, then a fixed selection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..spec import Outliers


@dataclass
class Channels:
    """Tensors of one linear with K input channels; they never move.

    ``index`` i64[C]: the outlier channels, ascending; -1 while none are chosen. Read-only in graphs.
    ``acc`` f32[K]: greatest L2 norm over tokens of each channel of x in this step, written by forward; with gradient
    accumulation that of the largest micro-batch, which a recompute can't count twice.
    ``norms`` f32[K]: sum of ``acc`` over the watched steps. ``ignored``: steps whose norms were not finite.
    """

    rule: Outliers
    index: Tensor
    acc: Tensor
    norms: Tensor
    chosen: bool = False
    ignored: int = 0

    @classmethod
    def create(cls, rule: Outliers, width: int, device: torch.device) -> Channels | None:
        """None where ``width`` is too small to hold a block of outlier channels."""
        count = rule.channels(width)
        if not count:
            return None
        index = torch.full((count,), -1, dtype=torch.int64, device=device)
        return cls(rule, index, torch.zeros(width, device=device), torch.zeros(width, device=device))

    def after_step(self, steps: int) -> None:
        """``steps``: optimizer steps that the model has had. A step with a norm that is not finite doesn't count."""
        if self.rule.start < steps <= self.rule.stop:
            if bool(self.acc.isfinite().all()):
                self.norms += self.acc
            else:
                self.ignored += 1
            self.acc.zero_()
        if steps == self.rule.stop and bool(self.norms.any()):
            order = self.norms.sort(descending=True, stable=True).indices
            self.index.copy_(order[: self.index.shape[0]].sort().values)
            self.chosen = True

    def tensors(self) -> dict[str, Tensor]:
        return {"channels": self.index, "channel_acc": self.acc, "channel_norms": self.norms}
