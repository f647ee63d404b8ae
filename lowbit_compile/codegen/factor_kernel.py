"""Payloads as a GEMM wants them: numbers that BF16 or FP8 hold exactly, beside float32 scales that are applied later.

A code times an E8M0 or E4M3 scale is exact in BF16 (E2M1 x E4M3: 2 + 4 significant bits), so that scale is folded in; a
float32 scale (per tensor, row, 1x128, 128x128) is not, and stays apart.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import E4M3FN, get_format
from ..quantize import NO_BLOCK, WHOLE
from ..spec import OperandSpec
from .matmul_kernel import Factors
from .plan import Plan, plan_for
from .tile import as_float, e4m3_value, e8m0_value

FP8 = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
APART = (WHOLE, (1, -1), (1, 128), (128, 128))  # blocks of float32 scales that a GEMM applies
BF16_DIGITS = 8
ROWS, COLS = 32, 128

_tables: dict[tuple[str, torch.device], Tensor] = {}


def refusal(spec: OperandSpec) -> str:
    """Why an operand can't be factored; '' where it can."""
    if not spec.quantized:
        return ""
    if spec.scale == "float32":
        block = f"{spec.block[0]}x{spec.block[1]}"
        return "" if spec.block in APART else f"float32 scales of block {block} can't be applied after the product"
    if spec.block[0] < 1 or spec.block[1] < 1:
        return f"{spec.scale} scales of whole rows or tensors"
    fmt = get_format(spec.format)
    digits = (
        max(run.mantissa_bits for run in fmt.runs) + 1 + (E4M3FN.runs[0].mantissa_bits + 1) * (spec.scale == "e4m3fn")
    )
    if digits > BF16_DIGITS:
        return f"{spec.format} times an {spec.scale} scale has {digits} significant bits, BF16 holds {BF16_DIGITS}"
    return "" if spec.outer in (NO_BLOCK, *APART) else f"outer block {spec.outer[0]}x{spec.outer[1]}"


@triton.jit
def decode(code, table, P: tl.constexpr):
    """float32 values of int32 codes."""
    if P.layout == "integer":
        return ((code << (32 - P.bits)) >> (32 - P.bits)).to(tl.float32)
    elif P.layout == "tapered":
        return tl.load(table + code)
    else:
        rank = code & ((1 << (P.bits - 1)) - 1)
        normal = as_float((rank << (23 - P.mantissa)) + ((P.first_normal + 126) << 23))
        value = tl.where(rank < (1 << P.mantissa), rank.to(tl.float32) * P.least, normal)
        if P.nan >= 0:
            value = tl.where(rank > P.max_rank, tl.load(table + rank, mask=rank > P.max_rank, other=0.0), value)
        return tl.where(code >= (1 << (P.bits - 1)), -value, value)


@triton.jit
def factor_kernel(codes, scale, table, values, rows, cols, P: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """values [rows, cols] <- code x inner scale, for scales of 8 bits; code alone for float32 scales."""
    across = tl.cdiv(cols, BK)
    r = (tl.program_id(0) // across).to(tl.int64) * BM + tl.arange(0, BM)[:, None]
    c0 = (tl.program_id(0) % across) * BK
    if P.bits == 4:
        half = c0 // 2 + tl.arange(0, BK // 2)[None, :]
        packed = tl.load(codes + r * (cols // 2) + half, mask=(r < rows) & (half < cols // 2), other=0).to(tl.int32)
        code = tl.reshape(tl.join(packed & 15, packed >> 4), (BM, BK))
    c = c0 + tl.arange(0, BK)[None, :]
    inside = (r < rows) & (c < cols)
    if P.bits == 8:
        code = tl.load(codes + r * cols + c, mask=inside, other=0).to(tl.int32)
    value = decode(code, table, P)
    if P.scale != "float32":
        b = c0 // P.cols + tl.arange(0, BK // P.cols)[None, :]
        width = cols // P.cols
        stored = tl.load(scale + (r // P.rows) * width + b, mask=(r < rows) & (b < width), other=0).to(tl.int32)
        s = e8m0_value(stored) if P.scale == "e8m0" else e4m3_value(stored)
        value = value * tl.reshape(tl.broadcast_to(s[:, :, None], (BM, BK // P.cols, P.cols)), (BM, BK))
    tl.store(values + r * cols + c, value.to(values.dtype.element_ty), mask=inside)


def _table(spec: OperandSpec, plan: Plan, device: torch.device) -> Tensor:
    """float32 values of all codes."""
    key = (spec.format, device)
    if key not in _tables:
        _tables[key] = torch.tensor(get_format(spec.format).values, dtype=torch.float32, device=device)
    return _tables[key]


def factors(payload: list[Tensor], spec: OperandSpec) -> Factors:
    """Of a payload of :func:`..quantize.quantize` whose spec :func:`refusal` accepts: [R, padded K]."""
    codes = payload[0]
    if not spec.quantized:
        return Factors(codes)
    apart, block = (payload[1], spec.block) if spec.scale == "float32" else (None, WHOLE)
    if spec.outer != NO_BLOCK:
        apart, block = payload[2], spec.outer
    if spec.scale == "float32" and spec.format in FP8:
        return Factors(codes.view(FP8[spec.format]), apart, block)
    plan = plan_for(spec)
    rows, cols = codes.shape[0], codes.shape[1] * (2 if plan.bits == 4 else 1)
    values = codes.new_empty((rows, cols), dtype=torch.bfloat16)
    grid = (triton.cdiv(rows, ROWS) * triton.cdiv(cols, COLS),)
    table = _table(spec, plan, codes.device)
    factor_kernel[grid](codes, payload[1], table, values, rows, cols, plan, ROWS, COLS, enable_fp_fusion=False)
    return Factors(values, apart, block)
