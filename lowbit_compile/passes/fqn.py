"""Names: from a weight's Dynamo source to its owner module, the root model, and the global module path."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import compat
from .match import LinearSite

_OWNED = re.compile(r"^(.*)\._parameters\['([^']+)'\]$")


@dataclass
class Resolved:
    """``path``: global module path, or ``module.key`` for a parameter not called weight. ``root``: the outermost model
    on the call stack that holds the owner. ``live``: returns the weight as it is now. ``source``: root of the frame."""

    path: str
    root: nn.Module | None
    live: Callable[[], torch.Tensor | None]
    source: Any


def resolve(site: LinearSite, scope: dict[str, Any]) -> Resolved:
    """Name one site. A raw tensor that no module owns is named after its source expression."""
    source = compat.placeholder_source(site.parameter)
    name = compat.source_name(source)
    stack = site.node.meta.get("nn_module_stack") or {}
    owned = _OWNED.match(name)
    owner = _evaluate(owned[1], scope) if owned else None
    if owned is None or not isinstance(owner, nn.Module):
        words = [v[0] for v in stack.values()]
        return Resolved(_plain(words[-1]) if words else name or site.node.name, None, lambda: None, None)
    key = owned[2]
    frame_source = compat.root_source(source)
    root = _outermost(owner, _evaluate(compat.source_name(frame_source), scope))
    names = {id(m): n for n, m in root.named_modules()}
    path = names[id(owner)]
    caller = _calling_module(stack, owner, key, scope)  # a tied head is named after the head, not after the embedding
    if caller is not None and id(caller) in names:
        path = names[id(caller)]
    elif key != "weight":
        path = f"{path}.{key}".lstrip(".")
    reference = weakref.ref(owner)

    def live() -> torch.Tensor | None:
        module = reference()
        return None if module is None else getattr(module, key)

    return Resolved(path or type(root).__name__, root, live, frame_source)


def _evaluate(expression: str, scope: dict[str, Any]) -> Any:
    """Value of a Dynamo source name, which is an expression over the frame's locals and globals."""
    try:
        return eval(expression, dict(scope))
    except (AttributeError, KeyError, NameError, SyntaxError, IndexError, TypeError):
        return None  # the source reaches through something that is no longer there: the caller names it otherwise


def _outermost(owner: nn.Module, frame_root: Any) -> nn.Module:
    candidates = [owner]
    if isinstance(frame_root, nn.Module):
        candidates.append(frame_root)
    candidates += compat.stack_modules()
    holders = [m for m in candidates if any(c is owner for c in m.modules())]
    return holders[-1]


def _calling_module(stack: dict[str, Any], owner: nn.Module, key: str, scope: dict[str, Any]) -> nn.Module | None:
    if not stack:
        return None
    expression = list(stack.values())[-1][0]
    module = _evaluate(expression, scope)
    tensor = getattr(owner, key)
    if isinstance(module, nn.Module) and any(p is tensor for p in module._parameters.values()) and key == "weight":
        return module
    return None


def _plain(expression: str) -> str:
    keys = re.findall(r"\['([^']+)'\]", expression)
    return ".".join(keys[1:]) if keys[:1] in (["self"], ["model"]) else re.sub(r"^L\['\w+'\]\.?", "", expression)
