"""The graph's opaque operations: ``lowbit::quantize``, ``lowbit::gemm`` and two reductions with a fixed order.

Opaque, so that the joint graph has five times fewer nodes, and common-subexpression elimination can't merge two
dequantizations into a high-precision copy that would then be saved for backward. :mod:`.linear` is made of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import codegen
from .casts import pack
from .codegen import select
from .formats import get_format
from .jobs import ALL, OUTLIERS, REST, Cast, Job, parse_jobs
from .quantize import (
    NO_BLOCK,
    WHOLE,
    cast,
    padded_k,
    padded_shape,
    payload_like,
    quantize,
    read_back,
    rotate_operand,
    unpacked,
)
from .random_bits import SIGN_STREAMS, STREAMS, counters_for, random_words, split_words
from .spec import GemmSpec, OperandSpec, parse_gemm

FOLD = 128  # row length of operands with one scale for the whole tensor


def payload_size(spec: OperandSpec) -> int:
    """How many tensors :func:`.quantize.quantize` returns for ``spec``."""
    return 2 + (spec.outer != NO_BLOCK) if spec.quantized else 1


def split_payloads(flat: Sequence[Tensor], specs: Iterable[OperandSpec]) -> list[list[Tensor]]:
    """A concatenation of payloads, one a spec, taken apart."""
    rest = iter(flat)
    return [list(islice(rest, payload_size(spec))) for spec in specs]


def part_of(x: Tensor, part: str, channels: Tensor | None) -> Tensor:
    """x [R, K] with the input channels of ``part``: [R, K], or [R, C] for the outliers. channels: int64 [C]."""
    if part == ALL or channels is None:
        return x
    return x.index_fill(1, channels, 0.0) if part == REST else x.index_select(1, channels)


def width_of(x: Tensor, part: str, channels: Tensor | None) -> int:
    """Columns of :func:`part_of`."""
    return channels.shape[0] if part == OUTLIERS and channels is not None else x.shape[1]


@lru_cache(maxsize=256)
def _streams(name: str, device: torch.device) -> Tensor:
    """int64[2]: Philox streams of the operand's noise and of its GEMM's signs. A tensor, so that casts of different
    operands are one compiled function."""
    return torch.tensor([STREAMS[name], SIGN_STREAMS[name.partition(".")[0]]], dtype=torch.int64, device=device)


def _noise(impl: str, operand: Tensor, seed: Tensor, stream: Tensor, spec: OperandSpec) -> Tensor:
    """:func:`.quantize.noise_for`. The words are interleaved outside the compiled part, which stays contiguous."""
    rows, k = padded_shape(operand.shape[0], operand.shape[1], spec)
    words = codegen.run(impl, ("noise", 1), random_words, counters_for(rows * k, operand.device), seed, stream)
    return split_words(words, rows, k)


def _rotate_body(operand: Tensor, seed: Tensor, streams: Tensor, spec: OperandSpec) -> Tensor:
    return rotate_operand(operand, spec, seed, streams[1])


@lru_cache(maxsize=1024)
def _without_rotation(spec: OperandSpec) -> OperandSpec:
    """What :func:`.quantize.cast` depends on."""
    return replace(spec, source="original", hadamard=0)


@lru_cache(maxsize=1024)
def _without_rounding(spec: OperandSpec) -> OperandSpec:
    """What :func:`.quantize.read_back` depends on."""
    return replace(spec, source="original", hadamard=0, rounding="rne", rule="nearest", target=0.0, scaling="current")


@lru_cache(maxsize=4096)
def _fold_width(rows: int, k: int, spec: OperandSpec) -> int:
    """Length of the rows that a padded operand may be cut into, 0 = it can't: no scale may see less or more for it."""
    local = spec.outer in (NO_BLOCK, WHOLE) or (spec.outer[0] == 1 and spec.outer[1] > 0)
    if spec.block[0] == 1 and spec.block[1] > 0 and local:
        return int(padded_k(1, spec))
    fits = rows * k % FOLD == 0 and k % max(2, spec.hadamard) == 0
    return FOLD if spec.block == WHOLE and fits else 0


def _reshape_scales(scales: list[Tensor], rows: int, spec: OperandSpec) -> list[Tensor]:
    """Scales of an operand that is cut into other rows: those of blocks inside one row follow, the others are whole."""
    blocks = (spec.block, spec.outer)
    return [t.reshape(rows, -1) if block[0] == 1 else t for t, block in zip(scales, blocks, strict=False)]


def run_cast(impl: str, operand: Tensor, amax: Tensor, seed: Tensor, job_cast: Cast) -> list[Tensor]:
    """Payload of ``operand`` [R, K], the contraction axis last: :func:`.quantize.quantize`, bit for bit, in stages.

    Noise, rotation and cast are compiled apart: in one function Inductor repeats the first two for every scale level,
    and compiles ten times as long. Where no scale sees it, the operand is padded and cut into rows of one block (noise
    is keyed by the row-major index), so that one compiled function fits every shape.
    """
    spec, plain = job_cast.spec, _without_rotation(job_cast.spec)
    window = amax[select.AMAX_INDEX[job_cast.name[-1]]] if spec.scaling == "delayed" else None
    rows, k = operand.shape
    if rows * k == 0:
        return quantize(operand, plain, amax=window, seed=seed)
    if select.wants_kernels(impl) and (payload := select.cast_values(operand, amax, seed, job_cast)) is not None:
        return payload
    operand = operand.float().contiguous()
    folded = _fold_width(rows, k, spec)
    if folded:
        operand = pad(operand, (0, padded_k(k, spec) - k)).reshape(-1, folded)
    streams = _streams(job_cast.name, operand.device)
    noise = _noise(impl, operand, seed, streams[0], spec) if spec.rounding == "stochastic" else None
    if spec.hadamard:
        operand = codegen.run(impl, (spec.hadamard, folded), _rotate_body, operand, seed, streams, spec)
    codes, *scales = codegen.run(impl, (plain, folded), cast, operand, plain, window, noise)
    codes = pack(codes) if get_format(spec.format).bits == 4 else codes
    return [codes.reshape(rows, -1), *_reshape_scales(scales, rows, spec)] if folded else [codes, *scales]


def run_dequantize(impl: str, payload: list[Tensor], spec: OperandSpec) -> Tensor:
    """float32 [R, padded K]; folded like :func:`run_cast`."""
    spec = _without_rounding(spec)
    codes, scales = unpacked(payload, spec), payload[1:]
    rows, k = codes.shape
    if codes.numel() == 0:
        return codes.float()
    folded = _fold_width(rows, k, spec)
    if folded:
        codes = codes.reshape(-1, folded)
        scales = _reshape_scales(scales, codes.shape[0], spec)
    values: Tensor = codegen.run(impl, (spec, folded), read_back, codes, scales, spec)
    return values.reshape(rows, -1)


def run_jobs(impl: str, x: Tensor, amax: Tensor, seed: Tensor, channels: Tensor | None, text: str) -> list[Tensor]:
    """The body of ``lowbit::quantize``; every payload in job order, concatenated.

    Casts are compiled one by one, and transposes are made between them, not inside: dequantize, transpose and
    quantize in one function came out of Inductor's CPU code generator with wrong values in the last rows % 16 rows
    (torch 2.13.0, AVX-512; tests/graph/test_backend.py, equality under inductor, found it).
    """
    jobs = parse_jobs(text)
    made = _kernel_jobs(x, amax, seed, channels, jobs) if select.wants_kernels(impl) else {}
    done: dict[Cast, list[Tensor]] = {job.cast: made[job] for job in made if not job.transposed}

    def straight(cast: Cast) -> list[Tensor]:
        if cast not in done:
            done[cast] = run_cast(impl, part_of(x, cast.part, channels).contiguous(), amax, seed, cast)
        return done[cast]

    def values_of(casts: tuple[Cast, ...]) -> Tensor:
        values = [run_dequantize(impl, straight(c), c.spec)[:, : width_of(x, c.part, channels)] for c in casts]
        return values[0] if len(casts) == 1 or channels is None else values[0].index_copy(1, channels, values[1])

    results: list[Tensor] = []
    for job in jobs:
        if job in made:
            results += made[job]
            continue
        if not job.via and not job.transposed:
            results += straight(job.cast)
            continue
        source = values_of(job.via) if job.via else part_of(x, job.cast.part, channels)
        results += run_cast(impl, source.t() if job.transposed else source, amax, seed, job.cast)
    return results


def _kernel_jobs(
    x: Tensor, amax: Tensor, seed: Tensor, channels: Tensor | None, jobs: Sequence[Job]
) -> dict[Job, list[Tensor]]:
    """What kernels make of ``jobs``: one launch a part of x where its casts fit one tile."""
    made: dict[Job, list[Tensor]] = {}
    for part in dict.fromkeys(job.cast.part for job in jobs):
        mine = [job for job in jobs if job.cast.part == part]
        made |= select.cast_jobs(part_of(x, part, channels), amax, seed, mine)
    return made


def _values(impl: str, payload: list[Tensor], spec: OperandSpec, flipped: bool, dtype: torch.dtype) -> Tensor:
    """[rows, K] in ``dtype``; ``flipped``: stored as [K, rows]."""
    values = (run_dequantize(impl, payload, spec) if spec.quantized else payload[0]).to(dtype)
    return values.t() if flipped else values


def run_gemm(
    impl: str, a: list[Tensor], b: list[Tensor], bias: Tensor | None, text: str, flips: str, out: torch.dtype
) -> Tensor:
    """The reference body of ``lowbit::gemm``: D [M, N] = sum of A [M, K] . B [N, K]^T over the terms, + bias [N].

    ``text``: the terms' specs, joined by " + "; ``a`` and ``b`` hold their payloads one after the other. The terms
    share one float32 accumulator. ``flips`` holds "a" or "b" where that payload is stored transposed. Where no operand
    is quantized the product runs in ``out``'s precision, as the original linear would.
    """
    specs = [parse_gemm(term) for term in text.split(" + ")]
    if select.wants_kernels(impl) and any(s.quantized for s in specs):
        sides = split_payloads(a, [s.a for s in specs]), split_payloads(b, [s.b for s in specs])
        if (made := select.gemm(*sides, specs, bias, flips, out)) is not None:
            return made
    dtype = torch.float32 if any(s.quantized for s in specs) else out
    left, right = [], []
    payloads = split_payloads(a, [s.a for s in specs]), split_payloads(b, [s.b for s in specs])
    for pa, pb, s in zip(*payloads, specs, strict=True):
        va, vb = _values(impl, pa, s.a, "a" in flips, dtype), _values(impl, pb, s.b, "b" in flips, dtype)
        k = min(va.shape[1], vb.shape[1])  # what is beyond the shorter one is zero padding on the other side
        left.append(va[:, :k])
        right.append(vb[:, :k])
    product = torch.cat(left, 1) @ torch.cat(right, 1).t() if len(left) > 1 else left[0] @ right[0].t()
    if bias is not None:
        product = product + bias.to(dtype)
    return product.to(out)


@torch.library.custom_op("lowbit::quantize", mutates_args=())
def quantize_op(x: Tensor, amax: Tensor, seed: Tensor, channels: Tensor | None, jobs: str, impl: str) -> list[Tensor]:
    """x [R, K] -> the payloads of ``jobs`` (see :mod:`.jobs`), concatenated."""
    return run_jobs(impl, x, amax, seed, channels, jobs)


@quantize_op.register_fake
def _(x: Tensor, amax: Tensor, seed: Tensor, channels: Tensor | None, jobs: str, impl: str) -> list[Tensor]:
    found = []
    for job in parse_jobs(jobs):
        rows, k = x.shape[0], width_of(x, job.cast.part, channels)
        if job.transposed:
            rows, k = k, rows
        found += [x.new_empty(shape, dtype=dtype) for shape, dtype in payload_like(rows, k, job.cast.spec)]
    return found


@torch.library.custom_op("lowbit::gemm", mutates_args=())
def gemm_op(
    a: list[Tensor], b: list[Tensor], bias: Tensor | None, spec: str, flips: str, out: torch.dtype, impl: str
) -> Tensor:
    """See :func:`run_gemm`."""
    return run_gemm(impl, a, b, bias, spec, flips, out)


@gemm_op.register_fake
def _(
    a: list[Tensor], b: list[Tensor], bias: Tensor | None, spec: str, flips: str, out: torch.dtype, impl: str
) -> Tensor:
    first: GemmSpec = parse_gemm(spec.split(" + ")[0])

    def rows(payload: Tensor, operand: OperandSpec, flipped: bool) -> int:
        if not flipped:
            return payload.shape[0]
        packed = operand.quantized and get_format(operand.format).bits == 4
        return payload.shape[1] * (2 if packed else 1)

    return a[0].new_empty((rows(a[0], first.a, "a" in flips), rows(b[0], first.b, "b" in flips)), dtype=out)


@torch.library.custom_op("lowbit::column_sum", mutates_args=())
def column_sum(g: Tensor, out: torch.dtype) -> Tensor:
    """Bias gradient: g [M, N] summed over M in float32, one addition order for eager and compiled code."""
    return g.float().sum(0).to(out)


@column_sum.register_fake
def _(g: Tensor, out: torch.dtype) -> Tensor:
    return g.new_empty((g.shape[1],), dtype=out)


@torch.library.custom_op("lowbit::column_norm", mutates_args=())
def column_norm(x: Tensor) -> Tensor:
    """L2 norm over M of each column of x [M, K], float32 [K], one addition order for eager and compiled code."""
    return x.float().square().sum(0).sqrt()


@column_norm.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[1],), dtype=torch.float32)
