"""What a kernel needs to know of an operand's spec, resolved to numbers: one frozen record, a compile-time constant."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from ..formats import E4M3FN, get_format
from ..quantize import FOUR_OVER_SIX_MAX, NO_BLOCK, WHOLE, padded_k
from ..spec import OperandSpec

TILE = 128  # greatest block and Hadamard width along K that one tile holds; whole rows have tiles of their own
ROW = (1, -1)  # block of one scale a row
LONGEST_ROW = 16384  # whole rows up to this length are one tile


@dataclass(frozen=True)
class Plan:
    """Fields:
    layout: ``float`` (sign and rank), ``integer`` (two's complement) or ``tapered`` (HiF8's prefix code).
    bits, mantissa, first_normal, min_step, least, emax, max, max_rank, flush, nan: see :class:`..formats.Format`; least
        is 2^min_step; nan -1: none.
    rounding: ``rne``, ``rna`` or ``stochastic``.
    scale, rule, target, inner_max: how scales are stored, rounded, and what amaxes are scaled to.
    target_four, inverse_target, emax_of_target, half_of_width: numbers that scale rules need, see :mod:`..scaling`.
    rows, cols: inner block; 0 x 0: one for the whole tensor, from an amax that is known before; rows 1, cols 0: row.
    outer: columns of an outer block of one row; 0: none; -1: the whole tensor.
    hadamard, four_over_six, delayed: as in the spec.
    """

    layout: str
    bits: int
    mantissa: int
    first_normal: int
    min_step: int
    least: float
    emax: int
    max: float
    max_rank: int
    flush: float
    nan: int
    rounding: str
    scale: str
    rule: str
    target: float
    target_four: float
    inverse_target: float
    emax_of_target: int
    half_of_width: int
    inner_max: float
    rows: int
    cols: int
    outer: int
    hadamard: int
    four_over_six: bool
    delayed: bool

    @property
    def whole(self) -> bool:
        """True where an amax over the whole operand has to be known first."""
        return self.rows == 0 or self.outer < 0


def refusal(spec: OperandSpec, rows: int, k: int) -> str:
    """Why the kernels can't cast an operand [rows, k] by ``spec``, the reference must; '' where they can."""
    fmt = get_format(spec.format)
    block, outer = spec.block, spec.outer
    if rows == 0 or k == 0:
        return f"an operand of {rows} x {k} is empty"
    if spec.rounding == "stochastic" and padded_k(k, spec) % 8:
        return f"stochastic noise is drawn for 8 columns at a time, K is {padded_k(k, spec)}"
    if block not in (WHOLE, ROW) and not (
        min(block) > 0 and TILE % block[1] == 0 and TILE % block[0] == 0 and block[0] in (1, block[1])
    ):
        return f"block {block[0]}x{block[1]} isn't whole, a row, 1xn or nxn with n dividing {TILE}"
    if block == ROW and (k > LONGEST_ROW or spec.hadamard or outer != NO_BLOCK):
        return f"one scale a row of {k} columns: possible up to {LONGEST_ROW}, without Hadamard and outer scales"
    if outer not in (NO_BLOCK, WHOLE) and not (outer[0] == 1 and outer[1] > 0 and TILE % outer[1] == 0):
        return f"outer block {outer[0]}x{outer[1]} isn't whole or 1xn with n dividing {TILE}"
    if spec.four_over_six and block[0] != 1:
        return "four_over_six in two-dimensional blocks"
    if not fmt.sign_magnitude and fmt.name not in ("hif8", "int8", "int4"):
        return f"no kernel encodes {fmt.name}"
    return ""


@lru_cache(maxsize=1024)
def plan_for(spec: OperandSpec) -> Plan:
    """The plan of a quantized spec that :func:`refusal` accepts."""
    fmt = get_format(spec.format)
    run = fmt.runs[0]
    rows, cols = spec.block
    target = spec.target or fmt.max
    layout = "float" if fmt.sign_magnitude else "tapered" if len(fmt.runs) > 1 else "integer"
    return Plan(
        layout=layout,
        bits=fmt.bits,
        mantissa=run.mantissa_bits,
        first_normal=fmt.min_step_exponent + run.mantissa_bits,
        min_step=fmt.min_step_exponent,
        least=2.0**fmt.min_step_exponent,
        emax=fmt.emax,
        max=fmt.max,
        max_rank=len(fmt.positives) - 1,
        flush=fmt.flush_below,
        nan=-1 if fmt.nan_code is None else fmt.nan_code,
        rounding=spec.rounding,
        scale=spec.scale,
        rule=spec.rule,
        target=target,
        target_four=target * 4 / 6,
        inverse_target=1.0 / target,
        emax_of_target=math.frexp(target)[1] - 1,
        half_of_width=1 << (22 - (fmt.emax - fmt.step_exponent(fmt.emax))),
        inner_max=FOUR_OVER_SIX_MAX if spec.four_over_six and spec.outer == WHOLE else E4M3FN.max,
        rows=max(rows, 0),
        cols=max(cols, 0),
        outer=spec.outer[1],
        hadamard=spec.hadamard,
        four_over_six=spec.four_over_six,
        delayed=spec.scaling == "delayed",
    )
