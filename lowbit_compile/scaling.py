"""amax -> scale. Every rule is exact: bit arithmetic for E8M0, IEEE division and one rounding for the other two.

Sources: OCP MX v1.0 (floor), NVIDIA 2506.08027 and Transformer Engine (rceil, rceil_satfinite), torchao (ceil, even),
ml_dtypes (nearest), TetraJet-v2 (the two-level E4M3 scale). Common to all: an amax that is NaN or infinite gives a NaN
scale, so what can't be represented never turns into a plain number (only ``rceil_satfinite`` maps infinity to 2^127,
where the largest element then decodes to infinity again).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .casts import decode, encode, is_nan, round_to_grid
from .errors import UnsupportedError, nearest
from .formats import E4M3FN, Format

E8M0_NAN = 0xFF
E8M0_MAX = 0xFE
FLT_MAX = torch.finfo(torch.float32).max
LEAST_SCALE = 2.0**-126  # of a float32 scale: its inverse, 2^126, is finite, and neither is subnormal
LEAST_E4M3 = 2.0**-9  # the scale of an all-zero block
E4M3_ROUNDINGS = {"nearest": "rne", "ceil": "up", "floor": "down"}


def divide(x: Tensor, value: float) -> Tensor:
    """x / value, correctly rounded, float32. The divisor depends on x for show: by a constant, CUDA's eager kernels and
    Inductor's GPU code multiply by its reciprocal instead (one ulp off now and then; torch 2.11 and 2.13)."""
    return x / torch.where(is_nan(x), 1.0, value)


def reciprocal(x: Tensor) -> Tensor:
    """1 / x, correctly rounded, float32; a constant numerator keeps Inductor (torch 2.11) from exact division."""
    return torch.where(is_nan(x), x, 1.0) / x


def _finite_or_nan(amax: Tensor) -> Tensor:
    return torch.where(amax.isfinite(), amax, float("nan"))


def float32_scale(amax: Tensor, target: float) -> Tensor:
    """Float32 scale of any shape: amax / target, at least 2^-126 and at most the greatest float32; amax 0 -> 1."""
    scale = divide(_finite_or_nan(amax), target).clamp(LEAST_SCALE, FLT_MAX)
    return torch.where(amax == 0, 1.0, scale)


def outer_scale(amax: Tensor, inner_max: float, target: float) -> Tensor:
    """Second-level float32 scale: amax / inner_max / target, two divisions in this order, 0 -> 1 (nvfp4 1.1)."""
    scale = divide(divide(_finite_or_nan(amax), inner_max), target)
    return torch.where(scale == 0, 1.0, scale)


def e4m3_scale(amax: Tensor, outer: Tensor | None, target: float, rule: str = "nearest") -> Tensor:
    """E4M3 codes (uint8, shape of ``amax``) of amax / outer / target, saturating at 448; exactly 0 -> 2^-9 (nvfp4 1.1).

    ``outer`` is float32 and broadcasts against ``amax``. A quotient in (0, 2^-10] still rounds to 0 under ``nearest``,
    which flushes the block, as the released TetraJet-v2 kernels do.
    """
    if rule not in E4M3_ROUNDINGS:
        raise UnsupportedError(f"scale rule {rule!r} for an e4m3fn scale; possible: {', '.join(E4M3_ROUNDINGS)}")
    amax = _finite_or_nan(amax)
    scale = divide(amax if outer is None else amax / outer, target)
    scale = torch.where(scale == 0, LEAST_E4M3, scale)
    return encode(round_to_grid(scale, E4M3FN, E4M3_ROUNDINGS[rule]), E4M3FN)


def _ceil_exponent(bits: Tensor) -> Tensor:
    """Biased exponent of the power of two at or above a float32 >= 0, given its bits; 0 stands for 2^-127."""
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    return exponent + (mantissa > torch.where(exponent == 0, 0x400000, 0)).to(torch.int32)


def _product_bits(amax: Tensor, target: float) -> Tensor:
    """Bits of float32(amax x float32(1 / target)): equal to exact arithmetic for the maxima 448, 57344 and 6."""
    return (amax * torch.full((), 1.0 / target, dtype=torch.float32, device=amax.device)).view(torch.int32)


def _emax(target: float) -> int:
    return math.frexp(target)[1] - 1


def _floor(amax: Tensor, fmt: Format, target: float) -> Tensor:
    return (amax.view(torch.int32) >> 23) - _emax(target)


def _ceil(amax: Tensor, fmt: Format, target: float) -> Tensor:
    return _ceil_exponent(amax.view(torch.int32)) - _emax(target)


def _rceil(amax: Tensor, fmt: Format, target: float) -> Tensor:
    return _ceil_exponent(_product_bits(amax, target))


def _even(amax: Tensor, fmt: Format, target: float) -> Tensor:
    """Round amax's mantissa half up to the element's width, then floor; NaN where that leaves float32, as torchao."""
    width = fmt.emax - fmt.step_exponent(fmt.emax)
    exponent = (amax.view(torch.int32) + (1 << (22 - width))) >> 23
    return torch.where(exponent == 255, E8M0_NAN, exponent - _emax(target))


def _nearest(amax: Tensor, fmt: Format, target: float) -> Tensor:
    """The nearer power of two of amax / target; 1.5 x 2^n goes up, and so does all between 2^-127 and 2^-126."""
    bits = _product_bits(amax, target)
    return torch.where(bits < 0x800000, (bits > 0x400000).to(torch.int32), (bits + 0x400000) >> 23)


E8M0_RULES: dict[str, Callable[[Tensor, Format, float], Tensor]] = {
    "floor": _floor,
    "ceil": _ceil,
    "rceil": _rceil,
    "rceil_satfinite": _rceil,
    "even": _even,
    "nearest": _nearest,
}


def e8m0_scale(amax: Tensor, fmt: Format, rule: str, target: float = 0.0) -> Tensor:
    """E8M0 codes (uint8, shape of ``amax``) for float32 ``amax`` >= 0 of blocks in ``fmt``.

    floor: 2^floor(log2 amax) / 2^emax. ceil: the same with ceil. even: amax's mantissa is rounded to the element's
    width first. rceil: amax / target rounded up. nearest: amax / target rounded to nearest. ``target`` 0 is the
    format's maximum. At least 2^-127, which is also what amax 0 gives. NaN, infinity and a result above 2^127 -> 0xFF
    (``rceil_satfinite``: NaN only, the others 0xFE).
    """
    if rule not in E8M0_RULES:
        choices = ", ".join(E8M0_RULES)
        raise UnsupportedError(f"scale rule {rule!r} for an e8m0 scale; possible: {choices}{nearest(rule, E8M0_RULES)}")
    greatest = E8M0_MAX if rule == "rceil_satfinite" else E8M0_NAN
    code = E8M0_RULES[rule](torch.where(amax.isfinite(), amax, 0.0), fmt, target or fmt.max).clamp(0, greatest)
    code = torch.where(amax == float("inf"), greatest, code)
    return torch.where(amax.isnan(), E8M0_NAN, code).to(torch.uint8)


def e8m0_value(code: Tensor) -> Tensor:
    """2^(code - 127) as float32 for E8M0 codes (any integer dtype), 0xFF -> NaN; from bits, so no table is needed."""
    wide = code.to(torch.int32)
    bits = torch.where(wide == 0, 0x00400000, wide << 23)
    return torch.where(wide == E8M0_NAN, 0x7FC00000, bits).view(torch.float32)


def scale_value(scale: Tensor, kind: str) -> Tensor:
    """Float32 value of a stored scale: float32 itself, or uint8 codes of ``kind`` ``e8m0`` or ``e4m3fn``."""
    if kind == "e8m0":
        return e8m0_value(scale)
    return decode(scale, E4M3FN) if kind == "e4m3fn" else scale


def inverse(scale: Tensor, kind: str, outer: Tensor | None = None) -> Tensor:
    """Float32 multiplier 1 / (outer x scale): 0 where the product is 0, at most the greatest float32, NaN stays NaN.

    E8M0 is inverted in its code, so 2^127 gives the subnormal 2^-127 without a division.
    """
    if kind == "e8m0" and outer is None:
        code = scale.to(torch.int32)
        return e8m0_value(torch.where(code == E8M0_NAN, E8M0_NAN, E8M0_MAX - code))
    value = scale_value(scale, kind)
    product = value if outer is None else outer * value
    return torch.where(product == 0, 0.0, reciprocal(product).clamp(max=FLT_MAX))
