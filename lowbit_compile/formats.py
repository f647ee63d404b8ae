"""Number formats as data: a format is its table of code -> value plus the spacing of that table.

Sources: e4m3fn, e5m2, e2m1 and e8m0 from the OCP 8-bit float and MX v1.0 specifications; hif8 from arXiv 2409.16626
and the public CANN codecs. To add a format, add one instance here and put it in ``ALL_FORMATS``.

Nobody asks a format for its name: code that needs a maximum, a spacing or a NaN asks the properties below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from .errors import PolicyError, nearest


class Run(NamedTuple):
    """From binade ``first_exponent`` on, up to the next run, values have ``mantissa_bits`` bits after the leading 1."""

    first_exponent: int
    mantissa_bits: int


@dataclass(frozen=True, eq=False)
class Format:
    """One element format.

    Args:
        name: spelling used in policy files and specs.
        bits: width of a code.
        values: value of every code in code order, NaN and infinities included.
        runs: mantissa bits by binade, ascending; one run for ordinary floats and integers.
        min_step_exponent: log2 of the distance between neighbours at zero.
        ties: what round-to-nearest means here, ``"rne"`` (ties to even) or ``"rna"`` (ties away from zero).
        flush_below: magnitudes under this become zero whatever the rounding (HiF8's codec does so under 2^-23).

    The spacing is checked against the table when the format is built, so the two can't disagree.
    """

    name: str
    bits: int
    values: tuple[float, ...]
    runs: tuple[Run, ...]
    min_step_exponent: int
    ties: str = "rne"
    flush_below: float = 0.0

    def __post_init__(self) -> None:
        assert len(self.values) == 1 << self.bits
        for name, member in vars(type(self)).items():
            if isinstance(member, cached_property):
                getattr(self, name)  # now: Dynamo can read a cached value, but not trace cached_property's lock
        for low, high in pairwise(self.positives):
            step = 2.0 ** self.step_exponent(math.frexp(low)[1] - 1 if low else -(10**6))
            assert high - low == step, f"{self.name}: {low} and {high} are {high - low} apart, the runs say {step}"

    def __repr__(self) -> str:
        return f"Format({self.name})"

    def step_exponent(self, exponent: int) -> int:
        """log2 of the spacing in the binade [2^exponent, 2^(exponent + 1))."""
        bits = self.runs[0].mantissa_bits
        for run in self.runs:
            if exponent >= run.first_exponent:
                bits = run.mantissa_bits
        return max(exponent - bits, self.min_step_exponent)

    @cached_property
    def positives(self) -> tuple[float, ...]:
        """Finite values >= 0, ascending; the index here is the *rank* of a magnitude."""
        return tuple(sorted({abs(v) for v in self.values if math.isfinite(v) and math.copysign(1.0, v) > 0}))

    @property
    def max(self) -> float:
        """Greatest finite magnitude that a quantizer produces (int8: 127, never -128)."""
        return self.positives[-1]

    @property
    def emax(self) -> int:
        """floor(log2(max)), which the OCP floor rule subtracts."""
        return math.frexp(self.max)[1] - 1

    @cached_property
    def signed(self) -> bool:
        return any(v < 0 for v in self.values)

    @cached_property
    def nan_code(self) -> int | None:
        """Code that a NaN becomes, or None where the format has none and the scale must carry it."""
        codes = [c for c, v in enumerate(self.values) if math.isnan(v)]
        positive = [c for c in codes if c < 1 << (self.bits - 1)]
        return max(positive or codes, default=None)

    @cached_property
    def inf_code(self) -> int | None:
        return self.values.index(math.inf) if math.inf in self.values else None

    @cached_property
    def codes_by_rank(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Codes of +positives[r] and of -positives[r]; the positive code stands where there is no negative."""
        plus: dict[float, int] = {}
        minus: dict[float, int] = {}
        for code, value in enumerate(self.values):
            if math.isfinite(value):
                (minus if math.copysign(1.0, value) < 0 else plus).setdefault(abs(value), code)
        return (
            tuple(plus[v] for v in self.positives),
            tuple(minus.get(v, plus[v]) for v in self.positives),
        )

    @cached_property
    def sign_magnitude(self) -> bool:
        """True where a code is a sign bit beside the rank, so that encoding needs no table."""
        plus, minus = self.codes_by_rank
        sign = 1 << (self.bits - 1)
        return plus == tuple(range(len(plus))) and minus == tuple(c | sign for c in plus)


def _float_format(name: str, exponent_bits: int, mantissa_bits: int, bias: int, specials: dict[int, float]) -> Format:
    """IEEE-like layout; ``specials`` overrides the value of magnitude codes (NaN, infinity)."""
    magnitudes = []
    for code in range(1 << (exponent_bits + mantissa_bits)):
        field, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        lead, exponent = (1, field - bias) if field else (0, 1 - bias)
        magnitudes.append(specials.get(code, (lead + mantissa / (1 << mantissa_bits)) * 2.0**exponent))
    return Format(
        name,
        1 + exponent_bits + mantissa_bits,
        tuple(magnitudes) + tuple(-v for v in magnitudes),
        (Run(1 - bias, mantissa_bits),),
        1 - bias - mantissa_bits,
    )


def _integer_format(name: str, bits: int) -> Format:
    """Two's complement. The most negative code decodes, but a symmetric quantizer never writes it."""
    half = 1 << (bits - 1)
    values = tuple(float(c if c < half else c - 2 * half) for c in range(2 * half))
    return Format(name, bits, values, (Run(0, bits - 1),), 0)


def _hif8() -> Format:
    """Tapered precision: a variable-length prefix says how many exponent bits follow; see arXiv 2409.16626, table 2.

    Prefix 0000 holds the denormals 2^(M-23); 0001, 001, 01, 10, 11 hold 0 to 4 exponent bits in sign-magnitude with an
    implicit leading one, and what is left of the seven bits is mantissa.
    """

    def magnitude(code: int) -> float:
        if code == 0x6F:
            return math.inf
        if code < 8:
            return 2.0 ** (code - 23) if code else 0.0
        exponent_bits = 0 if code < 16 else 1 if code < 32 else 2 if code < 64 else 3 if code < 96 else 4
        mantissa_bits = (3, 3, 3, 2, 1)[exponent_bits]
        field = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
        exponent = 0
        if exponent_bits:
            half = 1 << (exponent_bits - 1)
            exponent = half | (field & (half - 1))
            if field & half:
                exponent = -exponent
        return (1 + (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)) * 2.0**exponent

    magnitudes = [magnitude(c) for c in range(128)]
    runs = (Run(-22, 0), Run(-15, 1), Run(-7, 2), Run(-3, 3), Run(4, 2), Run(8, 1))
    negatives = [math.nan] + [-v for v in magnitudes[1:]]
    return Format("hif8", 8, tuple(magnitudes + negatives), runs, -22, ties="rna", flush_below=2.0**-23)


E4M3FN = _float_format("e4m3fn", 4, 3, 7, {0x7F: math.nan})
E5M2 = _float_format("e5m2", 5, 2, 15, {0x7C: math.inf, 0x7D: math.nan, 0x7E: math.nan, 0x7F: math.nan})
E2M1 = _float_format("e2m1", 2, 1, 1, {})
# Only a scale: powers of two, no sign, no zero; rounding to it is a scale rule (see scaling.py), not an element cast.
E8M0 = Format("e8m0", 8, (*(2.0 ** (c - 127) for c in range(255)), math.nan), (Run(-127, 0),), -127)
HIF8 = _hif8()
INT8 = _integer_format("int8", 8)
INT4 = _integer_format("int4", 4)

ALL_FORMATS: dict[str, Format] = {f.name: f for f in (E4M3FN, E5M2, E2M1, E8M0, HIF8, INT8, INT4)}
ELEMENT_FORMATS: dict[str, Format] = {n: f for n, f in ALL_FORMATS.items() if f.signed}


def get_format(name: str) -> Format:
    """The format called ``name``; raises :class:`PolicyError` with the choices and the nearest spelling."""
    try:
        return ALL_FORMATS[name]
    except KeyError:
        known = ", ".join(ALL_FORMATS)
        raise PolicyError(f"unknown number format {name!r}; known: {known}{nearest(name, ALL_FORMATS)}") from None
