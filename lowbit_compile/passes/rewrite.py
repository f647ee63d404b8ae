"""Replace matched linears by ``lowbit::linear``; wires each site's state tensors in as buffers of the graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from .. import compat, linear
from ..errors import LowbitError, RewriteError
from ..runtime.site import SiteState
from ..spec import LinearSpec
from .match import LinearSite


@dataclass
class Edit:
    """What one site becomes: its numerics and implementation as text, and its state."""

    site: LinearSite
    path: str
    spec: LinearSpec
    impl: str
    state: SiteState


def rewrite(root: GraphModule, edits: Iterable[Edit]) -> int:
    """Apply all edits or none: if one fails, every graph is put back and the error names the site."""
    edits = list(edits)
    owners = {id(e.site.owner): e.site.owner for e in edits}
    originals = {key: _copy(gm.graph) for key, gm in owners.items()}
    names = {key: set(gm._buffers) for key, gm in owners.items()}
    lifted: dict[tuple[int, int], str] = {}
    replaced: dict[Node, Node] = {}  # a linear may be the input of the next
    path = ""
    try:
        for edit in edits:
            path = edit.path
            _apply(root, edit, lifted, replaced)
        for gm in [root, *owners.values()]:
            gm.graph.lint()
            gm.recompile()
    except Exception as error:
        for key, gm in owners.items():
            gm.graph = originals[key]
            for name in set(gm._buffers) - names[key]:
                delattr(gm, name)
        if isinstance(error, LowbitError):
            raise
        raise RewriteError(f"{path}: the linear can't be rewritten, its graph is as it was: {error!r}") from error
    return len(edits)


def _apply(root: GraphModule, edit: Edit, lifted: dict[tuple[int, int], str], replaced: dict[Node, Node]) -> None:
    site, gm = edit.site, edit.site.owner

    def attribute(tensor: torch.Tensor) -> Node:
        key = (id(gm), id(tensor))
        if key not in lifted:
            # Positional names: equal blocks then have equal graphs and share compile-cache entries.
            lifted[key] = name = f"lb{sum(k[0] == id(gm) for k in lifted)}"
            compat.register_state_buffer(root, gm, site.prefix, name, tensor)
        return gm.graph.get_attr(lifted[key])

    with gm.graph.inserting_before(site.node):
        state = [attribute(t) for t in (edit.state.amax, edit.state.acc_x, edit.state.acc_g, edit.state.seed)]
        channels = edit.state.channels
        index = attribute(channels.index) if channels and edit.spec.outliers else None
        norms = attribute(channels.acc) if channels and edit.spec.watch else None
        weight = gm.graph.call_method("t", (site.weight,)) if site.stored_in_out else site.weight
        x, bias = replaced.get(site.x, site.x), None if site.bias is None else replaced.get(site.bias, site.bias)
        new = gm.graph.call_function(linear.OP, (x, weight, bias, *state, index, norms, str(edit.spec), edit.impl))
    new.meta.update(site.node.meta)
    site.node.replace_all_uses_with(new)
    gm.graph.erase_node(site.node)
    replaced[site.node] = new


def _copy(graph: Graph) -> Graph:
    copy = Graph()
    output = copy.graph_copy(graph, {})
    copy.output(output)
    return copy
