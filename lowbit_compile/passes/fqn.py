"""Names: from a weight's Dynamo source to its owner module, the root model, and the global module path."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from .. import compat
from ..policy import strip_wrappers
from .match import LinearSite

_OWNED = re.compile(r"^(.*)\._parameters\['([^']+)'\]$")


@dataclass(eq=False)
class Home:
    """What the state of a model's linears hangs on: it lives as long as one of the modules that own the weights, or as
    a weight that no module owns.

    ``root``: gives the outermost model, as it was when its first linear was compiled, while that lives. An evaluation
    that calls the inner model, or a backward that recomputes, has another call stack, and must find the same state.
    ``paths``: of the root's modules. ``compiled``: the backend's, by policy and seed.
    """

    root: Callable[[], nn.Module | torch.Tensor | None] = lambda: None
    paths: weakref.WeakKeyDictionary[nn.Module, str] = field(default_factory=weakref.WeakKeyDictionary)
    compiled: dict[tuple[str, int], Any] = field(default_factory=dict)


@dataclass
class Resolved:
    """``path``: module path in the root, or ``module.key`` for a parameter not called weight, without the segments of
    wrappers; ``raw``: with them. ``live``: returns the weight as it is now. ``source``: root of the frame."""

    path: str
    raw: str
    home: Home
    live: Callable[[], torch.Tensor | None]
    source: Any


_homes: MutableMapping[Any, Home] = WeakIdKeyDictionary()  # of roots, of weights' owners, and of weights without one


def homes_of(model: nn.Module) -> list[Home]:
    """Where the state of ``model``'s linears is: its own home, that of a model that holds it, or several inside it."""
    return list({id(home): home for m in model.modules() if (home := _homes.get(m)) is not None}.values())


def home_of_root(root: nn.Module) -> Home:
    """Get or create, with the paths that the root's modules have now: it may have got layers since."""
    home = _homes.setdefault(root, Home(weakref.ref(root)))
    home.paths.update({m: n for n, m in root.named_modules()})
    return home


def resolve(site: LinearSite, scope: dict[str, Any]) -> Resolved:
    """Name one site. A raw tensor that no module owns is named after its source expression."""
    source = compat.placeholder_source(site.parameter)
    name = compat.source_name(source)
    stack = site.node.meta.get("nn_module_stack") or {}
    owned = _OWNED.match(name)
    owner = _evaluate(owned[1], scope) if owned else None
    if owned is None or not isinstance(owner, nn.Module):
        words = [v[0] for v in stack.values()]
        path = _plain(words[-1]) if words else name or site.node.name
        value = _evaluate(name, scope) if name else None
        if not isinstance(value, torch.Tensor):
            return Resolved(path, path, Home(), lambda: None, None)
        home = _homes.setdefault(value, Home(weakref.ref(value)))
        return Resolved(path, path, home, weakref.ref(value), None)
    key = owned[2]
    home = _home_of_owner(owner, source, scope)
    path = home.paths[owner]
    caller = _calling_module(stack, owner, key, scope)  # a tied head is named after the head, not after the embedding
    if caller is not None and caller in home.paths:
        path = home.paths[caller]
    elif key != "weight":
        path = f"{path}.{key}".lstrip(".")
    reference = weakref.ref(owner)

    def live() -> torch.Tensor | None:
        module = reference()
        return None if module is None else getattr(module, key)

    path = path or type(owner).__name__
    return Resolved(strip_wrappers(path), path, home, live, compat.root_source(source))


def _evaluate(expression: str, scope: dict[str, Any]) -> Any:
    """Value of a Dynamo source name, which is an expression over the frame's locals and globals."""
    try:
        return eval(expression, dict(scope))
    except (AttributeError, KeyError, NameError, SyntaxError, IndexError, TypeError):
        return None  # the source reaches through something that is no longer there: the caller names it otherwise


def _home_of_owner(owner: nn.Module, source: Any, scope: dict[str, Any]) -> Home:
    """The home it has, or that of the outermost model that holds it, along the weight's source or on the call stack."""
    known = _homes.get(owner)
    if known is not None and owner in known.paths:
        return known
    candidates = [owner]
    while source is not None:
        value = _evaluate(compat.source_name(source), scope)
        candidates += [value] if isinstance(value, nn.Module) else []
        source = getattr(source, "base", None)
    candidates += compat.stack_modules()
    root = [m for m in candidates if any(c is owner for c in m.modules())][-1]
    _homes[owner] = home = home_of_root(root)
    return home


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
