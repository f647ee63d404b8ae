"""The structure that DESIGN.md and CONTRIBUTING.md state. Each rule is a function of (path, source), and can fail."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "lowbit_compile"

# Lowest first. A module (or a whole subpackage) imports its own layer and those above it in this table.
LAYERS = [
    {"errors", "compat"},  # from anywhere
    {"formats"},
    {"spec", "casts", "random_bits", "hadamard", "scaling"},
    {"quantize", "jobs"},
    {"codegen"},
    {"schedule", "windows", "recipe", "policy", "policy_file"},
    {"ops", "linear"},
    {"runtime"},
    {"passes", "report"},
    {"options", "registry"},
    {"backend", "api", "__init__"},
    {"demo", "bars"},
    {"commands"},
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# Torch's private names outside compat.py, each with its reason.
PRIVATE_TORCH = {
    (f"{PACKAGE}/runtime/state.py", "torch._foreach_add_"): "public by practice: the optimizers' own primitive",
    (f"{PACKAGE}/runtime/state.py", "torch._foreach_norm"): "public by practice: clip_grad_norm_'s own primitive",
    (f"{PACKAGE}/codegen/matmul_kernel.py", "torch._scaled_mm"): "public by practice: the vendor's FP8 product",
    (f"{PACKAGE}/passes/match.py", "torch._C._nn.linear"): "what F.linear is in a graph; has no other name",
    (f"{PACKAGE}/passes/match.py", "torch._ops.HigherOrderOperator"): "the type of checkpoint and cond nodes",
}

Check = Callable[[str, str], list[str]]


def files(*folders: str) -> Iterator[tuple[str, str]]:
    """(path from the repository's root, source); dumped graphs among the results are nobody's source."""
    for folder in folders:
        for path in sorted(p for p in (ROOT / folder).rglob("*.py") if "results" not in p.parts):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def faults(check: Check, *folders: str) -> str:
    return "\n".join(fault for path, source in files(*folders) for fault in check(path, source))


# --- imports


def module_name(path: str) -> str:
    """``lowbit_compile/passes/match.py`` -> ``lowbit_compile.passes.match``."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {module_name(path) for path, _ in files(PACKAGE)}


def layer(module: str) -> str:
    """The name in LAYERS that ``module`` belongs to."""
    return module.split(".")[1] if "." in module else "__init__"


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def at_runtime(node: ast.AST) -> Iterator[ast.AST]:
    """ast.walk without the bodies of ``if TYPE_CHECKING``."""
    yield node
    for child in node.orelse if is_type_checking(node) else ast.iter_child_nodes(node):  # type: ignore[attr-defined]
        yield from at_runtime(child)


def imports(path: str, source: str) -> Iterator[tuple[int, str]]:
    """(line, module of the package) of every import that runs, also inside functions."""
    package = path.rpartition("/")[0].split("/")
    for node in at_runtime(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            inside = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else base for name in inside]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == PACKAGE)


def upward_imports(path: str, source: str) -> list[str]:
    name = layer(module_name(path))
    if name not in RANK:
        return [f"{path}:1: {name!r} has no layer: add it to LAYERS in tests/unit/test_structure.py"]
    return [
        f"{path}:{line}: {name} imports {target}, a layer above it; see LAYERS in tests/unit/test_structure.py"
        for line, target in imports(path, source)
        if RANK.get(layer(target), 0) > RANK[name]
    ]


def find_cycle(graph: dict[str, set[str]]) -> str:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " <- ".join(error.args[1])
    return ""


def test_imports_go_down() -> None:
    found = faults(upward_imports, PACKAGE)
    assert not found, found


def test_every_layer_exists() -> None:
    gone = set(RANK) - {layer(module) for module in MODULES}
    assert not gone, f"in LAYERS, but not in the package: {gone}"


def test_no_import_cycle() -> None:
    graph = {module_name(path): {target for _, target in imports(path, source)} for path, source in files(PACKAGE)}
    cycle = find_cycle(graph)
    assert not cycle, cycle


@pytest.mark.parametrize(
    "source",
    ["from .backend import lowbit", "from . import backend", "import lowbit_compile.backend", "import lowbit_compile",
     "def f():\n    from .runtime.state import State", "if TYPE_CHECKING:\n    pass\nelse:\n    from . import cli"],
)  # fmt: skip
def test_upward_import_is_found(source: str) -> None:
    assert upward_imports(f"{PACKAGE}/formats.py", source)
    assert not upward_imports(f"{PACKAGE}/demo/train.py", source)


def test_other_imports_are_left_alone() -> None:
    down = "import torch\nfrom .errors import LowbitError\nif TYPE_CHECKING:\n    from .backend import lowbit\n"
    assert not upward_imports(f"{PACKAGE}/formats.py", down)
    assert upward_imports(f"{PACKAGE}/passes/match.py", "from ..backend import lowbit")
    assert "add it to LAYERS" in upward_imports(f"{PACKAGE}/novel.py", "")[0]


def test_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert not find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()})


# --- the hash of the numerics sources

NO_NUMERICS = {"errors", "compat", "codegen"}  # codegen: every implementation gives the same bits


def needs(graph: dict[str, set[str]], start: str) -> set[str]:
    """``start`` and all that it imports, directly or not."""
    found, rest = set(), {start}
    while rest:
        found |= rest
        rest = {target for module in rest for target in graph[module]} - found
    return found


def strings_in(source: str, function: str) -> set[str]:
    (found,) = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == function)
    return {n.value for n in ast.walk(found) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def test_every_numerics_source_is_hashed() -> None:
    """The op's text holds the hash; without it, a cache on disk gives a new formula the old one's graph."""
    graph = {module_name(path): {target for _, target in imports(path, source)} for path, source in files(PACKAGE)}
    numerics = {layer(module) for module in needs(graph, f"{PACKAGE}.linear")} - NO_NUMERICS
    hashed = strings_in((ROOT / PACKAGE / "backend.py").read_text(encoding="utf-8"), "implementation_hash")
    assert not numerics - hashed, f"not in backend.implementation_hash: {numerics - hashed}"


def test_missing_numerics_source_is_found() -> None:
    assert needs({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}, "a") == {"a", "b", "c"}
    assert strings_in("x = 'a'\ndef f():\n    return ('b', 'c')", "f") == {"b", "c"}


# --- sizes

MOST_LINES, MOST_BODY_LINES = 400, 60


def oversized(path: str, source: str) -> list[str]:
    count = len(source.splitlines())
    found = [f"{path}:{count}: {count} lines, {MOST_LINES} at most"] if count > MOST_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = (node.end_lineno or 0) - node.body[0].lineno + 1
            if body > MOST_BODY_LINES:
                found.append(f"{path}:{node.lineno}: {node.name} has {body} lines, {MOST_BODY_LINES} at most")
    return found


def test_sizes() -> None:
    found = faults(oversized, PACKAGE, "tests", "benchmarks")
    assert not found, found


def test_oversized_is_found() -> None:
    body = "class A:\n    def f(self):\n" + "        pass\n" * MOST_BODY_LINES
    assert not oversized("a.py", body)
    assert oversized("a.py", body + "        pass\n") == ["a.py:2: f has 61 lines, 60 at most"]
    assert not oversized("a.py", "x = 1\n" * MOST_LINES)
    assert oversized("a.py", "x = 1\n" * (MOST_LINES + 1)) == ["a.py:401: 401 lines, 400 at most"]


# --- torch's private names


def is_private(dotted: str) -> bool:
    parts = dotted.split(".")
    return parts[0] == "torch" and any(p.startswith("_") and not p.endswith("__") for p in parts)


def torch_names(source: str) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of everything imported from torch or reached from it by attributes."""
    tree = ast.parse(source)
    known = {"torch": "torch"}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            if (base + alias.name).split(".")[0] == "torch":
                known |= {alias.asname or alias.name: base + alias.name}
                yield node.lineno, base + alias.name
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            first, _, rest = ast.unparse(node).partition(".")
            if first in known:
                yield node.lineno, f"{known[first]}.{rest}"


def private_torch(path: str, source: str) -> list[str]:
    if path == f"{PACKAGE}/compat.py":
        return []
    return [
        f"{path}:{line}: {name} is private to torch: move it to compat.py, with a contract test"
        for line, name in torch_names(source)
        if is_private(name) and (path, name) not in PRIVATE_TORCH
    ]


def test_private_torch_names_are_in_compat() -> None:
    found = faults(private_torch, PACKAGE)
    assert not found, found


def test_every_exception_is_needed() -> None:
    used = {(path, name) for path, source in files(PACKAGE) for _, name in torch_names(source)}
    assert not set(PRIVATE_TORCH) - used, f"in PRIVATE_TORCH, but no longer used: {set(PRIVATE_TORCH) - used}"


@pytest.mark.parametrize(
    "source",
    ["torch._dynamo.reset()", "from torch._dynamo import config", "import torch._inductor.config as c",
     "from torch.fx.proxy import _get", "import torch.nn.functional as F\nF._pad(x)", "y = torch.fx._symbolic_trace.f",
     "def f():\n    from torch import _C", "from torch import nn\nnn.functional._pad(x)[0].a"],
)  # fmt: skip
def test_private_torch_name_is_found(source: str) -> None:
    assert private_torch(f"{PACKAGE}/ops.py", source)
    assert not private_torch(f"{PACKAGE}/compat.py", source)


def test_public_torch_names_are_left_alone() -> None:
    source = "import torch\nfrom torch import nn\ntorch.__version__\ntorch.library.custom_op('a')\nself._x\nnn.Linear.a"
    assert not private_torch(f"{PACKAGE}/ops.py", source)


# --- errors that vanish


def comment_lines(source: str) -> set[int]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0] for token in tokens if token.type == tokenize.COMMENT}


def does_nothing(node: ast.stmt) -> bool:
    if isinstance(node, ast.Return):
        return node.value is None or ast.unparse(node.value) == "None"
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.Pass | ast.Continue)


def silent_handlers(path: str, source: str) -> list[str]:
    """Bare ``except:``; handlers that only pass, continue or return None, and suppress(), without a comment why."""
    comments, found = comment_lines(source), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            found.append(f"{path}:{node.lineno}: a bare except: name the errors")
        elif isinstance(node, ast.ExceptHandler) and all(map(does_nothing, node.body)):
            if not comments & set(range(node.lineno, node.body[-1].lineno + 1)):
                found.append(f"{path}:{node.lineno}: an error vanishes here: handle it, or say why in a comment")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("suppress", "contextlib.suppress"):  # noqa: SIM102
            if node.lineno not in comments:
                found.append(f"{path}:{node.lineno}: errors are suppressed here: say why in a comment")
    return found


def test_no_error_vanishes() -> None:
    found = faults(silent_handlers, PACKAGE)
    assert not found, found


TRY = "for i in x:\n    try:\n        f()\n    except {}\n"


@pytest.mark.parametrize(
    "handler",
    [":\n        raise", " Exception:\n        pass", " KeyError: continue", " (KeyError, OSError): ...",
     " OSError:\n        'a docstring is no handling'\n        pass"],
)  # fmt: skip
def test_silent_handler_is_found(handler: str) -> None:
    assert silent_handlers("a.py", TRY.format(handler))


def test_silent_return_and_suppress_are_found() -> None:
    assert silent_handlers("a.py", "def f():\n    try:\n        g()\n    except OSError:\n        return None")
    assert silent_handlers("a.py", "def f():\n    try:\n        g()\n    except OSError:\n        return")
    assert silent_handlers("a.py", "with contextlib.suppress(OSError):\n    f()")


@pytest.mark.parametrize(
    "handler", [" OSError:\n        pass  # why", " OSError as e:\n        log(e)", " OSError: x = 0"]
)
def test_handled_error_is_left_alone(handler: str) -> None:
    assert not silent_handlers("a.py", TRY.format(handler))
    assert not silent_handlers("a.py", "with suppress(OSError):  # why\n    f()")


# --- tests that don't run


def unexplained_skips(path: str, source: str) -> list[str]:
    """pytest.skip, pytest.xfail and the marks skip, skipif and xfail, without a reason."""
    tree, found = ast.parse(source), []
    calls = {id(n.func): n for n in ast.walk(tree) if isinstance(n, ast.Call)}
    for node in ast.walk(tree):
        name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if not re.fullmatch(r"(pytest\.)?mark\.(skip|skipif|xfail)|pytest\.(skip|xfail)", name):
            continue
        call = calls.get(id(node))
        reasons = [k.value for k in call.keywords if k.arg == "reason"] if call else []
        if call and call.args and not name.endswith(("skipif", "mark.xfail")):  # their first argument is a condition
            reasons.append(call.args[0])
        if not reasons or ast.unparse(reasons[0]) in ("''", "None"):
            found.append(f"{path}:{node.lineno}: {name} without a reason")  # type: ignore[attr-defined]
    return found


def test_every_skip_has_a_reason() -> None:
    found = faults(unexplained_skips, "tests")
    assert not found, found


@pytest.mark.parametrize(
    "source",
    ["@pytest.mark.skip\ndef f(): ...", "@pytest.mark.xfail\ndef f(): ...", "pytest.mark.skipif(x)", "pytest.skip()",
     "pytest.param(1, marks=pytest.mark.xfail(strict=True))", "pytest.xfail('')", "pytest.mark.skip(reason='')",
     "pytest.mark.xfail(x > 1, raises=OSError)"],
)  # fmt: skip
def test_unexplained_skip_is_found(source: str) -> None:
    assert unexplained_skips("a.py", source)


@pytest.mark.parametrize(
    "source",
    ["pytest.skip('no GPU')", "pytest.mark.skipif(x, reason='no GPU')", "pytest.mark.xfail(reason=WHY)",
     "pytest.importorskip('ml_dtypes')", "self.skip"],
)  # fmt: skip
def test_explained_skip_is_left_alone(source: str) -> None:
    assert not unexplained_skips("a.py", source)
