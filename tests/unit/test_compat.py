"""The contract of each function in compat.py with the installed torch: what breaks first when torch moves."""

from __future__ import annotations

import inspect
import itertools
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch.fx import GraphModule, Node
from torch.library import Library
from torch.utils.checkpoint import checkpoint

from lowbit_compile import compat
from lowbit_compile.errors import UnsupportedError

Look = Callable[[GraphModule], Any]


NUMBERS = itertools.count()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).relu()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def looking(look: Look) -> tuple[Callable[..., Any], list[Any]]:
    """A backend that runs graphs as they are, and what ``look`` returned in each compile."""
    seen: list[Any] = []

    def backend(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        seen.append(look(gm))
        return gm.forward

    return backend, seen


def placeholders(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if n.op == "placeholder"]


def test_every_function_is_tested_here() -> None:
    public = {n for n, f in vars(compat).items() if inspect.isfunction(f) and f.__module__ == compat.__name__}
    used = set(re.findall(r"compat\.(\w+)", Path(__file__).read_text(encoding="utf-8")))
    assert {n for n in public if not n.startswith("_")} <= used


# --- names


def test_source_names_are_expressions_over_the_frame() -> None:
    def look(gm: GraphModule) -> dict[str, Any]:
        scope, _ = compat.frame_scope()
        names = [compat.source_name(compat.placeholder_source(n)) for n in placeholders(gm)]
        assert all(compat.placeholder_source(n) is None for n in gm.graph.nodes if n.op != "placeholder")
        return {n: eval(n, dict(scope)) for n in names}

    model, x = Model(), torch.randn(2, 4)
    backend, seen = looking(look)
    torch.compile(model, backend=backend)(x)
    (found,) = seen
    assert found["L['x']"] is x
    parameters = {n: v for n, v in found.items() if n != "L['x']"}
    assert len(parameters) == 4
    for name, value in parameters.items():  # the form that passes/fqn.py reads
        owner, key = re.fullmatch(r"L\['self'\](.*)\._parameters\['([^']+)'\]", name).groups()  # type: ignore[union-attr]
        path = ".".join(re.findall(r"\._modules\['([^']+)'\]", owner))
        assert getattr(model.get_submodule(path), key) is value
    assert compat.source_name(None) == ""


def test_root_source() -> None:
    def look(gm: GraphModule) -> set[str]:
        sources = [compat.placeholder_source(n) for n in placeholders(gm)]
        return {compat.source_name(compat.root_source(s)) for s in sources}

    backend, seen = looking(look)
    torch.compile(Model(), backend=backend)(torch.randn(2, 4))
    assert seen == [{"L['self']", "L['x']"}]
    assert compat.root_source(None) is None


# --- the frame


def test_frame_scope_holds_the_frame_and_tells_frames_apart() -> None:
    class Broken(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            torch._dynamo.graph_break()
            return self.up(x)

    backend, seen = looking(lambda gm: compat.frame_scope())
    model = Broken()
    run = torch.compile(model, backend=backend)
    run(torch.randn(2, 4))
    assert [scope["L"]["self"] for scope, _ in seen] == [model, model]
    assert all(scope["G"]["Block"] is Block for scope, _ in seen)
    assert len({code for _, code in seen}) == 2
    assert all(code.startswith(f"{__file__}:") for _, code in seen)
    torch._dynamo.reset()
    run(torch.randn(2, 4))
    assert [code for _, code in seen[2:]] == [code for _, code in seen[:2]]  # a recompile is known by it


def test_stack_modules_innermost_first() -> None:
    outer = nn.Sequential(nn.ReLU(), Model())
    backend, seen = looking(lambda gm: compat.stack_modules())
    outer[1].compile(backend=backend)
    outer(torch.randn(2, 4))
    (found,) = seen
    assert list(dict.fromkeys(found)) == [outer[1], outer]


def test_stack_modules_leaves_out_wrappers() -> None:
    model = Model()
    backend, seen = looking(lambda gm: compat.stack_modules())
    torch.compile(model, backend=backend)(torch.randn(2, 4))
    assert set(seen[0]) == {model}


def test_missing_name_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torch._dynamo.symbolic_convert"
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    with pytest.raises(UnsupportedError, match=rf"torch {re.escape(torch.__version__)} has no InstructionTranslator"):
        compat.frame_scope()


# --- guards


@pytest.mark.parametrize("guarded", [False, True])
def test_guard_identity_recompiles_for_another_object(guarded: bool) -> None:
    def look(gm: GraphModule) -> None:
        source = compat.root_source(compat.placeholder_source(placeholders(gm)[0]))
        assert compat.source_name(source) == "L['block']"
        if guarded:
            compat.guard_identity(source)

    backend, seen = looking(look)
    run = torch.compile(lambda block, x: block(x), backend=backend)
    a, b, x = Block(), Block(), torch.randn(2, 4)
    for block in (a, b, a, b):
        assert torch.equal(run(block, x), block(x))
    assert len(seen) == (2 if guarded else 1)


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of integers, as runtime/phases.py is. Its name is its own: a frame's globals keep what guards import."""
    module: Any = types.ModuleType(f"lowbit_test_phases{next(NUMBERS)}")
    module.state0, module.state1 = 0, 0
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_guard_equals_recompiles_for_another_value(phases: Any) -> None:
    backend, seen = looking(lambda gm: compat.guard_equals(phases.__name__, "state0"))
    run = torch.compile(Block(), backend=backend)
    x = torch.randn(2, 4)
    for value, count in ((0, 1), (0, 1), (1, 2), (0, 2), (1, 2), (2, 3)):
        phases.state0 = value
        phases.state1 += 1  # nobody guards on this one
        run(x)
        assert len(seen) == count


def test_raise_recompile_limit_never_lowers() -> None:
    config = torch._dynamo.config
    with config.patch(accumulated_recompile_limit=100):
        compat.raise_recompile_limit(300)
        assert config.accumulated_recompile_limit == 300
        compat.raise_recompile_limit(200)
        assert config.accumulated_recompile_limit == 300


@pytest.mark.parametrize(("at_least", "compiles"), [(0, 3), (5, 5)])
def test_raise_recompile_limit_lets_equal_blocks_compile(at_least: int, compiles: int) -> None:
    """Equal blocks share a code object; each has a graph of its own, since its state is baked in."""

    def look(gm: GraphModule) -> None:
        compat.guard_identity(compat.root_source(compat.placeholder_source(placeholders(gm)[0])))

    backend, seen = looking(look)
    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=3):
        compat.raise_recompile_limit(at_least)
        for block in [Block() for _ in range(5)]:
            block.compile(backend=backend)
            block(torch.randn(2, 4))
    assert len(seen) == compiles


def test_raise_recompile_limit_lets_one_model_recompile(phases: Any) -> None:
    """Phases, training or not, gradients or not: one model has as many graphs as they multiply to."""
    backend, seen = looking(lambda gm: compat.guard_equals(phases.__name__, "state0"))
    run = torch.compile(Block(), backend=backend)
    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=3):
        compat.raise_recompile_limit(5)
        for phases.state0 in range(5):
            run(torch.randn(2, 4))
    assert len(seen) == 5


def test_below_autograd_makes_forward_and_backward_look_alike() -> None:
    backend, seen = looking(lambda gm: None)
    run = torch.compile(torch.relu, backend=backend)

    class Relu(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            with torch.no_grad(), compat.below_autograd():
                return run(x.detach())

        backward = forward

    Relu.apply(torch.ones(3, requires_grad=True)).backward(torch.ones(3))
    with compat.below_autograd():
        assert not (torch.ones(3, requires_grad=True) * 2).requires_grad
    assert len(seen) == 1


def test_graphs_compiled_counts() -> None:
    before = compat.graphs_compiled()
    torch.compile(torch.relu, backend="eager")(torch.randn(3))
    assert compat.graphs_compiled() == before + 1


# --- the compiler inside


@pytest.mark.parametrize(
    ("function", "marked", "compiles"),
    [(torch.relu, False, 2), (torch.relu, True, 1), (lambda x: x.reshape(6, -1) if x.shape[0] == 6 else x, True, 2)],
)
def test_mark_dynamic(function: Callable[[Tensor], Tensor], marked: bool, compiles: int) -> None:
    """One compile for any number of rows; code that is made for one number is no error."""
    backend, seen = looking(lambda gm: None)
    run = torch.compile(function, backend=backend, fullgraph=True)
    for x in (torch.randn(6, 4), torch.randn(12, 4)):
        if marked:
            compat.mark_dynamic([x], axes=(0,))
        run(x)
    assert len(seen) == compiles


def tensor_state(owner: str) -> tuple[Callable[..., Any], Tensor, list[Any]]:
    """A backend that adds, to the graph or to the body ``owner`` in it, a state that the graph reads and raises by 1:
    it is added to the output. Returns the backend, the state, and the inputs that AOTAutograd takes as static."""
    state, static = torch.ones(()), []

    def backend(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        inner = gm.get_submodule(owner)
        assert isinstance(inner, GraphModule)
        compat.register_state_buffer(gm, inner, f"{owner}." if owner else "", "lb0", state)
        (output,) = (n for n in inner.graph.nodes if n.op == "output")
        with inner.graph.inserting_before(output):
            attribute = inner.graph.get_attr("lb0")
            total = inner.graph.call_function(torch.add, (output.args[0][0], attribute))
            inner.graph.call_method("add_", (attribute, 1))
        output.args = ((total, *output.args[0][1:]),)
        inner.recompile()
        gm.recompile()
        run = compat.inner_compiler("aot_eager", None, {})(gm, inputs)
        static.extend(torch._guards.TracingContext.get().fw_metadata.static_input_indices)
        return run

    return backend, state, static


@pytest.mark.parametrize("owner", ["", "wrap_body_0"])
def test_register_state_buffer_is_live_in_graphs(owner: str) -> None:
    block, x = Block(), torch.randn(2, 4)
    backend, state, static = tensor_state(owner)
    eager = block(x)

    def forward(x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False) if owner else block(x)

    run = torch.compile(forward, backend=backend, fullgraph=True)
    address = state.data_ptr()
    assert torch.equal(run(x), eager + 1)
    state += 5
    assert torch.equal(run(x), eager + 7)
    assert state == 8
    assert state.data_ptr() == address
    assert static[0] == 0  # buffers are the first inputs


@pytest.fixture
def watch() -> Iterator[Callable[..., Any]]:
    """Makes an op whose backward raises ``acc`` to the gradient's amax."""
    library = Library("lowbit_test", "FRAGMENT")

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, acc: Tensor, kept_out: bool) -> Tensor:
            ctx.acc = acc
            if kept_out:
                compat.keep_out_of_version_check(acc)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
            ctx.acc.copy_(torch.maximum(ctx.acc, g.abs().amax()))
            return g.clone(), None, None

    library.define("watch(Tensor x, Tensor(a!) acc, bool kept_out) -> Tensor")
    library.impl("watch", Watch.apply, "CompositeImplicitAutograd")
    yield torch.ops.lowbit_test.watch.default
    library._destroy()


@pytest.mark.parametrize("kept_out", [False, True])
def test_keep_out_of_version_check(watch: Callable[..., Any], kept_out: bool) -> None:
    """Two forwards, then two backwards that both write the accumulator."""

    def backend(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return compat.inner_compiler("aot_eager", None, {})(gm, inputs)

    acc, x = torch.zeros(()), torch.randn(4, requires_grad=True)
    run = torch.compile(lambda x: watch(x, acc, kept_out), backend=backend, fullgraph=True)
    first, second = run(x).sum(), run(x).sum()
    first.backward()
    if not kept_out:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (3 * second).backward()
        return
    (3 * second).backward()
    assert acc == 3


@pytest.mark.parametrize(("mode", "cudagraphs"), [(None, False), ("default", False), ("reduce-overhead", True)])
def test_inner_compiler_takes_mode_and_options(mode: str | None, cudagraphs: bool) -> None:
    seen = []

    def note(graph: torch.fx.Graph) -> None:
        seen.append((inductor.triton.cudagraphs, inductor.size_asserts))

    def backend(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        config = {"size_asserts": False, "post_grad_custom_pre_pass": note}
        return compat.inner_compiler("inductor", mode, config)(gm, inputs)

    x, y = torch.randn(4, 4), torch.randn(4, 4)  # one matrix product: nothing for the C++ compiler
    assert torch.equal(torch.compile(torch.mm, backend=backend)(x, y), x @ y)
    assert seen == [(cudagraphs, False)]
    assert (inductor.triton.cudagraphs, inductor.size_asserts) == (False, True)


def test_inductor_options_and_modes() -> None:
    assert {"max_autotune", "triton.cudagraphs", "size_asserts"} <= compat.inductor_options()
    assert {"default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"} <= set(compat.modes())


def test_modes_are_listed_once() -> None:
    assert len(compat.modes()) == len(set(compat.modes()))


def test_exact_options_are_inductors() -> None:
    x, y = torch.rand(64) + 1e-3, torch.rand(64) + 1e-3
    assert torch.equal(torch.compile(torch.div, options=compat.exact_options())(x, y), x / y)


def test_keep_tensor_guards() -> None:
    """Another dtype or width compiles again, another value of an ordinary argument doesn't."""
    backend, seen = looking(lambda gm: None)
    run = torch.compile(lambda x, n: x * n, backend=backend, options={"guard_filter_fn": compat.keep_tensor_guards})
    x = torch.ones(2, 4)
    for tensor, n, graphs in ((x, 2.0, 1), (x, 3.0, 1), (x.double(), 2.0, 2), (x.repeat(1, 2), 2.0, 3)):
        run(tensor, n)
        assert len(seen) == graphs


def test_exact_options_missing_from_torch_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "inductor_options", lambda: {"eager_numerics.division_rounding"})
    with pytest.raises(UnsupportedError, match="disable_ftz"):
        compat.exact_options()
