"""``lowbit::linear``: what the rewrite puts in the place of a linear, with its three GEMMs and their numerics as text.

It is CompositeImplicitAutograd over one autograd.Function, so AOTAutograd traces through it and the joint graph holds
quantize and gemm nodes: fprop, dgrad and wgrad apart. With x [M, K], w [N, K], g = dL/dy [M, N]:

    fprop y = x w^T        dgrad dx = g w        wgrad dw = g^T x

With outlier channels (OutControl) x and w are cast in two parts: fprop adds both in one accumulator, wgrad makes the
columns of each part by a GEMM of its own, dgrad casts the weight that fprop used, put together again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from . import compat
from .jobs import ALL, OUTLIERS, REST, Cast, Job
from .ops import column_norm, column_sum, gemm_op, quantize_op, split_payloads
from .spec import GemmSpec, LinearSpec, OperandSpec, parse_linear


def _raise_to(acc: Tensor, value: Tensor) -> None:
    """acc <- max(acc, value): idempotent, so recompute, accumulation and replay can't count twice; NaN propagates."""
    acc.copy_(torch.maximum(acc, value))


def _observe(acc: Tensor, t: Tensor) -> None:
    _raise_to(acc, t.detach().abs().amax().float())


def _parts(spec: LinearSpec) -> tuple[str, ...]:
    return (REST, OUTLIERS) if spec.outliers else (ALL,)


def _cast(name: str, operand: OperandSpec, part: str, spec: LinearSpec) -> Cast:
    if part == OUTLIERS and spec.outliers is not None:
        operand = replace(spec.outliers.operand, source=operand.source)
    return Cast(name, operand, part)


def _fprop_casts(spec: LinearSpec, name: str) -> tuple[Cast, ...]:
    """How fprop casts ``x`` or ``w``, part by part; nothing where it doesn't."""
    operand = spec.fprop.a if name == "x" else spec.fprop.b
    return tuple(_cast(f"fprop.{name}", operand, p, spec) for p in _parts(spec)) if operand.quantized else ()


def _quantize(
    x: Tensor, amax: Tensor, seed: Tensor, channels: Tensor | None, jobs: list[Job], impl: str
) -> list[list[Tensor]]:
    """The payload of each job, from one op and so one pass over ``x``."""
    if not jobs:
        return []
    flat = quantize_op(x, amax, seed, channels, " | ".join(map(str, jobs)), impl)
    return split_payloads(flat, [job.cast.spec for job in jobs])


def _concatenate(payloads: list[list[Tensor]]) -> list[Tensor]:
    return [tensor for payload in payloads for tensor in payload]


class _Linear(torch.autograd.Function):
    """x [M, K], w [N, K], b [N] or None -> y [M, N]. Saved for backward: the quantized x, and w itself (a parameter,
    alive anyway, from which dgrad's cast is made again bit for bit, since noise is a function of counters)."""

    @staticmethod
    def forward(ctx, x, w, b, amax, acc_x, acc_g, seed, channels, acc_c, text, impl, out, train):  # type: ignore[no-untyped-def]
        spec = parse_linear(text)
        if spec.observe and train:
            _observe(acc_x, x)
        if spec.watch and train:
            _raise_to(acc_c, column_norm(x.detach()))
        casts, w_casts = _fprop_casts(spec, "x"), _fprop_casts(spec, "w")
        again = _wgrad_jobs(spec, casts) if train and ctx.needs_input_grad[1] else []
        payloads = _quantize(x, amax, seed, channels, [*map(Job, casts), *again], impl)
        qx, for_wgrad = payloads[: len(casts)], payloads[len(casts) :]
        qw = _quantize(w, amax, seed, channels, list(map(Job, w_casts)), impl)
        # one term a part; where an operand isn't quantized it has no casts, and there is one term
        terms = [GemmSpec(a.spec, b.spec) for a, b in zip(casts, w_casts, strict=False)] or [spec.fprop]
        left, right = _concatenate(qx) or [x.to(out)], _concatenate(qw) or [w.to(out)]
        y = gemm_op(left, right, b, " + ".join(map(str, terms)), "", out, impl)
        saved, ctx.x_specs, ctx.x_flip = [[x]], [OperandSpec()], "b"
        if for_wgrad:
            saved, ctx.x_specs, ctx.x_flip = for_wgrad, [job.cast.spec for job in again], ""
        elif casts and spec.wgrad.b.source == "dequantized":
            saved, ctx.x_specs = qx, [cast.spec for cast in casts]
        needed = train and ctx.needs_input_grad[1]
        ctx.save_for_backward(w, amax, seed, channels, *(_concatenate(saved) if needed else []))
        ctx.acc_g, ctx.spec, ctx.impl, ctx.x_dtype, ctx.k = acc_g, spec, impl, x.dtype, x.shape[1]
        if "aot_eager" in impl:
            compat.keep_out_of_version_check(acc_g)
        ctx.bias_dtype = None if b is None else b.dtype
        return y

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        spec, impl = ctx.spec, ctx.impl
        _, amax, seed, *_ = ctx.saved_tensors
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        if spec.observe:
            _observe(ctx.acc_g, g)
        for_dgrad = [Job(Cast("dgrad.g", spec.dgrad.a))] if need_x and spec.dgrad.a.quantized else []
        for_wgrad = []
        if need_w and spec.wgrad.a.quantized:
            parts = _parts(spec) if len(ctx.x_specs) > 1 else (ALL,)
            # g has no input channels: each part takes all of it, cast as that part is
            for_wgrad = [
                Job(Cast("wgrad.g", _cast("wgrad.g", spec.wgrad.a, p, spec).spec), transposed=True) for p in parts
            ]
        payloads = _quantize(g, amax, seed, None, for_dgrad + for_wgrad, impl)
        left = payloads[0] if for_dgrad else [g]
        dx = _dgrad(ctx, left, g.dtype) if need_x else None
        dw = _wgrad(ctx, payloads[len(for_dgrad) :], [j.cast.spec for j in for_wgrad], g) if need_w else None
        db = column_sum(g, ctx.bias_dtype) if need_b else None
        return dx, dw, db, *(None,) * 10


def _wgrad_jobs(spec: LinearSpec, casts: tuple[Cast, ...]) -> list[Job]:
    """x^T [K, M] for wgrad, part by part; taken from fprop's casts where the recipe says so."""
    operand = spec.wgrad.b
    if not operand.quantized:
        return []
    jobs = []
    for i, part in enumerate(_parts(spec)):
        via = (casts[i],) if operand.source == "dequantized" and casts else ()
        jobs.append(Job(_cast("wgrad.x", operand, part, spec), transposed=True, via=via))
    return jobs


def _dgrad(ctx: Any, left: list[Tensor], g_dtype: torch.dtype) -> Tensor:
    """dx [M, K] from g's payload; a weight that isn't quantized takes part as ``g_dtype``."""
    spec, impl, k = ctx.spec, ctx.impl, ctx.k
    w, amax, seed, channels, *_ = ctx.saved_tensors
    operand = spec.dgrad.b
    casts = _fprop_casts(spec, "w") if operand.source == "dequantized" else ()
    if operand.quantized:
        jobs = [Job(Cast("dgrad.w", operand), transposed=True, via=casts)]
        rights, specs, flip = _quantize(w, amax, seed, channels, jobs, impl), [operand], ""
    elif casts:  # not cast again: the values that fprop used
        rights = _quantize(w, amax, seed, channels, list(map(Job, casts)), impl)
        specs, flip = [c.spec for c in casts], "b"
    else:
        rights, specs, flip = [[w.to(g_dtype)]], [operand], "b"
    lefts = [(left, spec.dgrad.a)] * len(specs)
    return _by_columns(lefts, list(zip(rights, specs, strict=True)), flip, channels, k, ctx.x_dtype, impl)


def _wgrad(ctx: Any, payloads: list[list[Tensor]], g_specs: list[OperandSpec], g: Tensor) -> Tensor:
    """dw [N, K] from g^T's payloads (or g itself), one a part, and from what was saved of x."""
    spec, impl = ctx.spec, ctx.impl
    w, _, _, channels, *saved = ctx.saved_tensors
    rights = [
        (payload if x_spec.quantized else [payload[0].to(g.dtype)], x_spec)
        for payload, x_spec in zip(split_payloads(saved, ctx.x_specs), ctx.x_specs, strict=True)
    ]
    flips = ctx.x_flip
    lefts = list(zip(payloads, g_specs, strict=True))
    if not lefts:
        lefts, flips = [([g], spec.wgrad.a)] * len(rights), "a" + flips
    return _by_columns(lefts, rights, flips, channels, ctx.k, w.dtype, impl)


_Side = tuple[list[Tensor], OperandSpec]


def _by_columns(
    lefts: list[_Side], rights: list[_Side], flips: str, channels: Tensor | None, k: int, out: torch.dtype, impl: str
) -> Tensor:
    """A product [R, K] whose columns are input channels: one GEMM a part, the outlier columns put in their places."""
    products: list[Tensor] = [
        gemm_op(a, b, None, f"{a_spec}*{b_spec}", flips, out, impl)
        for (a, a_spec), (b, b_spec) in zip(lefts, rights, strict=True)
    ]
    whole = products[0][:, :k]
    if len(products) == 1 or channels is None:
        return whole
    return whole.index_copy(1, channels, products[1][:, : channels.shape[0]])


def linear(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    amax: Tensor,
    acc_x: Tensor,
    acc_g: Tensor,
    seed: Tensor,
    channels: Tensor | None,
    acc_c: Tensor | None,
    text: str,
    impl: str,
) -> Tensor:
    """x [..., K], w [N, K], b [N] -> y [..., N] in x's dtype, or autocast's where that is on.

    ``channels`` int64 [C]: outlier channels, ``acc_c`` float32 [K]: their statistics; None where the numerics ``text``
    needs neither. Quantized operands are cast straight from the dtype they come in (float32 master weights are not
    rounded to BF16 first: a double rounding creates ties). An empty batch is an ordinary linear.
    """
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)
    out = torch.get_autocast_dtype(device) if autocast else x.dtype
    train = torch.is_grad_enabled()
    with torch.autocast(device, enabled=False):
        if x.numel() == 0:
            plain: Tensor = torch.nn.functional.linear(x.to(out), w.to(out), None if b is None else b.to(out))
            return plain
        y: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            x.reshape(-1, x.shape[-1]), w, b, amax, acc_x, acc_g, seed, channels, acc_c, text, impl, out, train
        )
        return y.reshape(*x.shape[:-1], w.shape[0])


_library = Library("lowbit", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "linear(Tensor x, Tensor w, Tensor? b, Tensor amax, Tensor(a!) acc_x, Tensor(b!) acc_g, Tensor seed,"
    " Tensor? channels, Tensor(c!)? acc_c, str spec, str impl) -> Tensor"
)
_library.impl("linear", linear, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
OP = torch.ops.lowbit.linear.default
