"""Kernel or reference, and why: the one place that decides what runs an op on this device.

Nothing here imports Triton before a kernel is wanted, so that a CPU-only installation works without it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ..errors import LowbitWarning
from ..jobs import Cast, Job
from ..quantize import WHOLE
from ..random_bits import SIGN_STREAMS, STREAMS
from ..spec import GEMMS, GemmSpec, LinearSpec, OperandSpec
from . import plan

KERNELS = "triton"
AMAX_INDEX = {"x": 0, "w": 1, "g": 2}  # the entries of a site's amax tensor


def wants_kernels(impl: str) -> bool:
    """Does this implementation text ask for kernels where they are possible?"""
    return impl.startswith(KERNELS)


@cache
def _tell(message: str) -> None:
    warnings.warn(message, LowbitWarning, stacklevel=2)


def _one_scale(spec: OperandSpec) -> bool:
    return spec.block == WHOLE or spec.outer == WHOLE


def _one_tile(a: OperandSpec, b: OperandSpec, again: bool) -> bool:
    """Can one launch cast both along K and, transposed, along the rows? ``again``: b casts what a's cast made."""
    rows = plan.ROW in (a.block, b.block)
    return not rows and not (again and _one_scale(b))


def _side(cast: Cast) -> object:
    from .cast_kernel import Side

    return Side(cast.spec, STREAMS[cast.name], SIGN_STREAMS[cast.name.partition(".")[0]])


def _launch(
    x: Tensor, amax: Tensor, seed: Tensor, a: Cast | None, b: Cast | None, again: bool, keep: bool
) -> list[list[Tensor]]:
    from .cast_kernel import cast

    name = (a or b).name  # type: ignore[union-attr]
    index = AMAX_INDEX[name[-1]]
    sides = [None if c is None else _side(c) for c in (a, b)]
    return list(cast(x, seed, amax[index : index + 1], *sides, b_from_a=again, keep_a=keep))  # type: ignore[arg-type]


def cast_jobs(x: Tensor, amax: Tensor, seed: Tensor, jobs: Sequence[Job]) -> dict[Job, list[Tensor]]:
    """Payloads of those ``jobs`` on x [R, K] (all of one part) that kernels can make; warns once of those they can't.

    Straight and transposed jobs share one launch, and so one read of x, where a tile holds the blocks of both.
    """
    rows, k = x.shape
    done: dict[Job, list[Tensor]] = {}
    straight = [job for job in jobs if not job.transposed and not job.via and _possible(job, rows, k)]
    for job in jobs:
        if not job.transposed or not _possible(job, k, rows) or len(job.via) > 1:
            continue
        again = len(job.via) == 1
        first = job.via[0] if again else next((s.cast for s in straight if s not in done), None)
        if first is not None and _one_tile(first.spec, job.cast.spec, again) and not plan.refusal(first.spec, rows, k):
            kept = Job(first)
            keep = kept in straight
            made = _launch(x, amax, seed, first, job.cast, again, keep)
            done |= ({kept: made[0]} if keep else {}) | {job: made[1]}
        elif not again:
            done[job] = _launch(x.t(), amax, seed, job.cast, None, False, True)[0]
    for job in straight:
        if job not in done:
            done[job] = _launch(x, amax, seed, job.cast, None, False, True)[0]
    return done


def cast_values(x: Tensor, amax: Tensor, seed: Tensor, cast: Cast) -> list[Tensor] | None:
    """Payload of x [R, K], or None (and a warning) where the reference has to make it."""
    made = cast_jobs(x, amax, seed, [Job(cast)])
    return made.get(Job(cast))


def _possible(job: Job, rows: int, k: int) -> bool:
    reason = plan.refusal(job.cast.spec, rows, k)
    if reason and rows and k:
        _tell(f"{job.cast.name}: the reference casts it, not a kernel: {reason}")
    return not reason


def gemm(
    a: Sequence[list[Tensor]], b: Sequence[list[Tensor]], specs: Sequence[GemmSpec], bias: Tensor | None, flips: str,
    out: torch.dtype,
) -> Tensor | None:  # fmt: skip
    """D = sum over the terms of A . B^T, + bias, or None (and a warning) where the reference has to make it."""
    from . import factor_kernel, matmul_kernel

    reason = gemm_reason(specs, flips)
    terms = []
    for pa, pb, spec in zip(a, b, specs, strict=True):
        if not reason:
            left, right = factor_kernel.factors(pa, spec.a), factor_kernel.factors(pb, spec.b)
            left, right = left.flipped() if "a" in flips else left, right.flipped() if "b" in flips else right
            k = min(left.values.shape[1], right.values.shape[1])
            terms.append((left.narrow(k), right.narrow(k)))
    reason = reason or matmul_kernel.refusal(terms, bias, out)
    if reason:
        _tell(f"{' + '.join(map(str, specs))}: the reference multiplies, not a kernel: {reason}")
        return None
    made = matmul_kernel.vendor(terms, bias, out)
    return matmul_kernel.gemm(terms, bias, out) if made is None else made


def gemm_reason(specs: Sequence[GemmSpec], flips: str) -> str:
    """Why a kernel can't multiply operands of these specs; '' where it can."""
    from .factor_kernel import refusal

    for spec in specs:
        for operand, letter in ((spec.a, "a"), (spec.b, "b")):
            if reason := refusal(operand):
                return reason
            flipped = letter in flips and operand.quantized
            if flipped and not (
                WHOLE in (operand.block, operand.outer) or (operand.scale != "float32" and operand.outer == (0, 0))
            ):
                return f"{operand} is stored along the other axis"
    return ""


def described(spec: LinearSpec, impl: str, width: int) -> str:
    """What runs a linear of ``width`` input channels, for reports: kernels, the reference, or both with reasons."""
    if not spec.quantized:
        return "torch: nothing is quantized at this step"
    reference = f"reference ({'eager' if impl.startswith('eager') else 'compiled'})"
    if not wants_kernels(impl):
        return reference
    reasons = []
    for gemm_name, names in GEMMS.items():
        pair: GemmSpec = getattr(spec, gemm_name)
        for name, operand in zip(names, (pair.a, pair.b), strict=True):
            if operand.quantized and (reason := plan.refusal(operand, plan.TILE, width)):
                reasons.append(f"{gemm_name}.{name}: {reason}")
        if pair.quantized and (reason := gemm_reason([pair], "")):
            reasons.append(f"{gemm_name}: {reason}")
    return KERNELS + (f"; {reference} for {'; '.join(reasons)}" if reasons else "")
