"""What runs an op: today the reference, compiled by Inductor or eager; kernels are chosen here, and only here."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable
from typing import Any

import torch

from .. import compat

IMPLEMENTATIONS = {
    "compiled": "the reference, compiled by Inductor as one fused kernel per operand",
    "eager": "the reference, op by op",
}

_compiled: dict[Hashable, Callable[..., Any]] = {}


def run(impl: str, key: tuple[Hashable, ...], body: Callable[..., Any], *args: Any) -> Any:
    """Call ``body(*args)`` under ``impl`` (its name, then the implementation hash). All give the same bits.

    ``key`` names what the body is specialised for, its last entry the width of all matrices, or 0 for any width.
    """
    if impl.startswith("eager"):
        return body(*args)
    full = (body.__name__, key)
    if full not in _compiled:
        # torch.compile keeps its cache on the code object and gives up after a few entries: one code object a key.
        code = body.__code__.replace(co_name=f"{body.__name__}_{len(_compiled)}")
        clone = types.FunctionType(code, body.__globals__, code.co_name, body.__defaults__, body.__closure__)
        compat.mark_dynamic(args, axes=(0,) if key[-1] else (0, 1))
        options = {**compat.exact_options(), "guard_filter_fn": compat.keep_tensor_guards}
        _compiled[full] = torch.compile(clone, fullgraph=True, dynamic=False, options=options)
    with torch.no_grad(), compat.below_autograd():
        return _compiled[full](*args)
