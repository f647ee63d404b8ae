"""Element casts: float32 <-> grid values <-> codes <-> packed bytes, for every format, in plain torch.

The rules, one each:

- *Rounding*: ``rne`` (ties to even), ``rna`` (ties away), ``down`` / ``up`` (toward / away from zero), ``stochastic``
  (up where the discarded fraction exceeds the random bits), ``hybrid`` (CANN's CAST_HYBRID for HiF8, deterministic).
- *Saturation*: a finite value beyond the greatest finite one becomes it; so does an infinity, unless
  ``overflow="infinity"`` asks for the format's own infinity.
- *NaN* stays NaN. A format without a NaN code can't hold one: :mod:`.quantize` puts it into the scale.
- *Zero* keeps its sign where the format has a negative zero; *subnormals* of float32 are ordinary numbers.

All arithmetic is exact in float32 (powers of two and floor), so eager, compiled and kernel code agree bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .formats import Format

ROUNDINGS = ("rne", "rna", "stochastic", "down", "up", "hybrid")
# Compared with the discarded fraction in stochastic rounding; the bias is toward zero, less than 2^-16 of a step.
RANDOM_BITS = 16


def is_nan(x: Tensor) -> Tensor:
    """True where x is NaN. Inductor's CPU code for torch.isnan is a scalar loop (torch 2.13), this is one compare."""
    return x != x


def pow2(exponent: Tensor) -> Tensor:
    """2^exponent for int32 exponents in [-126, 127], built from bits."""
    return ((exponent + 127) << 23).view(torch.float32)


def step_exponent(magnitude: Tensor, fmt: Format) -> Tensor:
    """log2 of the grid spacing at ``magnitude`` (float32, >= 0), int32."""
    exponent = ((magnitude.view(torch.int32) >> 23) - 127).clamp(max=fmt.emax + 1)
    step = exponent - fmt.runs[0].mantissa_bits
    for run in fmt.runs[1:]:
        step = torch.where(exponent >= run.first_exponent, exponent - run.mantissa_bits, step)
    return step.clamp(min=fmt.min_step_exponent)


def _round_scaled(scaled: Tensor, rounding: str, random_bits: Tensor | None, width: int) -> Tensor:
    """Round nonnegative ``scaled`` (grid spacing 1) to an integer."""
    if rounding == "rne":
        return scaled.round()
    if rounding == "up":
        return scaled.ceil()
    whole = scaled.floor()
    fraction = scaled - whole
    if rounding == "down":
        return whole
    if rounding == "rna":
        return whole + (fraction >= 0.5).float()
    assert rounding == "stochastic", rounding
    assert random_bits is not None, "stochastic rounding needs random bits"
    return whole + ((fraction * float(1 << width)).floor() > random_bits.float()).float()


def _round_hybrid(scaled: Tensor, magnitude: Tensor) -> Tensor:
    """CAST_HYBRID: ties away where |exponent| < 4, else the input's own low 14 mantissa bits are the threshold."""
    bits = magnitude.view(torch.int32)
    exponent = (bits >> 23) - 127
    whole = scaled.floor()
    fraction = scaled - whole
    up = torch.where(
        exponent.abs() < 4, fraction >= 0.5, (fraction * 16384.0).floor().to(torch.int32) >= (bits & 0x3FFF)
    )
    return whole + up.float()


def round_to_grid(
    x: Tensor,
    fmt: Format,
    rounding: str,
    random_bits: Tensor | None = None,
    *,
    random_width: int = RANDOM_BITS,
    overflow: str = "saturate",
) -> Tensor:
    """Round float32 ``x`` (any shape) to the values of ``fmt``, returned as float32 of the same shape.

    Args:
        random_bits: integers in [0, 2^random_width), the shape of ``x``, needed by ``stochastic``.
        overflow: ``"saturate"`` or ``"infinity"`` (only for formats that have one).
    """
    bits = x.view(torch.int32)
    magnitude = (bits & 0x7FFFFFFF).view(torch.float32)
    exponent = step_exponent(magnitude, fmt)
    scaled = magnitude * pow2(-exponent)
    if rounding == "hybrid":
        rounded = _round_hybrid(scaled, magnitude)
    else:
        rounded = _round_scaled(scaled, rounding, random_bits, random_width)
    value = rounded * pow2(exponent)
    if fmt.flush_below:
        value = torch.where(magnitude < fmt.flush_below, 0.0, value)
    saturate = overflow != "infinity"
    value = value.clamp(max=fmt.max) if saturate else torch.where(value > fmt.max, float("inf"), value)
    return (value.view(torch.int32) | (bits & -0x80000000)).view(torch.float32)


def encode(value: Tensor, fmt: Format) -> Tensor:
    """Codes (uint8, same shape) of float32 ``value``, which must lie on the grid of ``fmt`` or be NaN/infinity."""
    bits = value.view(torch.int32)
    magnitude = (bits & 0x7FFFFFFF).view(torch.float32)
    negative = bits < 0
    if fmt.sign_magnitude:
        code = _float_rank(magnitude, fmt) | (negative.to(torch.int32) << (fmt.bits - 1))
    else:
        ranks = torch.bucketize(magnitude.contiguous(), _table(fmt.positives, torch.float32, value.device))
        ranks = ranks.clamp(max=len(fmt.positives) - 1)
        plus, minus = (_table(codes, torch.int32, value.device) for codes in fmt.codes_by_rank)
        code = torch.where(negative, minus[ranks], plus[ranks])
    if fmt.inf_code is not None:
        sign = 1 << (fmt.bits - 1)
        code = torch.where(magnitude == float("inf"), fmt.inf_code + sign * negative.to(torch.int32), code)
    if fmt.nan_code is not None:
        code = torch.where(is_nan(value), fmt.nan_code, code)
    return code.to(torch.uint8)


def _float_rank(magnitude: Tensor, fmt: Format) -> Tensor:
    """Rank of a grid magnitude in an ordinary float format: its exponent and mantissa fields side by side."""
    mantissa_bits = fmt.runs[0].mantissa_bits
    first_normal = fmt.min_step_exponent + mantissa_bits
    fields = (magnitude.view(torch.int32) >> (23 - mantissa_bits)) - ((first_normal + 126) << mantissa_bits)
    subnormal = (magnitude * 2.0**-fmt.min_step_exponent).clamp(max=float(1 << mantissa_bits)).to(torch.int32)
    return torch.where(magnitude < 2.0**first_normal, subnormal, fields)


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """Values (float32, same shape) of ``codes`` (uint8)."""
    code = codes.to(torch.int32)
    if not fmt.sign_magnitude:
        return _table(fmt.values, torch.float32, codes.device)[code]
    sign = 1 << (fmt.bits - 1)
    rank = code & (sign - 1)
    mantissa_bits = fmt.runs[0].mantissa_bits
    first_normal = fmt.min_step_exponent + mantissa_bits
    normal = ((rank << (23 - mantissa_bits)) + ((first_normal + 126) << 23)).view(torch.float32)
    value = torch.where(rank < 1 << mantissa_bits, rank.to(torch.float32) * 2.0**fmt.min_step_exponent, normal)
    if len(fmt.positives) < sign:
        value = torch.where(rank >= len(fmt.positives), float("nan"), value)
    if fmt.inf_code is not None:
        value = torch.where(rank == fmt.inf_code, float("inf"), value)
    return torch.where(code >= sign, -value, value)


def _table(entries: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(entries, dtype=dtype, device=device)


def pack(codes: Tensor) -> Tensor:
    """[..., K] 4-bit codes -> [..., K/2] bytes, the even element in the low nibble. K must be even.

    Two codes are read as one 16-bit number: strided slices are not vectorized in Inductor's CPU code (torch 2.13).
    """
    pairs = codes.contiguous().view(torch.int16)
    return (pairs >> 4).bitwise_or_(pairs).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """[..., K/2] bytes -> [..., K] 4-bit codes; the inverse of :func:`pack`."""
    pairs = packed.to(torch.int16, memory_format=torch.contiguous_format)
    return (pairs << 4).bitwise_or_(pairs).bitwise_and_(0x0F0F).view(torch.uint8)
