"""Pieces of kernels: one tile [BM, BK] float32 in registers is rotated, scaled, rounded and encoded.

Every function gives the bits of its namesake in the reference (:mod:`..quantize`, :mod:`..scaling`, :mod:`..casts`).
Kernels are launched without fused multiply-adds, so sums and products round as they are written. ``P`` is a
:class:`.plan.Plan`.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

FLT_MAX = tl.constexpr(3.4028234663852886e38)
LEAST_SCALE = tl.constexpr(2.0**-126)
LEAST_E4M3 = tl.constexpr(2.0**-9)


@triton.jit
def as_bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def pow2(exponent):
    """2^exponent, float32, for int32 in [-126, 127]."""
    return as_float((exponent + 127) << 23)


@triton.jit
def magnitude_bits(x):
    """Bits of abs(x); as integers they order like the magnitudes, and NaN is the greatest."""
    return as_bits(x) & 0x7FFFFFFF


@triton.jit
def finite_or_nan(bits):
    return tl.where(bits < 0x7F800000, as_float(bits), float("nan"))


@triton.jit
def philox_words(index, seed, stream):
    """Four uint32 words for each counter ``index``; seed points to int64[4]."""
    key = (tl.load(seed).to(tl.uint64) & 0xFFFFFFFF) | (tl.load(seed + 1).to(tl.uint64) << 32)
    zero = index.to(tl.uint32) * 0
    step = zero + tl.load(seed + 2).to(tl.uint32)
    site = zero + tl.load(seed + 3).to(tl.uint32)
    return tl.philox(key, step, index.to(tl.uint32), site, zero + stream)


@triton.jit
def noise_tile(row, col, width, seed, stream, BM: tl.constexpr, BK: tl.constexpr):
    """int32 [BM, BK] in [0, 2^16) for the tile at (row, col) of a padded operand that is ``width`` columns wide."""
    rows = row + tl.arange(0, BM).to(tl.int64)
    index = (rows[:, None] * width + col) // 8 + tl.arange(0, BK // 8)[None, :]
    w0, w1, w2, w3 = philox_words(index, seed, stream)
    low = tl.join(tl.join(w0 & 0xFFFF, w2 & 0xFFFF), tl.join(w1 & 0xFFFF, w3 & 0xFFFF))
    high = tl.join(tl.join(w0 >> 16, w2 >> 16), tl.join(w1 >> 16, w3 >> 16))
    return tl.reshape(tl.join(low, high), (BM, BK)).to(tl.int32)


@triton.jit
def signs(seed, stream, W: tl.constexpr):
    """Float32 [W] of +1 and -1: bit i % 32 of word i // 32 of counter 0."""
    place = tl.arange(0, W)
    w0, w1, w2, w3 = philox_words(place * 0, seed, stream)
    word = place // 32
    chosen = tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))
    bit = (chosen >> (place % 32).to(tl.uint32)) & 1
    return 1.0 - 2.0 * bit.to(tl.float32)


@triton.jit
def rotate(x, seed, stream, W: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """Random Hadamard transform of each group of W columns; butterflies at distance 1, 2, 4, ..., the factor last."""
    G: tl.constexpr = BM * BK // W
    y = tl.reshape(x, (G, W)) * signs(seed, stream, W)[None, :]
    LEVELS: tl.constexpr = 4 if W == 16 else 5 if W == 32 else 6 if W == 64 else 7
    for level in tl.static_range(LEVELS):
        pairs = tl.permute(tl.reshape(y, (G * W // (2 << level), 2, 1 << level)), (0, 2, 1))
        low, high = tl.split(pairs)
        y = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), (G, W))
    FACTOR: tl.constexpr = (
        0.25 if W == 16 else 0.1767766922712326 if W == 32 else 0.125 if W == 64 else 0.0883883461356163
    )
    return tl.reshape(y * FACTOR, (BM, BK))


@triton.jit
def step_exponent(exponent, P: tl.constexpr):
    """log2 of the grid spacing in the binade of ``exponent``."""
    if P.layout == "tapered":
        distance = tl.abs(exponent)
        bits = tl.where(distance < 4, 3, tl.where(distance < 8, 2, tl.where(distance < 16, 1, 0)))
        step = exponent - bits
    else:
        step = exponent - P.mantissa
    return tl.maximum(step, P.min_step)


@triton.jit
def round_integer(scaled, noise, ROUNDING: tl.constexpr):
    """float32 in [0, 2^10] -> the integer it rounds to, int32."""
    if ROUNDING == "stochastic":
        return ((scaled * 65536.0).to(tl.int32) + (noise ^ 0xFFFF)) >> 16
    elif ROUNDING == "rna":
        whole = scaled.to(tl.int32)
        return whole + (scaled - whole.to(tl.float32) >= 0.5).to(tl.int32)
    else:
        return as_bits(scaled + 8388608.0) - 0x4B000000


@triton.jit
def round_magnitude(y, noise, P: tl.constexpr):
    """abs(y) -> (r, step): the grid value is r x 2^step before saturation, int32 both. NaN gives any numbers."""
    bits = magnitude_bits(y)
    step = step_exponent(tl.minimum((bits >> 23) - 127, P.emax + 1), P)
    scaled = tl.minimum(as_float(bits) * pow2(-step), 512.0)
    ROUNDING: tl.constexpr = P.rounding
    r = round_integer(scaled, noise, ROUNDING)
    if P.flush > 0:
        r = tl.where(as_float(bits) < P.flush, 0, r)
    return r, step


@triton.jit
def grid_value(y, r, step, P: tl.constexpr):
    """The signed float32 value that (r, step) stands for, saturated; NaN stays NaN where the format has one."""
    value = tl.minimum(r.to(tl.float32) * pow2(step), P.max)
    sign = as_bits(y) & -0x80000000
    if P.layout != "float":  # no negative zero
        sign = tl.where(r == 0, 0, sign)
    value = as_float(as_bits(value) | sign)
    return tl.where(y != y, y, value) if P.nan >= 0 else value


@triton.jit
def float_rank(r, step, P: tl.constexpr):
    """Rank of r x 2^step in an ordinary float format: a carry out of the mantissa moves on to the next binade."""
    return tl.minimum(r + ((step - P.min_step) << P.mantissa), P.max_rank)


@triton.jit
def tapered_code(r, step, P: tl.constexpr):
    """HiF8 code of r x 2^step: prefix, exponent in sign-magnitude with an implicit leading one, mantissa."""
    bits = as_bits(tl.minimum(r.to(tl.float32) * pow2(step), P.max))
    exponent = (bits >> 23) - 127
    distance = tl.abs(exponent)
    wide = tl.where(
        distance == 0, 0, tl.where(distance == 1, 1, tl.where(distance < 4, 2, tl.where(distance < 8, 3, 4)))
    )
    mantissa_bits = tl.where(distance < 4, 3, tl.where(distance < 8, 2, 1))
    half = (1 << wide) >> 1
    field = (distance & (half - 1)) | tl.where(exponent < 0, half, 0)
    field = tl.where(wide == 0, 0, field)
    base = tl.where(wide == 0, 8, tl.where(wide == 1, 16, tl.where(wide == 2, 32, tl.where(wide == 3, 64, 96))))
    code = base | (field << mantissa_bits) | ((bits & 0x7FFFFF) >> (23 - mantissa_bits))
    code = tl.where(exponent < -15, exponent + 23, code)
    return tl.where(bits == 0, 0, code)


@triton.jit
def codes_of(y, r, step, P: tl.constexpr):
    """int32 codes; NaN -> the format's NaN, or 0 where it has none."""
    negative = as_bits(y) < 0
    if P.layout == "integer":
        code = tl.minimum(r, P.max_rank)
        code = tl.where(negative, -code, code) & ((1 << P.bits) - 1)
    elif P.layout == "tapered":
        code = tapered_code(r, step, P)
        code = tl.where(negative & (code > 0), code | (1 << (P.bits - 1)), code)
    else:
        code = float_rank(r, step, P) | tl.where(negative, 1 << (P.bits - 1), 0)
    return tl.where(y != y, P.nan if P.nan >= 0 else 0, code)


@triton.jit
def e8m0_code(amax, P: tl.constexpr):
    """Scale codes (int32) for the bits of block amaxes, by the spec's rule."""
    finite = tl.where(amax < 0x7F800000, amax, 0)
    if P.rule == "floor":
        code = (finite >> 23) - P.emax_of_target
    elif P.rule == "ceil":
        code = ceil_exponent(finite) - P.emax_of_target
    elif P.rule == "even":
        up = (finite + P.half_of_width) >> 23
        code = tl.where(up == 255, 255, up - P.emax_of_target)
    else:
        product = as_bits(as_float(finite) * P.inverse_target)
        if P.rule == "nearest":
            subnormal = (product > 0x400000).to(tl.int32)
            code = tl.where(product < 0x800000, subnormal, (product + 0x400000) >> 23)
        else:
            code = ceil_exponent(product)
    GREATEST: tl.constexpr = 254 if P.rule == "rceil_satfinite" else 255
    code = tl.minimum(tl.maximum(code, 0), GREATEST)
    code = tl.where(amax == 0x7F800000, GREATEST, code)
    return tl.where(amax > 0x7F800000, 255, code)


@triton.jit
def ceil_exponent(bits):
    """Biased exponent of the power of two at or above; 0 stands for 2^-127."""
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    return exponent + (mantissa > tl.where(exponent == 0, 0x400000, 0)).to(tl.int32)


@triton.jit
def e8m0_value(code):
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return as_float(tl.where(code == 255, 0x7FC00000, bits))


@triton.jit
def e4m3_code(scale, RULE: tl.constexpr):
    """E4M3 codes (int32) of scales >= 0 or NaN, saturating."""
    bits = magnitude_bits(scale)
    step = tl.maximum(tl.minimum((bits >> 23) - 127, 9) - 3, -9)
    scaled = tl.minimum(as_float(bits) * pow2(-step), 512.0)
    if RULE == "nearest":
        r = round_integer(scaled, 0, "rne")
    else:
        r = scaled.to(tl.int32)
        if RULE == "ceil":
            r += (scaled > r.to(tl.float32)).to(tl.int32)
    return tl.where(scale != scale, 127, tl.minimum(r + ((step + 9) << 3), 126))


@triton.jit
def e4m3_value(code):
    """Float32 of the codes of magnitudes."""
    normal = as_float((code << 20) + (120 << 23))
    value = tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)
    return tl.where(code == 127, float("nan"), value)


@triton.jit
def outer_scale(amax, P: tl.constexpr):
    scale = tl.div_rn(tl.div_rn(finite_or_nan(amax), P.inner_max), P.target)
    return tl.where(scale == 0, 1.0, scale)


@triton.jit
def inner_scale(amax, outer, TARGET: tl.constexpr, P: tl.constexpr):
    """(stored scale, its float32 value) of block amaxes (bits); ``outer`` is already on their grid, 1 where none."""
    if P.scale == "e8m0":
        code = e8m0_code(amax, P)
        return code, e8m0_value(code)
    elif P.scale == "e4m3fn":
        value = finite_or_nan(amax)
        if P.outer != 0:
            value = tl.div_rn(value, outer)
        value = tl.div_rn(value, TARGET)
        RULE: tl.constexpr = P.rule
        code = e4m3_code(tl.where(value == 0, LEAST_E4M3, value), RULE)
        return code, e4m3_value(code)
    else:
        scale = tl.div_rn(finite_or_nan(amax), TARGET)
        scale = tl.where(scale != scale, scale, tl.minimum(tl.maximum(scale, LEAST_SCALE), FLT_MAX))
        scale = tl.where(amax == 0, 1.0, scale)
        return scale, scale


@triton.jit
def inverse(code, value, outer, P: tl.constexpr):
    if P.scale == "e8m0" and P.outer == 0:
        return e8m0_value(tl.where(code == 255, 255, 254 - code))
    else:
        product = outer * value if P.outer != 0 else value
        one_over = tl.div_rn(1.0, product)
        one_over = tl.where(one_over > FLT_MAX, FLT_MAX, one_over)
        return tl.where(product == 0, 0.0, one_over)


@triton.jit
def block_max(bits, R: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """[BM, BK] -> greatest of each R x C block, [BM / R, BK / C]."""
    if R == 1:
        return tl.max(tl.reshape(bits, (BM, BK // C, C)), 2)
    else:
        return tl.max(tl.max(tl.reshape(bits, (BM // R, R, BK // C, C)), 3), 1)


@triton.jit
def spread(s, R: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """A value a block -> a value a cell, [BM, BK]."""
    if R == 1:
        return tl.reshape(tl.broadcast_to(s[:, :, None], (BM, BK // C, C)), (BM, BK))
    else:
        return tl.reshape(tl.broadcast_to(s[:, None, :, None], (BM // R, R, BK // C, C)), (BM, BK))


@triton.jit
def block_sum(x, C: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """[BM, BK] -> sum of each 1 x C block, by halving: the reference's order of additions."""
    G: tl.constexpr = BM * BK // C
    LEVELS: tl.constexpr = C.bit_length() - 1
    y = tl.reshape(x, (G, C))
    for level in tl.static_range(LEVELS):
        low, high = tl.split(tl.permute(tl.reshape(y, (G, 2, C >> (level + 1))), (0, 2, 1)))
        y = low + high
    return tl.reshape(y, (BM, BK // C))


@triton.jit
def four_error(x, noise, value, inv, wanted, P: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """Squared error per block in units of the outer scale."""
    y = x * spread(inv, 1, C, BM, BK)
    r, step = round_magnitude(y, noise, P)
    error = grid_value(y, r, step, P) * spread(value, 1, C, BM, BK) - wanted
    return block_sum(error * error, C, BM, BK)


@triton.jit
def choose_scale(x, noise, amax, outer, P: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """Four over six: (code, value) for the target or two thirds of it, whichever errs less; a tie: the latter."""
    wanted = x
    if P.outer != 0:
        one_over = tl.div_rn(1.0, outer)
        one_over = tl.where(outer == 0, 0.0, tl.where(one_over > FLT_MAX, FLT_MAX, one_over))
        wanted = x * (spread(one_over, 1, C, BM, BK) if P.outer > 0 else one_over)
    code6, value6 = inner_scale(amax, outer, P.target, P)
    code4, value4 = inner_scale(amax, outer, P.target_four, P)
    error6 = four_error(x, noise, value6, inverse(code6, value6, outer, P), wanted, P, C, BM, BK)
    error4 = four_error(x, noise, value4, inverse(code4, value4, outer, P), wanted, P, C, BM, BK)
    four = error4 <= error6
    return tl.where(four, code4, code6), tl.where(four, value4, value6)


@triton.jit
def local_outer(amax, P: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """From inner amaxes [BM, BK / C]: (outer scales [BM, BK / outer], the same on the inner grid)."""
    G: tl.constexpr = P.outer // C
    scale = outer_scale(tl.max(tl.reshape(amax, (BM, BK // P.outer, G)), 2), P)
    grid = tl.broadcast_to(scale[:, :, None], (BM, BK // P.outer, G))
    return scale, tl.reshape(grid, (BM, BK // C))


@triton.jit
def cast_tile(x, noise, given, P: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """x [BM, BK] -> (codes, values, stored scales, outer scales). ``given``: bits of the amax of the whole operand, for
    plans that need it. Values are q x scale x outer, what :func:`..quantize.dequantize` reads back."""
    R: tl.constexpr = P.rows
    C: tl.constexpr = P.cols if P.cols > 0 else BK
    outer, grid = 1.0, 1.0
    if R == 0:
        stored, value = inner_scale(given, 1.0, P.target, P)
        y = x * inverse(stored, value, 1.0, P)
        if P.delayed and P.nan >= 0:
            y = tl.where(magnitude_bits(x) == 0x7F800000, float("nan"), y)
    else:
        amax = block_max(magnitude_bits(x), R, C, BM, BK)
        if P.outer > 0:
            outer, grid = local_outer(amax, P, C, BM, BK)
        elif P.outer < 0:
            outer = outer_scale(given, P)
            grid = outer
        if P.four_over_six:
            stored, value = choose_scale(x, noise, amax, grid, P, C, BM, BK)
        else:
            stored, value = inner_scale(amax, grid, P.target, P)
        y = x * spread(inverse(stored, value, grid, P), R, C, BM, BK)
    r, step = round_magnitude(y, noise, P)
    values = grid_value(y, r, step, P) * (spread(value, R, C, BM, BK) if R > 0 else value)
    if P.outer > 0:
        values = values * spread(grid, R, C, BM, BK)
    elif P.outer < 0:
        values = values * outer
    return codes_of(y, r, step, P), values, stored, outer
