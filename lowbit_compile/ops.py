"""The graph's vocabulary: ``lowbit::linear`` and the opaque ``lowbit::quantize`` and ``lowbit::gemm`` inside it.

``lowbit::linear`` is CompositeImplicitAutograd over one autograd.Function, so AOTAutograd traces through it and the
joint graph holds quantize and gemm nodes: fprop, dgrad and wgrad apart, each with its numerics as text. The two inner
ops stay opaque: five times fewer nodes, and common-subexpression elimination can't merge two dequantizations into a
high-precision copy that would then be saved for backward.

With x [M, K], w [N, K], g = dL/dy [M, N]:  fprop y = x w^T,  dgrad dx = g w,  wgrad dw = g^T x.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.library import Library

from . import codegen, compat
from .quantize import dequantize, payload_like, quantize
from .random_bits import SIGN_STREAMS, STREAMS
from .spec import GemmSpec, LinearSpec, OperandSpec, parse_linear, parse_operand

AMAX_INDEX = {"x": 0, "w": 1, "g": 2}  # the entries of a site's amax tensor


@dataclass(frozen=True)
class Job:
    """One result of ``lowbit::quantize``: the operand ``name`` (``wgrad.x``), quantized along its last axis, or along
    its first where ``transposed``; from the values of ``via`` (an earlier cast) where ``source: dequantized``."""

    name: str
    spec: OperandSpec
    transposed: bool = False
    via: tuple[str, OperandSpec] | None = None

    def __str__(self) -> str:
        via = f"{self.via[0]} {self.via[1]} > " if self.via else ""
        return f"{via}{self.name}{'^T' if self.transposed else ''} {self.spec}"


def parse_job(text: str) -> Job:
    """Inverse of ``str(Job)``."""
    *before, last = text.split(" > ")
    via = None
    if before:
        name, _, operand = before[0].partition(" ")
        via = (name, parse_operand(operand))
    name, _, operand = last.partition(" ")
    return Job(name.removesuffix("^T"), parse_operand(operand), name.endswith("^T"), via)


def parse_jobs(text: str) -> tuple[Job, ...]:
    """Jobs as they cross into a graph: their texts, joined by a bar."""
    return tuple(map(parse_job, text.split(" | ")))


def _stream_args(name: str) -> dict[str, int]:
    return {"stream": STREAMS[name], "sign_stream": SIGN_STREAMS[name.partition(".")[0]]}


def cast_body(operand: Tensor, amax: Tensor, seed: Tensor, name: str, spec: OperandSpec) -> list[Tensor]:
    """Quantize ``operand`` [rows, K], contraction axis last, as the operand called ``name``."""
    window = amax[AMAX_INDEX[name[-1]]] if spec.scaling == "delayed" else None
    return quantize(operand, spec, amax=window, seed=seed, **_stream_args(name))


def dequantize_body(payload: list[Tensor], spec: OperandSpec) -> Tensor:
    """[rows, padded K] float32."""
    return dequantize(payload, spec)


def run_jobs(impl: str, x: Tensor, amax: Tensor, seed: Tensor, jobs: tuple[Job, ...]) -> list[Tensor]:
    """The body of ``lowbit::quantize``; every payload in job order, concatenated.

    Casts are compiled one by one, and transposes are made between them, not inside: dequantize, transpose and
    quantize in one function came out of Inductor's CPU code generator with wrong values in the last rows % 16 rows
    (torch 2.13.0, AVX-512; tests/graph/test_backend.py, equality under inductor, found it).
    """
    done: dict[tuple[str, OperandSpec], list[Tensor]] = {}

    def cast(operand: Tensor, name: str, spec: OperandSpec) -> list[Tensor]:
        key = (name, spec, operand.dtype, operand.shape[1])
        return codegen.run(impl, key, cast_body, operand, amax, seed, name, spec)  # type: ignore[no-any-return]

    results: list[Tensor] = []
    for job in jobs:
        source = x
        if job.via is not None:
            if job.via not in done:
                done[job.via] = cast(x, *job.via)
            values = codegen.run(impl, (job.via, x.shape[1]), dequantize_body, done[job.via], job.via[1])
            source = values[:, : x.shape[1]]
        payload = cast(source.t().contiguous() if job.transposed else source.contiguous(), job.name, job.spec)
        if job.via is None and not job.transposed:
            done[job.name, job.spec] = payload
        results += payload
    return results


def run_gemm(
    a: list[Tensor], b: list[Tensor], bias: Tensor | None, spec: GemmSpec, flips: str, out: torch.dtype
) -> Tensor:
    """The reference body of ``lowbit::gemm``: D [M, N] = A [M, K] . B [N, K]^T (+ bias [N]), float32 accumulation.

    ``flips`` holds "a" or "b" where that payload is stored transposed. Where neither operand is quantized the product
    runs in ``out``'s precision, as the original linear would.
    """
    dtype = torch.float32 if spec.quantized else out
    left = (dequantize(a, spec.a) if spec.a.quantized else a[0]).to(dtype)
    right = (dequantize(b, spec.b) if spec.b.quantized else b[0]).to(dtype)
    left = left.t() if "a" in flips else left
    right = right.t() if "b" in flips else right
    k = min(left.shape[1], right.shape[1])  # what is beyond the shorter one is zero padding on the other side
    product = left[:, :k] @ right[:, :k].t()
    if bias is not None:
        product = product + bias.to(dtype)
    return product.to(out)


@torch.library.custom_op("lowbit::quantize", mutates_args=())
def quantize_op(x: Tensor, amax: Tensor, seed: Tensor, jobs: str, impl: str) -> list[Tensor]:
    return run_jobs(impl, x, amax, seed, parse_jobs(jobs))


@quantize_op.register_fake
def _(x: Tensor, amax: Tensor, seed: Tensor, jobs: str, impl: str) -> list[Tensor]:
    found = []
    for job in parse_jobs(jobs):
        rows, k = (x.shape[1], x.shape[0]) if job.transposed else (x.shape[0], x.shape[1])
        found += [x.new_empty(shape, dtype=dtype) for shape, dtype in payload_like(rows, k, job.spec)]
    return found


@torch.library.custom_op("lowbit::gemm", mutates_args=())
def gemm_op(
    a: list[Tensor], b: list[Tensor], bias: Tensor | None, spec: str, flips: str, out: torch.dtype, impl: str
) -> Tensor:
    left, _, right = spec.partition("*")
    parsed = GemmSpec(parse_operand(left), parse_operand(right))
    key = (spec, flips, out, bias is None, a[0].dtype, b[0].dtype)
    return codegen.run(impl, key, run_gemm, a, b, bias, parsed, flips, out)  # type: ignore[no-any-return]


@gemm_op.register_fake
def _(
    a: list[Tensor], b: list[Tensor], bias: Tensor | None, spec: str, flips: str, out: torch.dtype, impl: str
) -> Tensor:
    left, _, right = spec.partition("*")

    def rows(payload: list[Tensor], operand: str, flipped: bool) -> int:
        if not flipped:
            return payload[0].shape[0]
        width = payload[0].shape[1]
        return width * 2 if payload[0].dtype == torch.uint8 and operand.startswith(("e2m1", "int4")) else width

    return a[0].new_empty((rows(a, left, "a" in flips), rows(b, right, "b" in flips)), dtype=out)


@torch.library.custom_op("lowbit::column_sum", mutates_args=())
def column_sum(g: Tensor, out: torch.dtype) -> Tensor:
    """Bias gradient: g [M, N] summed over M in float32, one addition order for eager and compiled code."""
    return g.float().sum(0).to(out)


@column_sum.register_fake
def _(g: Tensor, out: torch.dtype) -> Tensor:
    return g.new_empty((g.shape[1],), dtype=out)


def _observe(acc: Tensor, t: Tensor) -> None:
    """acc <- max(acc, amax(t)): idempotent, so recompute, accumulation and replay can't count twice; NaN propagates."""
    acc.copy_(torch.maximum(acc, t.detach().abs().amax().float()))


def _via(gemm: GemmSpec, name: str, operand: OperandSpec) -> tuple[str, OperandSpec] | None:
    """The fprop cast that a ``source: dequantized`` operand is taken from, if fprop quantizes that operand."""
    first = gemm.a if name == "fprop.x" else gemm.b
    return (name, first) if operand.source == "dequantized" and first.quantized else None


class _Linear(torch.autograd.Function):
    """x [M, K], w [N, K], b [N] or None -> y [M, N]. Saved for backward: the quantized x, and w itself (a parameter,
    alive anyway, from which dgrad's cast is made again bit for bit, since noise is a function of counters)."""

    @staticmethod
    def forward(ctx, x, w, b, amax, acc_x, acc_g, seed, text, impl, out, train):  # type: ignore[no-untyped-def]
        spec = parse_linear(text)
        if spec.observe and train:
            _observe(acc_x, x)
        jobs = [Job("fprop.x", spec.fprop.a)] if spec.fprop.a.quantized else []
        wgrad_x = spec.wgrad.b
        via = _via(spec.fprop, "fprop.x", wgrad_x)
        if train and ctx.needs_input_grad[1] and wgrad_x.quantized:
            jobs.append(Job("wgrad.x", wgrad_x, transposed=True, via=via))
        payloads = _quantize(x, amax, seed, jobs, impl)
        qx = payloads[0] if spec.fprop.a.quantized else [x.to(out)]
        qw = (
            _quantize(w, amax, seed, [Job("fprop.w", spec.fprop.b)], impl)[0] if spec.fprop.b.quantized else [w.to(out)]
        )
        y = gemm_op(qx, qw, b, str(spec.fprop), "", out, impl)
        saved, ctx.x_spec, ctx.x_flip = [x], OperandSpec(), "b"
        if train and ctx.needs_input_grad[1]:
            if wgrad_x.quantized:
                saved, ctx.x_spec, ctx.x_flip = payloads[-1], wgrad_x, ""
            elif via:
                saved, ctx.x_spec = qx, spec.fprop.a
            ctx.save_for_backward(w, amax, seed, *saved)
        else:
            ctx.save_for_backward(w, amax, seed)
        ctx.acc_g, ctx.spec, ctx.impl, ctx.x_dtype, ctx.k = acc_g, spec, impl, x.dtype, x.shape[1]
        if "aot_eager" in impl:
            compat.keep_out_of_version_check(acc_g)
        ctx.bias_dtype = None if b is None else b.dtype
        return y

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        w, amax, seed, *x_payload = ctx.saved_tensors
        spec, impl = ctx.spec, ctx.impl
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        if spec.observe:
            _observe(ctx.acc_g, g)
        jobs = [Job("dgrad.g", spec.dgrad.a)] if need_x and spec.dgrad.a.quantized else []
        if need_w and spec.wgrad.a.quantized:
            jobs.append(Job("wgrad.g", spec.wgrad.a, transposed=True))
        payloads = _quantize(g, amax, seed, jobs, impl)
        dx = dw = None
        if need_x:
            left = payloads[0] if spec.dgrad.a.quantized else [g]
            right, operand, flip = _dgrad_weight(w, amax, seed, spec, g.dtype, impl)
            dx = gemm_op(left, right, None, f"{spec.dgrad.a}*{operand}", flip, ctx.x_dtype, impl)[:, : ctx.k]
        if need_w:
            left, flips = (payloads[-1], ctx.x_flip) if spec.wgrad.a.quantized else ([g], "a" + ctx.x_flip)
            right = x_payload if ctx.x_spec.quantized else [x_payload[0].to(g.dtype)]
            dw = gemm_op(left, right, None, f"{spec.wgrad.a}*{ctx.x_spec}", flips, w.dtype, impl)[:, : ctx.k]
        db = column_sum(g, ctx.bias_dtype) if need_b else None
        return dx, dw, db, *(None,) * 8


def _dgrad_weight(w: Tensor, amax: Tensor, seed: Tensor, spec: LinearSpec, dtype: torch.dtype, impl: str):  # type: ignore[no-untyped-def]
    """(payload, operand spec, flip) of w^T [K, N] for dgrad."""
    operand = spec.dgrad.b
    via = _via(spec.fprop, "fprop.w", operand)
    if operand.quantized:
        return _quantize(w, amax, seed, [Job("dgrad.w", operand, transposed=True, via=via)], impl)[0], operand, ""
    if via:  # not re-quantized: the values that fprop used
        return _quantize(w, amax, seed, [Job("fprop.w", spec.fprop.b)], impl)[0], spec.fprop.b, "b"
    return [w.to(dtype)], operand, "b"


def _quantize(x: Tensor, amax: Tensor, seed: Tensor, jobs: list[Job], impl: str) -> list[list[Tensor]]:
    """The payload of each job, from one op and so one pass over ``x``."""
    if not jobs:
        return []
    flat = quantize_op(x, amax, seed, " | ".join(map(str, jobs)), impl)
    payloads = []
    for job in jobs:
        count = 2 + (job.spec.outer != (0, 0))
        payloads.append(list(flat[:count]))
        flat = flat[count:]
    return payloads


def linear(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    amax: Tensor,
    acc_x: Tensor,
    acc_g: Tensor,
    seed: Tensor,
    text: str,
    impl: str,
) -> Tensor:
    """x [..., K], w [N, K], b [N] -> y [..., N] in x's dtype, or autocast's where that is on.

    Quantized operands are cast straight from the dtype they come in (float32 master weights are not rounded to BF16
    first: a double rounding creates ties). An empty batch is an ordinary linear.
    """
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)
    out = torch.get_autocast_dtype(device) if autocast else x.dtype
    train = torch.is_grad_enabled()
    with torch.autocast(device, enabled=False):
        if x.numel() == 0:
            return torch.nn.functional.linear(x.to(out), w.to(out), None if b is None else b.to(out))
        y = _Linear.apply(  # type: ignore[no-untyped-call]
            x.reshape(-1, x.shape[-1]), w, b, amax, acc_x, acc_g, seed, text, impl, out, train
        )
        return y.reshape(*x.shape[:-1], w.shape[0])  # type: ignore[no-any-return]


_library = Library("lowbit", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "linear(Tensor x, Tensor w, Tensor? b, Tensor amax, Tensor(a!) acc_x, Tensor(b!) acc_g, Tensor seed, str spec,"
    " str impl) -> Tensor"
)
_library.impl("linear", linear, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
