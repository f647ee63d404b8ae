"""THE reference: one operand [R, K], contraction axis last, to codes and scales and back, in plain torch.

Every kernel must give these bytes. Order of operations (nvfp4 1.1; MX and single-level scales are the special cases):

    outer = amax(outer block) / inner_max / target        float32, 0 -> 1
    scale = amax(block) / outer / target                  rounded to the scale's format by the rule
    inv   = 1 / (outer * scale)                           0 where the product is 0
    y     = x * inv
    q     = cast(y)                                       saturating
    value = float32(q) * float32(scale) * outer

A NaN or infinity never becomes a plain number. With scales from this tensor it makes the scales of its blocks NaN. With
``amax`` given (delayed scaling) the element alone becomes NaN where the format has one, otherwise the scale does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .casts import decode, encode, is_nan, pack, round_to_grid, unpack
from .errors import UnsupportedError
from .formats import E4M3FN, Format, get_format
from .hadamard import random_signs, rotate
from .random_bits import random_bits_for
from .scaling import e4m3_scale, e8m0_scale, float32_scale, inverse, outer_scale, scale_value
from .spec import Block, OperandSpec

NO_BLOCK = (0, 0)
WHOLE = (-1, -1)
FOUR_OVER_SIX_MAX = 256.0  # inner bound of 4/6 under one tensor scale: 384, for the 4, is still an E4M3 value


def padded_k(k: Any, spec: OperandSpec) -> Any:
    """K (int or SymInt) rounded up to whole blocks of both levels, whole Hadamard groups and whole bytes."""
    step = math.lcm(
        max(spec.block[1], 1),
        max(spec.outer[1], 1),
        max(spec.hadamard, 1),
        2 if spec.quantized and get_format(spec.format).bits == 4 else 1,
    )
    return (k + step - 1) // step * step


def padded_shape(rows: Any, k: Any, spec: OperandSpec) -> tuple[Any, Any]:
    """[rows, k] with whole blocks of both levels."""
    step = math.lcm(max(spec.block[0], 1), max(spec.outer[0], 1))
    return (rows + step - 1) // step * step, padded_k(k, spec)


def _grid(rows: Any, cols: Any, block: Block) -> tuple[Any, Any]:
    """Blocks down and across a padded operand."""
    return (1 if block[0] < 0 else rows // block[0]), (1 if block[1] < 0 else cols // block[1])


def payload_like(rows: Any, k: Any, spec: OperandSpec) -> list[tuple[tuple[Any, Any], torch.dtype]]:
    """(shape, dtype) of each tensor that :func:`quantize` returns for [rows, k] (int or SymInt); quantized specs.

    Codes [rows, K] or, packed, [rows, K / 2], K padded; scale [blocks down, blocks across]; outer likewise if any.
    """
    height, width = padded_shape(rows, k, spec)
    stored = width // 2 if get_format(spec.format).bits == 4 else width
    kind = torch.float32 if spec.scale == "float32" else torch.uint8
    found = [((rows, stored), torch.uint8), (_grid(height, width, spec.block), kind)]
    if spec.outer != NO_BLOCK:
        found.append((_grid(height, width, spec.outer), torch.float32))
    return found


def _pad(x: Tensor, rows: Any, cols: Any) -> Tensor:
    """Float32 copy of x with zeros below and to the right."""
    x = x.to(torch.float32)
    if rows != x.shape[0] or cols != x.shape[1]:
        x = torch.nn.functional.pad(x, (0, cols - x.shape[1], 0, rows - x.shape[0]))
    return x


def _blocks(x: Tensor, block: Block) -> Tensor:
    """[rows, cols] -> [blocks down, block rows, blocks across, block cols]."""
    down, across = _grid(x.shape[0], x.shape[1], block)
    return x.reshape(down, x.shape[0] if block[0] < 0 else block[0], across, x.shape[1] if block[1] < 0 else block[1])


def _spread(scale: Tensor, block: Block, rows: Any, cols: Any) -> Tensor:
    """A value per block -> a value per cell of a [rows, cols] grid."""
    height, width = rows if block[0] < 0 else block[0], cols if block[1] < 0 else block[1]
    return scale[:, None, :, None].expand(scale.shape[0], height, scale.shape[1], width).reshape(rows, cols)


def _spread_outer(outer: Tensor, spec: OperandSpec, inner_shape: Any) -> Tensor:
    """Outer scales on the grid of the inner ones, ``inner_shape``."""
    rows, cols = (-1 if o < 0 else 1 if i < 0 else o // i for o, i in zip(spec.outer, spec.block, strict=True))
    return _spread(outer, (rows, cols), *inner_shape)


def block_amax(x: Tensor, block: Block) -> Tensor:
    """Greatest magnitude per block, float32 [blocks down, blocks across]; NaN propagates. x is padded, float32."""
    return _blocks(x.abs(), block).amax((1, 3))


def _check(spec: OperandSpec, seed: Tensor | None, amax: Tensor | None) -> None:
    """Refuse what has no meaning, in words; policies are checked earlier, this guards direct callers."""
    if (spec.rounding == "stochastic" or spec.hadamard) and seed is None:
        raise UnsupportedError(f"{spec} draws random bits and needs a seed (int64[4]: key 0, key 1, step, site)")
    if amax is not None and (spec.block != WHOLE or spec.outer != NO_BLOCK):
        raise UnsupportedError(f"{spec}: an amax from outside fits only block -1x-1 without an outer scale")
    if spec.outer != NO_BLOCK:
        if spec.scale != "e4m3fn":
            raise UnsupportedError(f"{spec}: an outer scale goes with scale e4m3fn, not {spec.scale}")
        for outer, inner in zip(spec.outer, spec.block, strict=True):
            if outer > 0 and (inner < 0 or outer % inner):
                raise UnsupportedError(f"{spec}: outer blocks must hold whole inner blocks")
    if spec.four_over_six and (spec.scale != "e4m3fn" or min(spec.block) < 1):
        raise UnsupportedError(f"{spec}: four_over_six needs blocks of fixed size and scale e4m3fn")


def _inner_scale(amax: Tensor, spec: OperandSpec, fmt: Format, target: float, outer: Tensor | None) -> Tensor:
    """Stored inner scales; ``outer`` is already on their grid."""
    if spec.scale == "e8m0":
        return e8m0_scale(amax, fmt, spec.rule, target)
    if spec.scale == "e4m3fn":
        return e4m3_scale(amax, outer, target, spec.rule)
    return float32_scale(amax, target)


def _scaled(x: Tensor, scale: Tensor, spec: OperandSpec, outer: Tensor | None) -> Tensor:
    """y = x * inv, element by element."""
    return x * _spread(inverse(scale, spec.scale, outer), spec.block, *x.shape)


def _window_amax(x: Tensor, window: Tensor, fmt: Format) -> Tensor:
    """Delayed amax [1, 1]: the window's, or this tensor's where that is 0; NaN where the codes can't show a NaN."""
    current = block_amax(x, WHOLE)
    amax = window.to(torch.float32).reshape(1, 1)
    amax = torch.where(amax == 0, current, amax)
    return amax if fmt.nan_code is not None else torch.where(current.isfinite(), amax, float("nan"))


def _fold(x: Tensor, axis: int) -> Tensor:
    """Sum along ``axis`` by halving, one fixed order of additions (torch.sum's depends on the backend)."""
    while (size := x.shape[axis]) > 1:
        half = (size + 1) // 2
        low, high = x.narrow(axis, 0, half), x.narrow(axis, half, size - half)
        if size % 2:
            high = torch.cat((high, torch.zeros_like(low.narrow(axis, 0, 1))), axis)
        x = low + high
    return x.squeeze(axis)


def _block_error(q: Tensor, wanted: Tensor, scale: Tensor, spec: OperandSpec) -> Tensor:
    """Squared error per block in units of the outer scale, where q * scale is exact: sum of (q * scale - wanted)^2."""
    error = q * _spread(scale_value(scale, spec.scale), spec.block, *q.shape) - wanted
    return _fold(_fold(_blocks(error * error, spec.block), 3), 1)


def _choose(
    x: Tensor, amax: Tensor, spec: OperandSpec, fmt: Format, target: float, outer: Tensor | None, noise: Tensor | None
) -> Tensor:
    """Inner scales of 4/6: per block the target or two thirds of it, whichever errs less; a tie: the latter (TV5)."""
    wanted = x if outer is None else x * _spread(inverse(outer, "float32"), spec.block, *x.shape)
    scales = [_inner_scale(amax, spec, fmt, t, outer) for t in (target, target * 4 / 6)]
    errors = []
    for scale in scales:
        q = round_to_grid(_scaled(x, scale, spec, outer), fmt, spec.rounding, noise)
        errors.append(_block_error(q, wanted, scale, spec))
    return torch.where(errors[1] <= errors[0], scales[1], scales[0])


def _outer(x: Tensor, spec: OperandSpec, target: float) -> Tensor | None:
    if spec.outer == NO_BLOCK:
        return None
    inner_max = FOUR_OVER_SIX_MAX if spec.four_over_six and spec.outer == WHOLE else E4M3FN.max
    return outer_scale(block_amax(x, spec.outer), inner_max, target)


def noise_for(rows: Any, k: Any, spec: OperandSpec, seed: Tensor, stream: int | Tensor) -> Tensor:
    """The random bits that stochastic rounding of an operand [rows, k] uses, int32 on its padded shape."""
    return random_bits_for(*padded_shape(rows, k, spec), seed=seed, stream=stream)


def rotate_operand(x: Tensor, spec: OperandSpec, seed: Tensor, sign_stream: int | Tensor) -> Tensor:
    """x [R, K] after the spec's random Hadamard transform, float32 [R, padded K]."""
    width = padded_k(x.shape[1], spec)
    return rotate(_pad(x, x.shape[0], width), spec.hadamard, random_signs(spec.hadamard, seed, sign_stream))


def cast(x: Tensor, spec: OperandSpec, amax: Tensor | None = None, noise: Tensor | None = None) -> list[Tensor]:
    """:func:`quantize` of x [R, K], R and K >= 1, already rotated: draws nothing and leaves 4-bit codes unpacked."""
    fmt = get_format(spec.format)
    rows, k = x.shape
    full = _pad(x, *padded_shape(rows, k, spec))
    target = spec.target or fmt.max
    outer = _outer(full, spec, target)
    inner_amax = block_amax(full, spec.block) if amax is None else _window_amax(full, amax, fmt)
    on_grid = None if outer is None else _spread_outer(outer, spec, inner_amax.shape)
    if spec.four_over_six:
        scale = _choose(full, inner_amax, spec, fmt, target, on_grid, noise)
    else:
        scale = _inner_scale(inner_amax, spec, fmt, target, on_grid)
    y = _scaled(full, scale, spec, on_grid)
    if fmt.nan_code is None:
        y = torch.where(is_nan(y), 0.0, y)  # the scale is NaN then; this only keeps the codes well defined
    elif amax is not None:
        y = torch.where(full.isinf(), float("nan"), y)
    codes = encode(round_to_grid(y, fmt, spec.rounding, noise), fmt)[:rows]
    return [codes, scale] + ([] if outer is None else [outer])


def quantize(
    x: Tensor,
    spec: OperandSpec,
    *,
    amax: Tensor | None = None,
    seed: Tensor | None = None,
    stream: int | Tensor = 0,
    sign_stream: int | Tensor = 0,
) -> list[Tensor]:
    """Cast x [R, K], any float dtype, blocks along K (see the module text for the formulas).

    Args:
        amax: float32 scalar of the delayed-scaling window, in units of x; 0 means "no history, use x's own".
        seed: int64[4], key 0, key 1, step, site; needed for stochastic rounding and for random signs.
        stream, sign_stream: Philox streams of this operand and of its GEMM (see :mod:`.random_bits`), numbers or
            int64 scalars.

    Returns:
        ``[codes, scale]`` or ``[codes, scale, outer]``, shapes and dtypes as in :func:`payload_like`; 4-bit codes are
        packed, even element in the low nibble. ``[x]`` where the spec leaves x in high precision. Rows that only
        complete a block are cut off again, columns are not.
    """
    if not spec.quantized:
        return [x]
    _check(spec, seed, amax)
    rows, k = x.shape
    if rows == 0 or k == 0:
        shapes = payload_like(rows, k, spec)
        return [torch.full(s, 0 if d == torch.uint8 else 1.0, dtype=d, device=x.device) for s, d in shapes]
    noise = None
    if spec.rounding == "stochastic" and seed is not None:
        noise = noise_for(rows, k, spec, seed, stream)
    if spec.hadamard and seed is not None:
        x = rotate_operand(x, spec, seed, sign_stream)
    codes, *scales = cast(x, spec, amax, noise)
    return [pack(codes) if get_format(spec.format).bits == 4 else codes, *scales]


def read_back(codes: Tensor, scales: list[Tensor], spec: OperandSpec) -> Tensor:
    """Values float32 [R, K] of unpacked codes [R, K], R and K >= 1: f32(q) * f32(scale) * outer, in this order."""
    rows, cols = codes.shape
    value = decode(codes, get_format(spec.format))
    height = padded_shape(rows, cols, spec)[0]
    value = value * _spread(scale_value(scales[0], spec.scale), spec.block, height, cols)[:rows]
    if spec.outer != NO_BLOCK:
        value = value * _spread(scales[1], spec.outer, height, cols)[:rows]
    return value


def unpacked(payload: list[Tensor], spec: OperandSpec) -> Tensor:
    """One code a byte, uint8 [R, padded K]."""
    return unpack(payload[0]) if get_format(spec.format).bits == 4 else payload[0]


def dequantize(payload: list[Tensor], spec: OperandSpec) -> Tensor:
    """Values of a payload of :func:`quantize`, float32 [R, padded K]; see :func:`read_back`.

    A Hadamard transform is not undone. High precision: the tensor as float32.
    """
    if not spec.quantized:
        return payload[0].to(torch.float32)
    codes = unpacked(payload, spec)
    return read_back(codes, payload[1:], spec) if codes.numel() else codes.to(torch.float32)


def fake_quantize(
    x: Tensor,
    spec: OperandSpec,
    *,
    amax: Tensor | None = None,
    seed: Tensor | None = None,
    stream: int | Tensor = 0,
    sign_stream: int | Tensor = 0,
) -> Tensor:
    """The values that x [R, K] has after its cast, float32 [R, K]; arguments as for :func:`quantize`."""
    payload = quantize(x, spec, amax=amax, seed=seed, stream=stream, sign_stream=sign_stream)
    return dequantize(payload, spec)[:, : x.shape[1]]
