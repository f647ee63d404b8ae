"""The GEMM of factored operands: D = sum over terms and chunks c of sa[m, c] sb[n, c] (A[m, c] . B[n, c]) + bias, on
tensor cores with one float32 accumulator.

Scales of whole tensors and rows are applied once to a term's sum; scales of 128 columns after each K = 128 chunk, in
float32, so nothing is rounded before it is added. Products of FP8 or of BF16 numbers are exact.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import UnsupportedError

CHUNK = 128
KINDS = {(-1, -1): "whole", (1, -1): "row", (1, CHUNK): "chunk", (CHUNK, CHUNK): "block"}
VALUES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)
MAX_TERMS = 2
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # its tl.dot takes BF16's bits for integers (Triton 3.7)


@dataclass(frozen=True)
class Factors:
    """values [R, K] (a dtype of VALUES, any strides) times scale, None or float32: [1, 1] for block (-1, -1), [R, 1]
    for (1, -1), [R, ceil(K / 128)] for (1, 128), [ceil(R / 128), ceil(K / 128)] for (128, 128)."""

    values: Tensor
    scale: Tensor | None = None
    block: tuple[int, int] = (-1, -1)

    @property
    def kind(self) -> str:
        return "none" if self.scale is None else KINDS[self.block]

    def flipped(self) -> Factors:
        """The transpose; only where one scale holds for all."""
        return replace(self, values=self.values.t())

    def narrow(self, k: int) -> Factors:
        """The first ``k`` columns."""
        scale = self.scale
        if scale is not None and self.kind in ("chunk", "block"):
            scale = scale[:, : -(-k // CHUNK)]
        return replace(self, values=self.values[:, :k], scale=scale)


def _scale_fault(name: str, f: Factors) -> str:
    if f.scale is None:
        return ""
    if f.block not in KINDS:
        return f"{name}.block: got {f.block}, possible: {', '.join(map(str, KINDS))}"
    rows, k = f.values.shape
    down = {"row": rows, "chunk": rows, "block": -(-rows // CHUNK)}.get(f.kind, 1)
    wanted = (down, -(-k // CHUNK) if f.kind in ("chunk", "block") else 1)
    if tuple(f.scale.shape) != wanted or f.scale.dtype != torch.float32:
        got = f"{f.scale.dtype} {list(f.scale.shape)}"
        return f"{name}.scale: got {got}, block {f.block} of values {[rows, k]} needs torch.float32 {list(wanted)}"
    same = f.scale.device == f.values.device
    return "" if same else f"{name}.scale is on {f.scale.device}, values on {f.values.device}"


def _values_fault(name: str, f: Factors, rows: int, device: torch.device) -> str:
    if f.values.dtype not in VALUES:
        return f"{name}.values: got {f.values.dtype}, possible: {', '.join(map(str, VALUES))}"
    if f.values.device != device:
        return f"{name}.values is on {f.values.device}, terms[0].a.values on {device}"
    if f.values.shape[0] != rows:
        return f"{name}.values: got {f.values.shape[0]} rows, terms[0] has {rows}"
    return ""


def refusal(terms: Sequence[tuple[Factors, Factors]], bias: Tensor | None, out: torch.dtype) -> str:
    """Why the kernel can't make this product: the argument, what it is and what it has to be; '' where it can."""
    if not 0 < len(terms) <= MAX_TERMS:
        return f"terms: got {len(terms)}, possible are 1 to {MAX_TERMS}"
    if out not in OUTPUTS:
        return f"out: got {out}, possible: {', '.join(map(str, OUTPUTS))}"
    (m, _), (n, _) = terms[0][0].values.shape, terms[0][1].values.shape
    device = terms[0][0].values.device
    for i, (a, b) in enumerate(terms):
        for name, f, rows in ((f"terms[{i}].a", a, m), (f"terms[{i}].b", b, n)):
            if fault := _values_fault(name, f, rows, device) or _scale_fault(name, f):
                return fault
        if a.values.shape[1] != b.values.shape[1]:
            return f"terms[{i}]: a has K = {a.values.shape[1]}, b has K = {b.values.shape[1]}"
    if bias is not None and (bias.shape != (n,) or bias.device != device):
        return f"bias: got {list(bias.shape)} on {bias.device}, needed [{n}] on {device}"
    return ""


@triton.jit
def scale_at(scale, r, c, size, width, KIND: tl.constexpr):
    """Scales of rows ``r`` in chunk ``c``; rows beyond ``size`` get 1."""
    if KIND == "whole":
        return tl.load(scale)
    elif KIND == "row":
        return tl.load(scale + r, mask=r < size, other=1.0)
    elif KIND == "chunk":
        return tl.load(scale + r.to(tl.int64) * width + c, mask=r < size, other=1.0)
    else:
        return tl.load(scale + (r // 128) * width + c, mask=r < size, other=1.0)


@triton.jit
def term(
    acc, a, b, sa, sb, rm, rn, M, N, K, am, ak, bn, bk, sa_width, sb_width,
    A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, AS_BF16: tl.constexpr, FULL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """acc + one term's product, float32 [BM, BN]."""
    CHUNKED: tl.constexpr = A_SCALE == "chunk" or A_SCALE == "block" or B_SCALE == "chunk" or B_SCALE == "block"
    LATE: tl.constexpr = A_SCALE == "whole" or A_SCALE == "row" or B_SCALE == "whole" or B_SCALE == "row"
    rk = tl.arange(0, BK)
    pa = a + rm.to(tl.int64)[:, None] * am + rk[None, :] * ak
    pb = b + rn.to(tl.int64)[None, :] * bn + rk[:, None] * bk
    ma, mb = (rm < M)[:, None], (rn < N)[None, :]
    part = tl.zeros((BM, BN), tl.float32) if LATE else acc
    for k in range(tl.cdiv(K, BK)):
        left = K - k * BK
        ta = tl.load(pa, mask=ma & (rk < left)[None, :], other=0.0)
        tb = tl.load(pb, mask=mb & (rk < left)[:, None], other=0.0)
        if AS_BF16:
            ta, tb = ta.to(tl.bfloat16), tb.to(tl.bfloat16)
        if INTERPRETED:
            ta, tb = ta.to(tl.float32), tb.to(tl.float32)
        if CHUNKED:
            product = tl.dot(ta, tb)
            c = k * BK // 128
            if A_SCALE == "chunk" or A_SCALE == "block":
                product = product * scale_at(sa, rm, c, M, sa_width, A_SCALE)[:, None]
            if B_SCALE == "chunk" or B_SCALE == "block":
                product = product * scale_at(sb, rn, c, N, sb_width, B_SCALE)[None, :]
            part += product
        elif FULL:
            part = tl.dot(ta, tb, part, max_num_imprecise_acc=BK)
        else:
            part = tl.dot(ta, tb, part)
        pa += BK * ak
        pb += BK * bk
    if LATE:
        if A_SCALE == "whole":
            part = part * scale_at(sa, rm, 0, M, 1, A_SCALE)
        elif A_SCALE == "row":
            part = part * scale_at(sa, rm, 0, M, 1, A_SCALE)[:, None]
        if B_SCALE == "whole":
            part = part * scale_at(sb, rn, 0, N, 1, B_SCALE)
        elif B_SCALE == "row":
            part = part * scale_at(sb, rn, 0, N, 1, B_SCALE)[None, :]
        part += acc
    return part


@triton.jit(do_not_specialize=["M"])
def gemm_kernel(
    d, bias, M, N,
    a, b, sa, sb, K, am, ak, bn, bk, sa_width, sb_width,
    a2, b2, sa2, sb2, K2, am2, ak2, bn2, bk2, sa2_width, sb2_width,
    A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, AS_BF16: tl.constexpr, FULL: tl.constexpr,
    SECOND: tl.constexpr, A2_SCALE: tl.constexpr, B2_SCALE: tl.constexpr, AS_BF16_2: tl.constexpr,
    FULL2: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of D; GROUP rows of tiles share the columns that L2 holds."""
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    pid = tl.program_id(0)
    first = pid // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    m0 = (first + pid % (GROUP * tiles_n) % height) * BM
    n0 = (pid % (GROUP * tiles_n) // height) * BN
    rm, rn = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    acc = term(
        acc,
        a,
        b,
        sa,
        sb,
        rm,
        rn,
        M,
        N,
        K,
        am,
        ak,
        bn,
        bk,
        sa_width,
        sb_width,
        A_SCALE,
        B_SCALE,
        AS_BF16,
        FULL,
        BM,
        BN,
        BK,
    )
    if SECOND:
        acc = term(
            acc, a2, b2, sa2, sb2, rm, rn, M, N, K2, am2, ak2, bn2, bk2, sa2_width, sb2_width,
            A2_SCALE, B2_SCALE, AS_BF16_2, FULL2, BM, BN, BK,
        )  # fmt: skip
    if BIAS:
        acc += tl.load(bias + rn, mask=rn < N, other=0.0).to(tl.float32)[None, :]
    inside = (rm < M)[:, None] & (rn < N)[None, :]
    tl.store(d + rm.to(tl.int64)[:, None] * N + rn[None, :], acc.to(d.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Tile:
    """Legal for every operand: BK divides a chunk, and is a whole number of FP8 accumulation steps."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


def tile_for(m: int, n: int, eight_bit: bool, chunked: bool) -> Tile:
    """Tile by shape class and what is multiplied; sizes that held up on an H200 (benchmarks/gemm.py)."""
    if m <= 64 or n <= 64:
        return Tile(64, 64, 128, 4, 3)
    if chunked:
        return Tile(128, 128, 128, 8, 3)
    return Tile(128, 256, 128 if eight_bit else 64, 8, 3)


def _mixed(a: Factors, b: Factors) -> bool:
    return a.values.dtype != b.values.dtype


def _arguments(a: Factors, b: Factors) -> list[object]:
    scales = [a.values if f.scale is None else f.scale for f in (a, b)]
    widths = [1 if f.scale is None else f.scale.stride(0) for f in (a, b)]
    return [a.values, b.values, *scales, a.values.shape[1], *a.values.stride(), *b.values.stride(), *widths]


def gemm(
    terms: Sequence[tuple[Factors, Factors]], bias: Tensor | None, out: torch.dtype, *, full_accumulation: bool = True,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """D [M, N] in ``out``. ``full_accumulation``: FP8 products are moved to float32 registers every K = 128; without,
    the tensor core's own, shorter accumulator holds the sum. Raises UnsupportedError with :func:`refusal`'s reason."""
    if reason := refusal(terms, bias, out):
        raise UnsupportedError(reason)
    (a, b), second = terms[0], terms[-1]
    m, n = a.values.shape[0], b.values.shape[0]
    d = a.values.new_empty((m, n), dtype=out)
    if m == 0 or n == 0:
        return d
    kinds = {f.kind for pair in terms for f in pair}
    eight_bit = all(f.values.dtype.itemsize == 1 for f in (a, b)) and not _mixed(a, b)
    t = tile or tile_for(m, n, eight_bit, bool(kinds & {"chunk", "block"}))
    full = [
        full_accumulation and not _mixed(*pair) and pair[0].values.dtype.itemsize == 1 for pair in (terms[0], second)
    ]
    gemm_kernel[(triton.cdiv(m, t.m) * triton.cdiv(n, t.n),)](
        d, d if bias is None else bias, m, n, *_arguments(a, b), *_arguments(*second),
        a.kind, b.kind, _mixed(a, b), full[0], len(terms) > 1, second[0].kind, second[1].kind, _mixed(*second), full[1],
        bias is not None, t.m, t.n, t.k, 8, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return d


def vendor(terms: Sequence[tuple[Factors, Factors]], bias: Tensor | None, out: torch.dtype) -> Tensor | None:
    """The same product by cuBLAS, where it has one: plain BF16, or FP8 with scales of whole tensors or rows."""
    (a, b) = terms[0]
    if len(terms) > 1 or not a.values.is_cuda or out != torch.bfloat16 or (bias is not None and bias.dtype != out):
        return None
    if a.values.dtype == b.values.dtype == torch.bfloat16 and a.kind == b.kind == "none":
        return a.values @ b.values.t() if bias is None else torch.addmm(bias, a.values, b.values.t())
    eight_bit = {a.values.dtype, b.values.dtype}
    legal = eight_bit <= {torch.float8_e4m3fn, torch.float8_e5m2} and eight_bit != {torch.float8_e5m2}
    along_k = a.values.stride(1) == b.values.stride(1) == 1
    sizes = (
        a.values.shape[1] % 16 == 0
        and b.values.shape[0] % 16 == 0
        and a.values.stride(0) % 16 == 0 == b.values.stride(0) % 16
    )
    if not (legal and along_k and sizes and a.kind == b.kind in ("whole", "row")) or a.scale is None or b.scale is None:
        return None
    scales = (a.scale, b.scale.t()) if a.kind == "row" else (a.scale.reshape(()), b.scale.reshape(()))
    return torch._scaled_mm(a.values, b.values.t(), *scales, bias=bias, out_dtype=out, use_fast_accum=False)
