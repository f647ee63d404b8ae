"""Runtime state of one linear."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import StateError
from ..jobs import ALL, REST, Cast
from ..spec import LinearSpec
from . import oscillation
from .channels import Channels


@dataclass(eq=False)
class SiteState:
    """Tensors of one linear; they never move, so compiled graphs keep their pointers.

    ``spec``: the policy's numerics before any schedule. ``width``: input channels. ``weight``: gives the parameter,
    [K, N] where ``transposed``; the graph casts it to ``dtype`` first, None = it doesn't.
    ``amax`` f32[3]: amax of x, w, g used for delayed scaling, 0 = nothing observed yet; read-only in graphs.
    ``acc_x``, ``acc_g`` f32[]: running max of this step, written by forward and by backward only.
    ``seed`` i64[4]: key words, optimizer step, site number (see :mod:`..random_bits`); read-only in graphs.
    ``history`` f32[window, 3], newest first. ``ignored``: zero or non-finite amaxes that kept the old scale, per role.
    ``channels``: outlier channels, where the policy has them. ``window``, ``before``: OsciReset's, while one is open;
    ``resets`` counts its elements. ``steps``: optimizer steps so far, also in ``seed``.
    """

    path: str
    spec: LinearSpec
    width: int
    amax: Tensor
    acc_x: Tensor
    acc_g: Tensor
    seed: Tensor
    history: Tensor
    channels: Channels | None = None
    steps: int = 0
    ignored: list[int] = field(default_factory=lambda: [0, 0, 0])
    observed: bool = False
    weight: Callable[[], Tensor | None] = lambda: None
    transposed: bool = False
    dtype: torch.dtype | None = None
    impl: str = "eager"
    window: oscillation.Window | None = None
    before: Tensor | None = None
    resets: int = 0

    @classmethod
    def create(cls, path: str, spec: LinearSpec, window: int, seed: int, device: torch.device, width: int) -> SiteState:
        """State of the linear at ``path``, of ``width`` input channels, under the policy's ``spec``."""
        words = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, 0, zlib.crc32(path.encode())]

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        key = torch.tensor(words, dtype=torch.int64, device=device)
        channels = None if spec.outliers is None else Channels.create(spec.outliers, width, device)
        return cls(path, spec, width, zeros(3), zeros(), zeros(), key, zeros(window, 3), channels)

    def frozen(self) -> bool:
        """True where no optimizer trains the weight."""
        weight = self.weight()
        return weight is None or not weight.requires_grad

    def matrix(self) -> Tensor | None:
        """The weight [N, K] as it is now, a view of the parameter; None where it is gone or no matrix."""
        weight = self.weight()
        if weight is None or weight.dim() != 2:
            return None
        return weight.detach().t() if self.transposed else weight.detach()

    def quantizer(self, now: LinearSpec) -> oscillation.Quantizer | None:
        """The cast that fprop makes of the weight under ``now``, None where it makes none."""
        if not now.fprop.b.quantized:
            return None
        cast = Cast("fprop.w", now.fprop.b, REST if now.outliers else ALL)
        channels = self.channels.index if self.channels else None
        return oscillation.Quantizer(cast, self.impl, self.amax, self.seed, channels, self.dtype)

    def tensors(self) -> dict[str, Tensor]:
        found = {
            "amax": self.amax, "acc_x": self.acc_x, "acc_g": self.acc_g, "seed": self.seed, "history": self.history
        }  # fmt: skip
        found |= self.channels.tensors() if self.channels else {}
        found |= self.window.tensors() if self.window else {}
        return found if self.before is None else found | {"window_before": self.before}

    def state_dict(self) -> dict[str, Any]:
        """Copies of all tensors, the counters, and the cast of an open window as text."""
        return {
            "tensors": {name: t.clone() for name, t in self.tensors().items()},
            "counters": {"resets": self.resets, "ignored": list(self.ignored)},
            "window": None if self.window is None else str(self.window.cast),
        }

    def check(self, saved: dict[str, Any]) -> None:
        """Raise :class:`StateError` where :meth:`load` would find a tensor missing or of another shape."""
        tensors = saved["tensors"]
        for name, tensor in self.tensors().items():
            if name.startswith("window_"):
                continue
            if name not in tensors:
                raise StateError(f"{self.path}.{name}: missing in what was saved; it holds {', '.join(tensors)}")
            if tensor.shape != tensors[name].shape:
                was, here = tuple(tensors[name].shape), tuple(tensor.shape)
                raise StateError(f"{self.path}.{name}: saved shape {was}, here {here}")

    def load(self, saved: dict[str, Any]) -> None:
        """Copy what :meth:`state_dict` gave, in place, after :meth:`check`."""
        self.check(saved)
        tensors = saved["tensors"]
        for name, tensor in self.tensors().items():
            if not name.startswith("window_"):
                tensor.copy_(tensors[name])
        device = self.seed.device
        window = saved["window"]
        self.window = None if window is None else oscillation.Window.restore(window, tensors, device)
        self.before = tensors["window_before"].clone().to(device) if "window_before" in tensors else None
        self.resets, self.ignored = saved["counters"]["resets"], list(saved["counters"]["ignored"])
        self.steps = int(self.seed[2])
        if self.channels:
            self.channels.chosen = bool(self.channels.index[0] >= 0)
