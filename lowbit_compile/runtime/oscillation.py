"""OsciReset: watches whether a weight's quantized value moves more than the weight, and puts it in the bin's centre.

Rule, tensors and order of steps: TetraJet-v2 (arXiv 2510.27527) and its released code; state is kept as bfloat16 sums,
one byte of flips and the codes of the step before, 5.6 bytes a parameter for NVFP4, and only while a window is open.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..casts import decode
from ..formats import get_format
from ..jobs import Cast, parse_cast
from ..ops import part_of, run_cast, run_dequantize
from ..quantize import unpacked
from ..windows import Oscillation


@dataclass(frozen=True)
class Quantizer:
    """The cast that fprop makes of one weight [N, K], with what it needs besides the weight."""

    cast: Cast
    impl: str
    amax: Tensor
    seed: Tensor
    channels: Tensor | None
    dtype: torch.dtype | None = None  # the model's own cast of the weight, before ours

    def payload(self, weight: Tensor) -> list[Tensor]:
        """Codes and scales of the weight, outlier columns zero."""
        seen = part_of(weight.to(self.dtype or weight.dtype), self.cast.part, self.channels)
        return run_cast(self.impl, seen.contiguous(), self.amax, self.seed, self.cast)

    def values(self, payload: list[Tensor], width: int) -> Tensor:
        """float32 [N, K]."""
        return run_dequantize(self.impl, payload, self.cast.spec)[:, :width]

    def elements(self, payload: list[Tensor], width: int) -> Tensor:
        """What the codes say without their scales, float32 [N, K]; both zeros are equal."""
        return decode(unpacked(payload, self.cast.spec), get_format(self.cast.spec.format))[:, :width]


@dataclass
class Window:
    """An open window of one weight [N, K], seen with the contraction axis last.

    ``payload``: Q(w) of the last tracked step. ``moved``: sum of |change of w|, ``jumped``: of |change of Q(w)|, both
    bfloat16 [N, K]. ``flips`` u8 [N, K]: changes of Q(w)'s element, saturating. ``cast``: under which it was opened.
    Where code between two optimizer steps changes weights (a projection), ``jumped`` counts that, ``moved`` doesn't.
    """

    cast: Cast
    payload: list[Tensor]
    moved: Tensor
    jumped: Tensor
    flips: Tensor

    @classmethod
    def open(cls, weight: Tensor, quantizer: Quantizer) -> Window:
        zeros = torch.zeros(weight.shape, dtype=torch.bfloat16, device=weight.device)
        return cls(quantizer.cast, quantizer.payload(weight), zeros, zeros.clone(), zeros.to(torch.uint8))

    def track(self, weight: Tensor, before: Tensor, quantizer: Quantizer) -> None:
        """Add one step; ``before``: the weight as it was before it."""
        payload, width = quantizer.payload(weight), weight.shape[1]
        jump = quantizer.values(payload, width) - quantizer.values(self.payload, width)
        self.jumped += jump.abs().to(torch.bfloat16)
        self.moved += (weight.float() - before.float()).abs().to(torch.bfloat16)
        changed = quantizer.elements(payload, width) != quantizer.elements(self.payload, width)
        self.flips += (changed & (self.flips < 255)).to(torch.uint8)
        self.payload = payload

    def oscillating(self, rule: Oscillation) -> Tensor:
        """Bool [N, K]: where Q(w) moved ``threshold`` times as far as w, in at least ``min_flips`` changes."""
        moved = self.moved.float()
        ratio = torch.where(moved > 0, self.jumped.float() / moved, 0.0)
        return (ratio >= rule.threshold) & (self.flips >= rule.min_flips)

    def tensors(self) -> dict[str, Tensor]:
        payload = {f"window_payload{i}": t for i, t in enumerate(self.payload)}
        return {"window_moved": self.moved, "window_jumped": self.jumped, "window_flips": self.flips, **payload}

    @classmethod
    def restore(cls, text: str, saved: dict[str, Tensor], device: torch.device) -> Window:
        """From ``str(cast)`` and :meth:`tensors`."""
        copies = {name: t.clone().to(device) for name, t in saved.items() if name.startswith("window_")}
        payload = [copies[name] for name in sorted(copies) if name.startswith("window_payload")]
        return cls(parse_cast(text), payload, *(copies[f"window_{n}"] for n in ("moved", "jumped", "flips")))


def place(rule: Oscillation, start: int | None, step: int) -> int | None:
    """Where ``step`` (the first is 0) lies: 0 opens, 1..window tracks, window + 1 acts; None: nothing to do."""
    if start is None or step < start:
        return None
    offset = (step - start) % rule.period
    return offset if offset <= rule.window + 1 else None
