"""The torch.compile entry: ``torch.compile(model, backend="lowbit", options={"policy": ...})``.

Runs on every Dynamo compile, compile-cache hit or not, and is the only place with side effects: it matches, decides,
creates state, rewrites, installs guards, then hands the graph to Inductor. Registered through the entry-point group
``torch_dynamo_backends`` only; a second registration by decorator would collide with it.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils.weak import WeakIdKeyDictionary

from . import compat
from .codegen import IMPLEMENTATIONS, select
from .errors import LowbitWarning, PolicyError, UnsupportedError, nearest
from .passes import fqn
from .passes.match import LinearSite, find
from .passes.rewrite import Edit, rewrite
from .policy import KINDS, Decision, Policy, strip_wrappers
from .policy_file import load_policy
from .report import Report, SiteRecord
from .runtime import phases
from .runtime.site import SiteState
from .runtime.state import State, install_step_hook
from .schedule import boundaries

OPTIONS = {
    "policy": "preset name, path, dict or Policy (default tetrajet_v2)",
    "mode": "torch.compile mode for the rest of the graph",
    "inner": "what compiles the rest of the graph: inductor (default) or aot_eager",
    "reference": "how the reference runs: compiled (default) or eager; the same bits",
    "kernels": "off (default): the reference alone; auto: Triton kernels on CUDA where they are possible",
    "seed": "seed of stochastic rounding and random signs (default 0)",
    "dump_dir": "folder for the graphs before and after the rewrite",
}


@dataclass(frozen=True)
class Options:
    policy: Policy
    mode: str | None
    inner: str
    reference: str
    kernels: str
    seed: int
    dump_dir: str | None
    inductor: tuple[tuple[str, Any], ...]


@dataclass
class _Compiled:
    """What is known of one root model under one policy and seed."""

    state: State
    records: dict[str, SiteRecord]
    frames: Counter[tuple[Any, ...]]
    told: set[str] = field(default_factory=set)


_loads: MutableMapping[nn.Module, dict[str, Any]] = WeakIdKeyDictionary()  # saved, waiting for the first compile


def lowbit(
    gm: GraphModule, example_inputs: list[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Backend function that torch.compile calls with Dynamo's graph. See :data:`OPTIONS` for the options; Inductor's
    own options are passed on. Raises :class:`PolicyError` for an unknown one."""
    opts = read_options(mode, options)
    compiler = compat.inner_compiler(opts.inner, opts.mode, dict(opts.inductor))
    scope, code = compat.frame_scope()
    sites = list(find(gm))
    resolved = [fqn.resolve(s, scope) for s in sites]
    homes = [r.home for r in resolved] or [_frame_home(scope)]
    entries = [_get(home, opts) for home in homes]
    edits = [e for s, r, c in zip(sites, resolved, entries, strict=False) if (e := _plan(s, r, c, opts)) is not None]
    compiled = {id(entry): (home.root(), entry) for home, entry in zip(homes, entries, strict=True)}.values()
    for root, entry in compiled:
        _check(root, entry, opts)
    before = gm.print_readable(print_output=False) if opts.dump_dir else ""
    rewrite(gm, edits)
    _install_guards(resolved, entries, opts)
    if opts.dump_dir:
        _dump(opts.dump_dir, sum(sum(entry.frames.values()) for _, entry in compiled), before, gm)
    for root, entry in compiled:
        training = root.training if isinstance(root, nn.Module) else None
        entry.frames[code, id(scope["L"].get("self")), torch.is_grad_enabled(), training, entry.state.phase] += 1
    install_step_hook()
    inner: Callable[..., Any] = compiler(gm, example_inputs)

    def run(*args: Any) -> Any:
        return inner(*args)

    run.lowbit = entries  # type: ignore[attr-defined]  # states live at least as long as the graphs that use them
    return run


def read_options(mode: str | None, options: Mapping[str, Any] | None) -> Options:
    """Validate; anything that is neither ours nor Inductor's is an error with the nearest spelling."""
    given = dict(options or {})
    ours = {k: given.pop(k) for k in list(given) if k in OPTIONS}
    known = compat.inductor_options()
    for key in given:
        if key not in known:
            everything = [*OPTIONS, *known]
            raise PolicyError(
                f"options[{key!r}]: unknown; known: {', '.join(OPTIONS)} and Inductor's{nearest(key, everything)}"
            )
    chosen = mode or ours.get("mode")
    for key, value, choices in (
        ("mode", chosen or "default", compat.modes()),
        ("inner", ours.setdefault("inner", "inductor"), ["inductor", "aot_eager"]),
        ("reference", ours.setdefault("reference", "compiled"), list(IMPLEMENTATIONS)),
        ("kernels", ours.setdefault("kernels", "off"), ["auto", "off"]),
    ):
        if value not in choices:
            hint = nearest(str(value), choices)
            raise PolicyError(f"options[{key!r}]: got {value!r}; known: {', '.join(choices)}{hint}")
    seed = ours.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise PolicyError(f"options['seed']: got {seed!r}, an integer is needed")
    dump = ours.get("dump_dir")
    return Options(
        load_policy(ours.get("policy", "tetrajet_v2")), chosen, ours["inner"], ours["reference"], ours["kernels"], seed,
        None if dump is None else os.fspath(dump), tuple(sorted(given.items())),
    )  # fmt: skip


def _frame_home(scope: dict[str, Any]) -> fqn.Home:
    """The home of a frame without linears: of the outermost model that runs it."""
    here = scope["L"].get("self")
    running = [*([here] if isinstance(here, nn.Module) else []), *compat.stack_modules()]
    return fqn.home_of_root(running[-1]) if running else fqn.Home()


def _get(home: fqn.Home, opts: Options) -> _Compiled:
    key = (opts.policy.id, opts.seed)
    if key not in home.compiled:
        home.compiled[key] = _Compiled(State(opts.policy, opts.seed), {}, Counter())
        root = home.root()
        for model in [m for m in _loads if isinstance(root, nn.Module) and _related(m, root)]:
            home.compiled[key].state.load_state_dict(_loads.pop(model))
    found: _Compiled = home.compiled[key]
    return found


def _related(one: nn.Module, other: nn.Module) -> bool:
    """True where one of two models is the other or holds it."""
    return any(m is other for m in one.modules()) or any(m is one for m in other.modules())


def _plan(site: LinearSite, name: fqn.Resolved, compiled: _Compiled, opts: Options) -> Edit | None:
    """Decide one site, record it, and create its state where it is rewritten."""
    value = site.weight_value
    decision = opts.policy.resolve(name.raw, site.kind)
    if decision.spec is not None and site.obstacle:
        decision = replace(decision, spec=None, reason=site.obstacle)
    if decision.spec is not None and not value.dtype.is_floating_point:
        raise UnsupportedError(
            f"{name.path}: weight of dtype {value.dtype} can't be quantized; float32, bfloat16 and float16 can. "
            f"Add a rule {{match: {name.path!r}, use: keep}}"
        )
    if decision.spec is not None and value.dtype == torch.float64:
        decision = replace(decision, spec=None, reason="float64 weight: low precision would discard what was asked for")
    spec = decision.spec
    if spec is None:
        compiled.records[name.path] = _record(site, name.path, decision, "kept")
        return None
    state = compiled.state.site(
        name.path,
        spec,
        name.live,
        value.device,
        width=site.shape[1],
        transposed=site.stored_in_out ^ site.flipped,
    )
    state.dtype = value.dtype
    now, train = compiled.state.numerics(state), torch.is_grad_enabled()
    now = replace(now, observe=now.observe and train, watch=now.watch and train)
    state.observed |= now.observe
    runs = select.KERNELS if opts.kernels == "auto" and value.device.type == "cuda" else opts.reference
    state.impl = f"{runs} {implementation_hash()} {opts.inner}"
    implementation = select.described(now, state.impl, site.shape[1])
    record = _record(site, name.path, replace(decision, spec=now), implementation)
    beside, problem = _describe(compiled.state, state)
    compiled.records[name.path] = replace(record, state=beside)
    if problem:
        warnings.warn(f"{name.path}: {problem}", LowbitWarning, stacklevel=2)
    return Edit(site, name.path, now, state.impl, state)


def _describe(state: State, site: SiteState) -> tuple[str, str]:
    """What runs beside one linear between its steps, and what should but can't."""
    policy, spec, problem = state.policy, site.spec, ""
    found = [f"amax over {policy.amax.window} steps"] if spec.delayed else []
    if (outliers := spec.outliers) is not None and site.channels is None:
        found.append(f"no outlier channels: {site.width} are too few for a block of them")
    elif outliers is not None and site.channels is not None:
        count, name = site.channels.index.numel(), outliers.operand.format
        found.append(f"{count} of {site.width} channels in {name} from step {outliers.stop}")
        if state.step_number >= outliers.stop and not site.channels.chosen:
            steps = f"training steps {outliers.start} to {outliers.stop}"
            problem = f"no outlier channels, no finite input was seen in {steps}"
            found[-1] = problem
    if policy.oscillation is not None and spec.fprop.b.quantized:
        found.append(f"oscillation {policy.oscillation.action} every {policy.oscillation.period} steps")
    return "; ".join(found), problem


def _record(site: LinearSite, path: str, decision: Decision, implementation: str) -> SiteRecord:
    spec = decision.spec
    gemms = (spec.fprop, spec.dgrad, spec.wgrad) if spec else ()
    fprop, dgrad, wgrad = [f"{g.a.format} x {g.b.format}" for g in gemms] or ["-"] * 3
    reason = "" if spec else decision.reason
    return SiteRecord(path, site.shape, site.kind, decision.rule, fprop, dgrad, wgrad, implementation, reason)


def _pending(root: Any, compiled: _Compiled) -> list[str]:
    """Paths in ``root`` that hold a matrix and weren't seen in a graph yet: they may still turn out to be linears."""
    if not isinstance(root, nn.Module):
        return []
    found = []
    for path, module in root.named_modules():
        for key, value in module.named_parameters(recurse=False):
            if value.dim() >= 2 and not isinstance(module, nn.Embedding):
                found.append(strip_wrappers(path if key == "weight" else f"{path}.{key}".lstrip(".")))
    return [path for path in found if path not in compiled.records]


def _check(root: Any, compiled: _Compiled, opts: Options) -> None:
    """Rules that can't match any more, and a policy that can't quantize anything any more, are errors."""
    policy, records = opts.policy, compiled.records
    pending = _pending(root, compiled)
    if not policy.allow_empty and not any(policy.resolve(path, kind).spec for path in pending for kind in KINDS):
        if not records:
            name = type(root).__name__
            raise PolicyError(f"{name}: no linear found, so the policy quantizes nothing (allow_empty: true permits)")
        if all(r.reason for r in records.values()):
            kept = "; ".join(f"{r.path}: {r.reason}" for r in list(records.values())[:5])
            message = f"the policy quantizes none of {len(records)} linears ({kept}); allow_empty: true permits this"
            raise PolicyError(message)
    messages = policy.unused([(r.path, r.kind) for r in records.values()], pending)
    if messages and policy.strict:
        raise PolicyError("; ".join(messages))
    for message in messages:
        if message not in compiled.told:
            compiled.told.add(message)
            warnings.warn(message, LowbitWarning, stacklevel=2)


def _install_guards(resolved: list[fqn.Resolved], compiled: list[_Compiled], opts: Options) -> None:
    sources = {compat.source_name(r.source): r.source for r in resolved if r.source is not None}
    for source in sources.values():
        compat.guard_identity(source)
    changes = len(boundaries(opts.policy))
    if changes:
        for entry in compiled:
            compat.guard_equals(phases.__name__, entry.state.phase_name)
    linears = sum(len(entry.records) for entry in compiled)
    compat.raise_recompile_limit(256 + 8 * linears * (1 + changes))


def _dump(folder: str, number: int, before: str, gm: GraphModule) -> None:
    target = pathlib.Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    (target / f"graph{number}_before.py").write_text(before)
    (target / f"graph{number}_after.py").write_text(gm.print_readable(print_output=False))


@cache
def implementation_hash() -> str:
    """Hash of the package's numerics sources: part of every op's text, so a changed formula misses every cache."""
    here = pathlib.Path(__file__).parent
    names = ("casts", "formats", "hadamard", "jobs", "linear", "ops", "quantize", "random_bits", "scaling", "spec")
    files = [here / f"{n}.py" for n in names] + sorted((here / "codegen").glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def compiled_models(model: nn.Module) -> list[_Compiled]:
    """Everything compiled for ``model`` (or for the model inside torch.compile's wrapper): as a root itself, as a part
    of one, or as a whole of several."""
    homes = fqn.homes_of(getattr(model, "_orig_mod", model))
    return [entry for home in homes for entry in home.compiled.values()]


def report(model: nn.Module) -> Report:
    """The records, graphs and recompiles of ``model``. Empty if it was never compiled by this backend."""
    result = Report()
    for compiled in compiled_models(model):
        result.records += compiled.records.values()
        result.graphs += sum(compiled.frames.values())
        result.recompiles += sum(n - 1 for n in compiled.frames.values())
    return result


def state(model: nn.Module, policy: str | os.PathLike[str] | Mapping[str, Any] | Policy | None = None) -> State:
    """The runtime state of ``model``, for saving, and for own training loops.

    ``policy`` says which, where the model was compiled under several. Before the first compile there is none: see
    :func:`load_state_dict`.
    """
    found = [c.state for c in compiled_models(model)]
    if policy is not None:
        wanted = load_policy(policy).id
        found = [s for s in found if s.policy.id == wanted]
    if len(found) != 1:
        raise UnsupportedError(
            f"{type(model).__name__} has {len(found)} states here, one is needed: it must have run once, "
            "and under several policies state() needs the policy"
        )
    return found[0]


def load_state_dict(model: nn.Module, saved: dict[str, Any]) -> None:
    """Restore what ``state(model).state_dict()`` gave; before the model has run, it waits for the first compile."""
    if compiled_models(model):
        state(model).load_state_dict(saved)
    else:
        _loads[getattr(model, "_orig_mod", model)] = saved


def step(model: nn.Module, *, learning_rate: float | None = None) -> None:
    """Advance ``model``'s state by one step: for training loops that don't use a torch optimizer.

    ``learning_rate`` of this step is needed where the policy's OsciReset starts at a learning rate (``start_lr``).
    """
    state(model).step(learning_rate=learning_rate)
