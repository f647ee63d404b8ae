"""Exact numerics as frozen, hashable records with one canonical text form: ``parse(str(spec)) == spec``.

The text crosses into graphs (operator schemas take strings, not records), so dumps read well and every compile cache
sees a change of numerics. An operand reads ``e2m1(block=1x16,scale=e4m3fn,outer=1x128,rounding=stochastic)``;
fields at their default are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from .errors import PolicyError, nearest

HIGH_PRECISION = "bf16"  # as an operand's format: not quantized, the tensor's own (or autocast's) dtype is used
GEMMS = {"fprop": ("x", "w"), "dgrad": ("g", "w"), "wgrad": ("g", "x")}

Block = tuple[int, int]


@dataclass(frozen=True)
class OperandSpec:
    """How one operand of one GEMM is cast. The operand is seen as [rows, K] with the contraction axis K last.

    Fields:
        format: element format name (see :mod:`.formats`), or ``bf16`` for "leave in high precision".
        block: (rows, cols) that share one scale, -1 = the whole axis: tensor (-1,-1), row (1,-1), MX (1,32), ...
        scale: format of the scale: ``float32``, ``e8m0`` or ``e4m3fn``.
        outer: block of a second-level float32 scale ((-1,-1) whole tensor, (1,128), ...), (0,0) = no second level.
        rule: how the scale is rounded: ``nearest``, ``ceil``, ``floor``, ``rceil``, ``rceil_satfinite``, ``even``
            (float32 scales ignore it: they are not rounded).
        target: value that amax is scaled to, 0 = the format's maximum.
        scaling: ``current`` (from this tensor's amax) or ``delayed`` (from the amax window; tensor blocks only).
        rounding: ``rne``, ``rna`` or ``stochastic``.
        hadamard: width of the random Hadamard transform along K, 0 = none.
        source: ``original``, or ``dequantized``: what fprop used is cast again (wgrad's x and dgrad's w only).
        four_over_six: per block, scale the maximum to 6 or to 4, whichever has the smaller squared error.
    """

    format: str = HIGH_PRECISION
    block: Block = (-1, -1)
    scale: str = "float32"
    outer: Block = (0, 0)
    rule: str = "nearest"
    target: float = 0.0
    scaling: str = "current"
    rounding: str = "rne"
    hadamard: int = 0
    source: str = "original"
    four_over_six: bool = False

    @property
    def quantized(self) -> bool:
        return self.format != HIGH_PRECISION

    def __str__(self) -> str:
        shown = [f"{f.name}={_show(v)}" for f in fields(self)[1:] if (v := getattr(self, f.name)) != f.default]
        return self.format + (f"({','.join(shown)})" if shown else "")


def _show(value: object) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return repr(value) if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def parse_operand(text: str) -> OperandSpec:
    """Inverse of ``str(OperandSpec)``."""
    name, _, rest = text.partition("(")
    defaults = {f.name: f.default for f in fields(OperandSpec)}
    values: dict[str, object] = {"format": name}
    for part in filter(None, rest.removesuffix(")").split(",")):
        key, _, word = part.partition("=")
        if key not in defaults:
            raise PolicyError(f"operand {text!r}: unknown field {key!r}{nearest(key, defaults)}")
        values[key] = _read(word, defaults[key])
    return OperandSpec(**values)  # type: ignore[arg-type]


def _read(word: str, default: object) -> object:
    if isinstance(default, tuple):
        rows, cols = word.split("x")
        return (int(rows), int(cols))
    if isinstance(default, bool):
        return word == "true"
    return float(word) if isinstance(default, float) else int(word) if isinstance(default, int) else word


@dataclass(frozen=True)
class GemmSpec:
    """One GEMM, D = A . B^T: fprop (A = x, B = w), dgrad (A = g, B = w^T), wgrad (A = g^T, B = x^T)."""

    a: OperandSpec = OperandSpec()
    b: OperandSpec = OperandSpec()

    @property
    def quantized(self) -> bool:
        return self.a.quantized or self.b.quantized

    def __str__(self) -> str:
        return f"{self.a}*{self.b}"


@lru_cache(maxsize=4096)
def parse_gemm(text: str) -> GemmSpec:
    """Inverse of ``str(GemmSpec)``."""
    a, _, b = text.partition("*")
    return GemmSpec(parse_operand(a), parse_operand(b))


@dataclass(frozen=True)
class Outliers:
    """OutControl (TetraJet-v2, arXiv 2510.27527): input channels that are cast as ``operand``, in fprop and in wgrad.

    Those are the channels whose x has the greatest L2 norms over the tokens of the observed steps. Everything else
    keeps its natural order: the recipe's own casts see zeros in the outlier columns. dgrad has no such columns; it
    casts the weight that fprop used, put together again.

    Fields:
        operand: how the outlier columns of x and w, and g for their wgrad, are cast.
        fraction, count: how many of the input channels; see :meth:`channels`. One of them is 0.
        start, stop: first observed step, and the first step at which the chosen channels are used.
    """

    operand: OperandSpec
    fraction: float
    count: int
    start: int
    stop: int

    def channels(self, width: int) -> int:
        """How many of ``width`` input channels: rounded up to whole blocks of ``operand``, at most half of them."""
        block = max(self.operand.block[1], 1)
        wanted = self.count or int(width * self.fraction)
        return min(-(-wanted // block) * block, width // 2 // block * block)

    def __str__(self) -> str:
        return f"{self.operand} {self.fraction!r} {self.count} {self.start}-{self.stop}"


def parse_outliers(text: str) -> Outliers:
    """Inverse of ``str(Outliers)``."""
    operand, fraction, count, steps = text.split(" ")
    start, _, stop = steps.partition("-")
    return Outliers(parse_operand(operand), float(fraction), int(count), int(start), int(stop))


@dataclass(frozen=True)
class LinearSpec:
    """The three GEMMs of a linear layer.

    Fields:
        outliers: channels that are cast otherwise, None = none.
        observe: amaxes go to the window, although nothing may be quantized yet.
        watch: channel norms of x are recorded, so that outlier channels can be chosen.
    """

    fprop: GemmSpec = GemmSpec()
    dgrad: GemmSpec = GemmSpec()
    wgrad: GemmSpec = GemmSpec()
    outliers: Outliers | None = None
    observe: bool = False
    watch: bool = False

    def __str__(self) -> str:
        parts = [f"{g}: {getattr(self, g)}" for g in GEMMS]
        parts += [f"outliers: {self.outliers}"] if self.outliers else []
        return "; ".join(parts + [name for name in ("observe", "watch") if getattr(self, name)])

    @property
    def quantized(self) -> bool:
        return any(getattr(self, g).quantized for g in GEMMS)

    @property
    def delayed(self) -> bool:
        """True where some operand takes its scale from the amax window."""
        return any(o.scaling == "delayed" for g in GEMMS for o in (getattr(self, g).a, getattr(self, g).b))

    @property
    def stochastic(self) -> bool:
        """True where noise or random signs are drawn, so that a seed is needed."""
        operands = [o for g in GEMMS for o in (getattr(self, g).a, getattr(self, g).b)]
        return any(o.rounding == "stochastic" or o.hadamard for o in operands)


def parse_linear(text: str) -> LinearSpec:
    """Inverse of ``str(LinearSpec)``."""
    values: dict[str, Any] = {}
    for part in text.split("; "):
        name, colon, value = part.partition(": ")
        if not colon:
            values[name] = True
        elif name == "outliers":
            values[name] = parse_outliers(value)
        else:
            values[name] = parse_gemm(value)
    return LinearSpec(**values)
