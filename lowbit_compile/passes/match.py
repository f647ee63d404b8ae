"""Find the linears of a Dynamo graph. Changes nothing."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

VIEWS = {"t", "transpose", "T", "contiguous", "to", "bfloat16", "float", "half"}
KINDS: dict[Any, str] = {F.linear: "linear", torch._C._nn.linear: "linear", torch.addmm: "addmm", torch.mm: "matmul"}
KINDS |= {torch.matmul: "matmul", operator.matmul: "matmul", "matmul": "matmul", "mm": "matmul"}


OWN_BODIES = ("cond", "while_loop", "scan", "map_impl", "associative_scan")  # traced apart: not rewritten inside


@dataclass
class LinearSite:
    """One occurrence: ``x`` times the 2-D weight that ``parameter`` (a top-level placeholder) holds.

    ``stored_in_out``: the weight operand is [in, out] (``x @ W``, Conv1D), so it is transposed for the op.
    ``flipped``: the graph transposes the parameter on its way to the operand, an odd number of times.
    ``owner`` and ``prefix``: the graph module that holds the node (a checkpoint body, say) and its name path.
    ``obstacle``: why it can't be rewritten, empty = it can.
    """

    node: Node
    kind: str
    x: Node
    weight: Node
    parameter: Node
    bias: Node | None
    stored_in_out: bool
    owner: GraphModule
    prefix: str
    flipped: bool = False
    obstacle: str = ""

    @property
    def weight_value(self) -> torch.Tensor:
        value: torch.Tensor = self.weight.meta["example_value"]
        return value

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        rows, cols = (int(s) for s in self.weight_value.shape)
        return (cols, rows) if self.stored_in_out else (rows, cols)


def find(
    gm: GraphModule, prefix: str = "", outer: dict[Node, Node] | None = None, obstacle: str = ""
) -> Iterator[LinearSite]:
    """Every linear in ``gm`` and in the bodies of its higher-order operators (activation checkpoint, cond)."""
    outer = outer or {}
    body_args: dict[str, tuple[str, list[Any]]] = {}
    for node in gm.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            flat = [a for arg in node.args for a in (arg if isinstance(arg, (list, tuple)) else [arg])]
            bodies = [a for a in flat if isinstance(a, Node) and a.op == "get_attr" and _body(gm, a) is not None]
            name = str(node.target)
            why = f"inside torch.{name}, whose branches are traced apart" if name in OWN_BODIES else obstacle
            operands = [a for a in flat if a not in bodies]
            given = [a for a in operands if isinstance(a, Node)] if name in OWN_BODIES else operands
            for body in bodies:
                # cond's first operand is the predicate, which its branches don't get
                body_args[str(body.target)] = (why, given[1:] if name == "cond" else given)
    for node in gm.graph.nodes:
        inner = _body(gm, node)
        if inner is not None:
            placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
            why, args = body_args.get(str(node.target), (obstacle, []))
            given = [outer.get(a, a) for a in args]
            yield from find(inner, f"{prefix}{node.target}.", dict(zip(placeholders, given, strict=False)), why)
            continue
        found = _match(node)
        if found is not None:
            kind, x, weight, bias = found
            parameter, flipped, why = _parameter(weight, outer)
            if parameter is not None:
                stored = kind != "linear"
                why = obstacle or why
                yield LinearSite(node, kind, x, weight, parameter, bias, stored, gm, prefix, flipped, why)


def _body(gm: GraphModule, node: Node) -> GraphModule | None:
    inner = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
    return inner if isinstance(inner, GraphModule) else None


def _match(node: Node) -> tuple[str, Node, Node, Node | None] | None:
    if node.op not in ("call_function", "call_method"):
        return None
    kind = KINDS.get(node.target)
    args = list(node.args)
    if kind == "linear":
        named = node.kwargs
        x, weight = (args + [named.get(k) for k in ("input", "weight")[len(args) :]])[:2]
        bias = args[2] if len(args) > 2 else named.get("bias")
    elif kind is not None and not node.kwargs and len(args) in (2, 3):
        *first, x, weight = args
        bias = first[0] if first else None
    else:
        return None
    if not isinstance(x, Node) or not isinstance(weight, Node):
        return None
    value = weight.meta.get("example_value")
    bias_value = bias.meta.get("example_value") if isinstance(bias, Node) else None
    bias_fits = bias is None or (bias_value is not None and bias_value.dim() == 1)
    if not isinstance(value, torch.Tensor) or value.dim() != 2 or not bias_fits:
        return None
    return kind, x, weight, bias  # type: ignore[return-value]


def _parameter(weight: Node, outer: dict[Node, Node]) -> tuple[Node | None, bool, str]:
    """(the parameter placeholder behind a weight operand or None, transposed on the way, why it can't be rewritten).

    Views and casts are followed. A weight that is computed from parameters alone (a parametrization, a slice) is
    found too, with the operation that is in the way.
    """
    node, flipped = weight, False
    while node.op != "placeholder":
        kind = _view(node)
        if kind is None:
            origin = _origin(node, outer, {})
            name = getattr(node.target, "__name__", node.target)
            return origin, False, f"its weight is computed from a parameter by {name}"
        flipped ^= kind == "flip"
        node = node.args[0]  # type: ignore[assignment]
    node = outer.get(node, node)
    return (node if _is_parameter(node) else None), flipped, ""


def _view(node: Node) -> str | None:
    """What a node does to its first argument: ``flip`` a matrix, ``keep`` its shape, or None: neither."""
    if not node.args or not isinstance(node.args[0], Node):
        return None
    if node.target is getattr:
        return {"T": "flip", "mT": "flip", "data": "keep"}.get(str(node.args[1]))
    if node.op == "call_method" and node.target in VIEWS:
        if node.target == "transpose":
            given: tuple[Any, ...] = (*node.args[1:], *node.kwargs.values())
            return "flip" if len({a % 2 for a in given if isinstance(a, int)}) == 2 else "keep"
        return "flip" if node.target == "t" else "keep"
    return None


def _is_parameter(node: Node) -> bool:
    value = node.meta.get("example_value")
    leaf = isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
    return leaf or isinstance(value, torch.nn.Parameter)


def _origin(node: Node, outer: dict[Node, Node], seen: dict[Node, Node | None]) -> Node | None:
    """A parameter that ``node`` is computed from, if it is computed from parameters and constants alone."""
    if node in seen:
        return seen[node]
    if node.op == "placeholder":
        node = outer.get(node, node)
        return node if _is_parameter(node) else None
    found: Node | None = None
    for source in node.all_input_nodes:
        if source.op == "get_attr":
            continue
        origin = _origin(source, outer, seen)
        if origin is None:
            seen[node] = None
            return None
        found = origin
    seen[node] = found
    return found
