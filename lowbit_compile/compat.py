"""The one place that touches torch's private names; each has a contract test. Written for torch 2.11 to 2.14; tested on
2.13 (CPU) and 2.11 (CUDA)."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from .errors import PolicyError, UnsupportedError


def _missing(what: str, lost: str) -> UnsupportedError:
    return UnsupportedError(f"torch {torch.__version__} has no {what}, so {lost}; supported: torch 2.11 to 2.14")


def source_name(source: Any) -> str:
    """Dynamo's name of a source, an expression over the frame's ``L`` and ``G``; '' for None."""
    if source is None:
        return ""
    return str(source.name() if callable(source.name) else source.name)


def placeholder_source(node: torch.fx.Node) -> Any:
    return getattr(node, "_dynamo_source", None) or getattr(node.meta.get("grapharg"), "source", None)


def _translator() -> Any:
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator
    except ImportError as error:
        raise _missing("InstructionTranslator", "module paths can't be read") from error
    return InstructionTranslator.current_tx()


def frame_scope() -> tuple[dict[str, Any], str]:
    """({"L": locals, "G": globals} of the frame being compiled, an identity of its code)."""
    root = _translator().output.root_tx
    return {"L": root.f_locals, "G": root.f_globals}, f"{root.f_code.co_filename}:{root.f_code.co_firstlineno}"


def stack_modules() -> list[nn.Module]:
    """Every module whose method is running, innermost first, torch.compile's own wrapper left out."""
    from torch._dynamo.eval_frame import OptimizedModule

    found: list[nn.Module] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        this = frame.f_locals.get("self")
        if isinstance(this, nn.Module) and not isinstance(this, (OptimizedModule, torch.fx.GraphModule)):
            found.append(this)
        frame = frame.f_back
    return found


def root_source(source: Any) -> Any:
    while getattr(source, "base", None) is not None:
        source = source.base
    return source


def guard_identity(source: Any) -> None:
    """Recompile when the object behind ``source`` is another one: its state is baked into the graph."""
    from torch._dynamo.guards import GuardBuilder, install_guard

    install_guard(source.make_guard(GuardBuilder.ID_MATCH))


def guard_equals(module: str, attribute: str) -> None:
    """Recompile when the value of ``module.attribute`` changes."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource

    source = AttrSource(_translator().import_source(module), attribute)
    install_guard(source.make_guard(GuardBuilder.EQUALS_MATCH))


def register_state_buffer(
    root: torch.fx.GraphModule, owner: torch.fx.GraphModule, prefix: str, name: str, tensor: torch.Tensor
) -> None:
    """Make ``tensor`` a buffer of the graph that AOTAutograd lifts, functionalizes and treats as static."""
    from torch._dynamo.source import ConstantSource

    owner.register_buffer(name, tensor)
    sources = getattr(root, "_param_name_to_source", None)
    if sources is not None:
        sources[prefix + name] = ConstantSource("lowbit:" + prefix + name)


def mark_dynamic(args: Any, axes: tuple[int, ...]) -> None:
    """Compile for any size of these axes of the matrices in ``args``, not first for these sizes and then again."""
    from torch.utils._pytree import tree_leaves

    for value in tree_leaves(args):
        if isinstance(value, torch.Tensor) and value.dim() == 2:
            torch._dynamo.maybe_mark_dynamic(value, list(axes))


def below_autograd() -> AbstractContextManager[None]:
    """Inside, nothing is differentiated, and forward and backward look alike to Dynamo's guards on dispatch keys."""
    guard: AbstractContextManager[None] = torch._C._AutoDispatchBelowADInplaceOrView()
    return guard


def graphs_compiled() -> int:
    """How many graphs Dynamo has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def raise_recompile_limit(at_least: int) -> None:
    """Dynamo runs a frame eagerly for good once it has compiled it too often: make both its limits generous."""
    import torch._dynamo.config as config

    config.recompile_limit = max(config.recompile_limit, at_least)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, at_least)


def keep_out_of_version_check(tensor: torch.Tensor) -> None:
    """A backward accumulator changes between two backwards on purpose; needed by the eager inner compilers only."""
    from torch.fx.experimental.proxy_tensor import _get_proxies

    for proxy in _get_proxies(tensor):
        proxy.node.meta["saved_tensor_with_no_vc_check"] = True


def inner_compiler(name: str, mode: str | None, config: dict[str, Any]) -> Callable[[torch.fx.GraphModule, Any], Any]:
    """Compiler of the rewritten graph: ``inductor`` or ``aot_eager``."""
    if name == "aot_eager":
        if config or (mode and mode != "default"):
            given = ", ".join([*config, *(["mode"] if mode else [])])
            raise PolicyError(f"options['inner']: aot_eager ignores {given}; drop them or use inner: inductor")
        from torch._dynamo.backends.debugging import aot_eager_decomp_partition

        return lambda gm, inputs: aot_eager_decomp_partition(gm, inputs)
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = {**(list_mode_options(mode) if mode and mode != "default" else {}), **config}
    return lambda gm, inputs: compile_fx(gm, inputs, config_patches=patches)


def exact_options() -> dict[str, Any]:
    """Inductor options under which compiled arithmetic has eager's bits: IEEE division and subnormals on CUDA."""
    wanted: dict[str, Any] = {"eager_numerics.division_rounding": True, "eager_numerics.disable_ftz": True}
    if missing := set(wanted) - inductor_options():
        raise _missing(f"Inductor option {', '.join(sorted(missing))}", "compiled quantization can't be exact")
    return wanted


def keep_tensor_guards(entries: Any) -> list[bool]:
    """Guard tensors and shapes only: for functions stored under a key that names all other arguments."""
    return [entry.guard_type in ("TENSOR_MATCH", "SHAPE_ENV") for entry in entries]


def inductor_options() -> set[str]:
    from torch._inductor import list_options

    return set(list_options())


def modes() -> list[str]:
    from torch._inductor import list_mode_options

    return list(list_mode_options())
