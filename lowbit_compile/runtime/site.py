"""Runtime state of one linear."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import StateError
from ..jobs import ALL, REST, Cast
from ..spec import LinearSpec, Outliers
from . import oscillation
from .channels import Channels


@dataclass
class SiteState:
    """Tensors of one linear; they never move, so compiled graphs keep their pointers.

    ``amax`` f32[3]: amax of x, w, g used for delayed scaling, 0 = nothing observed yet; read-only in graphs.
    ``acc_x``, ``acc_g`` f32[]: running max of this step, written by forward and by backward only.
    ``seed`` i64[4]: key words, optimizer step, site number (see :mod:`..random_bits`); read-only in graphs.
    ``history`` f32[window, 3], newest first. ``ignored``: zero or non-finite amaxes that kept the old scale, per role.
    ``channels``: outlier channels, where the policy has them. ``window``, ``before``: OsciReset's, while one is open;
    ``resets`` counts its elements. ``steps``: optimizer steps so far, also in ``seed``.
    """

    path: str
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
    impl: str = "eager"
    cast: Cast | None = None
    window: oscillation.Window | None = None
    before: Tensor | None = None
    resets: int = 0

    @classmethod
    def create(
        cls, path: str, window: int, seed: int, device: torch.device, outliers: Outliers | None, width: int
    ) -> SiteState:
        words = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, 0, zlib.crc32(path.encode())]

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        key = torch.tensor(words, dtype=torch.int64, device=device)
        channels = None if outliers is None else Channels.create(outliers, width, device)
        return cls(path, zeros(3), zeros(), zeros(), key, zeros(window, 3), channels)

    def matrix(self) -> Tensor | None:
        """The weight [N, K] as it is now, a view of the parameter; None where it is gone or no matrix."""
        weight = self.weight()
        if weight is None or weight.dim() != 2:
            return None
        return weight.detach().t() if self.transposed else weight.detach()

    def compiled_as(self, spec: LinearSpec, impl: str) -> None:
        """Note the numerics of the graph that was compiled last: its cast of w is what OsciReset watches."""
        quantized = spec.fprop.b.quantized
        self.cast = Cast("fprop.w", spec.fprop.b, REST if spec.outliers else ALL) if quantized else None
        self.impl = impl

    def quantizer(self) -> oscillation.Quantizer | None:
        if self.cast is None:
            return None
        channels = self.channels.index if self.channels else None
        return oscillation.Quantizer(self.cast, self.impl, self.amax, self.seed, channels)

    def tensors(self) -> dict[str, Tensor]:
        found = {
            "amax": self.amax, "acc_x": self.acc_x, "acc_g": self.acc_g, "seed": self.seed, "history": self.history
        }  # fmt: skip
        found |= self.channels.tensors() if self.channels else {}
        found |= self.window.tensors() if self.window else {}
        return found if self.before is None else found | {"window_before": self.before}

    def load(self, saved: dict[str, Tensor], window: str | None) -> None:
        """Copy ``saved`` in place (see :meth:`tensors`); ``window``: the cast of the open window, if there is one.

        Raises :class:`StateError` where a tensor is missing or has another shape; nothing is copied then.
        """
        fixed = {k: t for k, t in self.tensors().items() if not k.startswith("window_")}
        for name, tensor in fixed.items():
            if name not in saved:
                raise StateError(f"{self.path}.{name}: missing in what was saved; it holds {', '.join(saved)}")
            if tensor.shape != saved[name].shape:
                raise StateError(
                    f"{self.path}.{name}: saved shape {tuple(saved[name].shape)}, here {tuple(tensor.shape)}"
                )
        for name, tensor in fixed.items():
            tensor.copy_(saved[name])
        self.window = None if window is None else oscillation.Window.restore(window, saved)
        self.before = saved["window_before"].clone() if "window_before" in saved else None
        self.steps = int(self.seed[2])
        if self.channels:
            self.channels.chosen = bool(self.channels.index[0] >= 0)
