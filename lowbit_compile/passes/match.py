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


@dataclass
class LinearSite:
    """One occurrence: ``x`` times the 2-D weight that ``parameter`` (a top-level placeholder) holds.

    ``stored_in_out``: the weight operand is [in, out] (``x @ W``, Conv1D), so it is transposed for the op.
    ``owner`` and ``prefix``: the graph module that holds the node (a checkpoint body, say) and its name path.
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

    @property
    def weight_value(self) -> torch.Tensor:
        value: torch.Tensor = self.weight.meta["example_value"]
        return value

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        rows, cols = (int(s) for s in self.weight_value.shape)
        return (cols, rows) if self.stored_in_out else (rows, cols)


def find(gm: GraphModule, prefix: str = "", outer: dict[Node, Node] | None = None) -> Iterator[LinearSite]:
    """Every linear in ``gm`` and in the bodies of its higher-order operators (activation checkpoint, cond)."""
    outer = outer or {}
    body_args: dict[str, list[Any]] = {}
    for node in gm.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            bodies = [a for a in node.args if isinstance(a, Node) and a.op == "get_attr"]
            for body in bodies:
                body_args[str(body.target)] = [a for a in node.args if a not in bodies]
    for node in gm.graph.nodes:
        inner = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(inner, GraphModule):
            placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
            given = [outer.get(a, a) for a in body_args.get(str(node.target), [])]
            yield from find(inner, f"{prefix}{node.target}.", dict(zip(placeholders, given, strict=False)))
            continue
        found = _match(node)
        if found is not None:
            kind, x, weight, bias = found
            parameter = _parameter(weight, outer)
            if parameter is not None:
                yield LinearSite(node, kind, x, weight, parameter, bias, kind != "linear", gm, prefix)


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


def _parameter(node: Node, outer: dict[Node, Node]) -> Node | None:
    """Follow views and casts from a weight operand to the parameter placeholder behind it, or None."""
    while node.op != "placeholder":
        view = (node.op == "call_method" and node.target in VIEWS) or node.target is getattr
        if not view or not isinstance(node.args[0], Node):
            return None
        node = node.args[0]
    node = outer.get(node, node)
    value = node.meta.get("example_value")
    leaf = isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
    if leaf or isinstance(value, torch.nn.Parameter):
        return node
    return None
