"""Triton kernels of ``lowbit::quantize``: one read of a tensor gives the operand of one GEMM, its transpose for
another, or both. Bits are those of :func:`..quantize.quantize`.

A tile of x [R, K] is cast along K (``A``) and, transposed, along R (``B``), from x's values or from what A's cast made
of them. Scales of whole tensors need an amax first, which another kernel finds.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantize import padded_k, payload_like
from ..spec import OperandSpec
from . import tile
from .plan import TILE, Plan, plan_for

AMAX_PROGRAMS = 1024  # programs that share the search for one amax


@triton.jit
def load_tile(x, r0, c0, rows, cols, stride_row, stride_col, BM: tl.constexpr, BK: tl.constexpr):
    """float32 [BM, BK], zeros outside of x, and the mask of what is inside."""
    r = r0 + tl.arange(0, BM).to(tl.int64)[:, None]
    c = c0 + tl.arange(0, BK).to(tl.int64)[None, :]
    inside = (r < rows) & (c < cols)
    return tl.load(x + r * stride_row + c * stride_col, mask=inside, other=0.0).to(tl.float32), inside


@triton.jit
def amax_kernel(
    x,
    rows,
    cols,
    stride_row,
    stride_col,
    seed,
    signs,
    window,
    found,
    P: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """found <- max(found, bits of the greatest magnitude of x, rotated where the plan says so). A window that holds an
    amax needs none."""
    across = tl.cdiv(cols, BK)
    tiles = tl.cdiv(rows, BM) * across
    if P.delayed and P.nan >= 0:
        tiles = tl.where(tl.load(window) == 0, tiles, 0)
    greatest = tl.zeros((BM, BK), tl.int32)
    for i in range(tl.program_id(0), tiles, tl.num_programs(0)):
        v, _ = load_tile(
            x, (i // across).to(tl.int64) * BM, (i % across) * BK, rows, cols, stride_row, stride_col, BM, BK
        )
        if P.hadamard > 0:
            v = tile.rotate(v, seed, signs, P.hadamard, BM, BK)
        greatest = tl.maximum(greatest, tile.magnitude_bits(v))
    tl.atomic_max(found, tl.max(tl.max(greatest, 1), 0))


@triton.jit
def whole_amax(window, found, P: tl.constexpr):
    """Bits of the amax that the operand's one scale comes from."""
    bits = tl.load(found)
    if P.delayed:
        current = bits
        bits = tile.magnitude_bits(tl.load(window))
        bits = tl.where(bits == 0, current, bits)
        if P.nan < 0:
            bits = tl.where(current < 0x7F800000, bits, 0x7FC00000)
    return bits


@triton.jit
def store_grid(pointer, s, r0, c0, height, width, H: tl.constexpr, W: tl.constexpr):
    """Scales s [H, W] at (r0, c0) of a grid [height, width]."""
    r = r0 + tl.arange(0, H).to(tl.int64)[:, None]
    c = c0 + tl.arange(0, W)[None, :]
    tl.store(pointer + r * width + c, s.to(pointer.dtype.element_ty), mask=(r < height) & (c < width))


@triton.jit
def store_scale(pointer, s, r0, c0, rows, width, R: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """Scales of one level for the tile at (r0, c0): one a block R x C, or one in all where R is 0."""
    if R == 0:
        if (r0 == 0) & (c0 == 0):
            tl.store(pointer, s.to(pointer.dtype.element_ty))
    else:
        across = width // C if C < BK else tl.cdiv(width, C)
        store_grid(pointer, s, r0 // R, c0 // C, tl.cdiv(rows, R), across, BM // R, BK // C)


@triton.jit
def store_cast(
    codes,
    stored,
    outer,
    to,
    to_scale,
    to_outer,
    r0,
    c0,
    rows,
    width,
    P: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """One tile's codes, packed where they have 4 bits, and scales."""
    r = r0 + tl.arange(0, BM).to(tl.int64)[:, None]
    if P.bits == 4:
        low, high = tl.split(tl.reshape(codes, (BM, BK // 2, 2)))
        c = c0 // 2 + tl.arange(0, BK // 2)[None, :]
        tl.store(to + r * (width // 2) + c, (low | (high << 4)).to(tl.uint8), mask=(r < rows) & (c < width // 2))
    else:
        c = c0 + tl.arange(0, BK)[None, :]
        tl.store(to + r * width + c, codes.to(tl.uint8), mask=(r < rows) & (c < width))
    C: tl.constexpr = P.cols if P.cols > 0 else BK
    store_scale(to_scale, stored, r0, c0, rows, width, P.rows, C, BM, BK)
    if P.outer > 0:
        store_scale(to_outer, outer, r0, c0, rows, width, 1, P.outer, BM, BK)
    elif P.outer < 0:
        store_scale(to_outer, outer, r0, c0, rows, width, 0, BK, BM, BK)


@triton.jit
def side(
    v, r0, c0, rows, width, seed, noise, signs, window, found, to, to_scale, to_outer,
    P: tl.constexpr, STORE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Casts the tile v [BM, BK] at (r0, c0) of a padded operand [rows, width]; returns the values it stands for."""
    if P.hadamard > 0:
        v = tile.rotate(v, seed, signs, P.hadamard, BM, BK)
    given = 0
    if P.whole:
        given = whole_amax(window, found, P)
    bits = 0
    if P.rounding == "stochastic":
        bits = tile.noise_tile(r0, c0, width, seed, noise, BM, BK)
    codes, values, stored, outer = tile.cast_tile(v, bits, given, P, BM, BK)
    if STORE:
        store_cast(codes, stored, outer, to, to_scale, to_outer, r0, c0, rows, width, P, BM, BK)
    return values


@triton.jit
def cast_kernel(
    x, rows, cols, stride_row, stride_col, seed, window,
    a_found, a_noise, a_signs, a_codes, a_scale, a_outer, a_width,
    b_found, b_noise, b_signs, b_codes, b_scale, b_outer, b_width,
    A: tl.constexpr, B: tl.constexpr, STORE_A: tl.constexpr, B_FROM_A: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile; the grid covers x with both operands' padding."""
    across = tl.cdiv(tl.maximum(a_width, cols), BK)
    r0 = (tl.program_id(0) // across).to(tl.int64) * BM
    c0 = ((tl.program_id(0) % across) * BK).to(tl.int64)
    v, inside = load_tile(x, r0, c0, rows, cols, stride_row, stride_col, BM, BK)
    if A is not None:
        values = side(
            v, r0, c0, rows, a_width, seed, a_noise, a_signs, window, a_found, a_codes, a_scale, a_outer,
            A, STORE_A, BM, BK,
        )  # fmt: skip
        if B_FROM_A:
            v = tl.where(inside, values, 0.0)
    if B is not None:
        side(
            tl.trans(v), c0, r0, cols, b_width, seed, b_noise, b_signs, window, b_found, b_codes, b_scale, b_outer,
            B, True, BK, BM,
        )  # fmt: skip


@dataclass(frozen=True)
class Side:
    """One operand that a launch makes: numerics, and the Philox streams of its noise and of its GEMM's signs."""

    spec: OperandSpec
    noise: int
    signs: int


def _empty(rows: int, k: int, spec: OperandSpec, like: Tensor) -> list[Tensor]:
    return [like.new_empty(shape, dtype=dtype) for shape, dtype in payload_like(rows, k, spec)]


def _find(x: Tensor, seed: Tensor, window: Tensor, part: Side, plan: Plan) -> Tensor:
    """int32 [1]: bits of the amax over x [R, K] that ``plan`` needs; a stand-in that isn't read where it needs none."""
    if not plan.whole:
        return seed
    found = torch.zeros(1, dtype=torch.int32, device=x.device)
    tiles = triton.cdiv(x.shape[0], 32) * triton.cdiv(x.shape[1], TILE)
    amax_kernel[(min(tiles, AMAX_PROGRAMS),)](
        x, *x.shape, *x.stride(), seed, part.signs, window, found, plan, 32, TILE, enable_fp_fusion=False
    )
    return found


def _tile_shape(a: Plan | None, b: Plan | None, cols: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a tile: blocks of both operands fit."""
    if a is not None and a.rows == 1 and a.cols == 0:
        width = triton.next_power_of_2(cols)
        return 1, width, max(1, min(8, width // 1024))
    if b is not None:
        return TILE, TILE, 16
    return (TILE if a is not None and a.rows > 1 else 32), TILE, 4


def cast(
    x: Tensor, seed: Tensor, window: Tensor | None, a: Side | None, b: Side | None, *, b_from_a: bool, keep_a: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """x [R, K], any float dtype and strides -> (payload of ``a`` along K, payload of ``b`` along R); [] for None
    or, for ``a``, where it is not kept. ``b_from_a``: b casts the values that a's cast made. seed: int64[4]; window:
    float32[1], the amax of delayed scaling. The specs are ones that :func:`.plan.refusal` accepts.
    """
    rows, k = x.shape
    window = seed if window is None else window
    plans = [None if part is None else plan_for(part.spec) for part in (a, b)]
    made_a = _empty(rows, k, a.spec, x) if a and keep_a else []
    made_b = _empty(k, rows, b.spec, x) if b else []
    bm, bk, warps = _tile_shape(plans[0], plans[1], k)
    widths = [padded_k(n, part.spec) if part else n for n, part in ((k, a), (rows, b))]
    arguments: list[object] = []
    for part, plan, made, operand, width in zip((a, b), plans, (made_a, made_b), (x, x.t()), widths, strict=True):
        found = _find(operand, seed, window, part, plan) if part and plan else seed
        buffers = (made + [seed] * 3)[:3]
        arguments += [found, part.noise if part else 0, part.signs if part else 0, *buffers, width]
    grid = (triton.cdiv(max(rows, widths[1]), bm) * triton.cdiv(max(k, widths[0]), bk),)
    cast_kernel[grid](
        x, rows, k, *x.stride(), seed, window, *arguments, *plans, bool(made_a), b_from_a, bm, bk,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return made_a, made_b
