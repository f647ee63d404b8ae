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
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from . import compat
from .codegen import IMPLEMENTATIONS
from .errors import LowbitWarning, PolicyError, UnsupportedError, nearest
from .passes import fqn
from .passes.match import LinearSite, find
from .passes.rewrite import Edit, rewrite
from .policy import Decision, Policy
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
    "seed": "seed of stochastic rounding and random signs (default 0)",
    "dump_dir": "folder for the graphs before and after the rewrite",
}


@dataclass(frozen=True)
class Options:
    policy: Policy
    mode: str | None
    inner: str
    reference: str
    seed: int
    dump_dir: str | None
    inductor: tuple[tuple[str, Any], ...]


@dataclass
class _Compiled:
    """What is known of one root model under one policy and seed."""

    state: State
    records: dict[str, SiteRecord]
    frames: Counter[tuple[Any, ...]]
    checked: bool = False


_models: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, int], _Compiled]] = weakref.WeakKeyDictionary()


def lowbit(
    gm: GraphModule, example_inputs: list[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Backend function that torch.compile calls with Dynamo's graph. See :data:`OPTIONS` for the options; Inductor's
    own options are passed on. Raises :class:`PolicyError` for an unknown one."""
    opts = read_options(mode, options)
    scope, code = compat.frame_scope()
    sites = list(find(gm))
    resolved = [fqn.resolve(s, scope) for s in sites]
    root = next((r.root for r in resolved if r.root is not None), None)
    if root is None:
        root = next((m for m in reversed(compat.stack_modules())), None)
    compiled = _get(root, opts)
    edits = [e for s, r in zip(sites, resolved, strict=True) if (e := _plan(s, r, compiled, opts)) is not None]
    before = gm.print_readable(print_output=False) if opts.dump_dir else ""
    rewrite(gm, edits)
    _check(root, compiled, opts)
    _install_guards(resolved, compiled, opts)
    number = sum(compiled.frames.values())
    training = root.training if root is not None else None
    compiled.frames[code, id(scope["L"].get("self")), torch.is_grad_enabled(), training, compiled.state.phase] += 1
    if opts.dump_dir:
        _dump(opts.dump_dir, number, before, gm)
    install_step_hook()
    compiler = compat.inner_compiler(opts.inner, opts.mode, dict(opts.inductor))
    run: Callable[..., Any] = compiler(gm, example_inputs)
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
    ):
        if value not in choices:
            hint = nearest(str(value), choices)
            raise PolicyError(f"options[{key!r}]: got {value!r}; known: {', '.join(choices)}{hint}")
    seed = ours.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise PolicyError(f"options['seed']: got {seed!r}, an integer is needed")
    dump = ours.get("dump_dir")
    return Options(
        load_policy(ours.get("policy", "tetrajet_v2")), chosen, ours["inner"], ours["reference"], seed,
        None if dump is None else os.fspath(dump), tuple(sorted(given.items())),
    )  # fmt: skip


def _get(root: nn.Module | None, opts: Options) -> _Compiled:
    key = (opts.policy.id, opts.seed)
    if root is None:
        return _Compiled(State(None, opts.policy, opts.seed), {}, Counter())
    table = _models.setdefault(root, {})
    if key not in table:
        table[key] = _Compiled(State(root, opts.policy, opts.seed), {}, Counter())
    return table[key]


def _plan(site: LinearSite, name: fqn.Resolved, compiled: _Compiled, opts: Options) -> Edit | None:
    """Decide one site, record it, and create its state where it is rewritten."""
    value = site.weight_value
    decision = opts.policy.resolve(name.path, site.kind)
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
        name.path, spec, name.live, value.device, width=site.shape[1], transposed=site.stored_in_out
    )
    now, train = compiled.state.numerics(state), torch.is_grad_enabled()
    now = replace(now, observe=now.observe and train, watch=now.watch and train)
    state.observed |= now.observe
    state.impl = f"{opts.reference} {implementation_hash()} {opts.inner}"
    record = _record(site, name.path, replace(decision, spec=now), f"reference ({opts.reference})")
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


def _check(root: nn.Module | None, compiled: _Compiled, opts: Options) -> None:
    """Once every nn.Linear of the model has been seen: rules that match nothing, and nothing quantized, are errors."""
    total = sum(isinstance(m, nn.Linear) for m in root.modules()) if root is not None else 0
    if compiled.checked or len(compiled.records) < total:
        return
    compiled.checked = True
    policy = opts.policy
    if not compiled.records and not policy.allow_empty:
        name = type(root).__name__
        raise PolicyError(f"{name}: no linear found, so the policy has nothing to quantize (allow_empty: true permits)")
    if all(r.reason for r in compiled.records.values()) and not policy.allow_empty:
        kept = "; ".join(f"{r.path}: {r.reason}" for r in list(compiled.records.values())[:5])
        count = len(compiled.records)
        raise PolicyError(f"the policy quantizes none of {count} linears ({kept}); allow_empty: true permits this")
    messages = policy.unused([(r.path, r.kind) for r in compiled.records.values()])
    if messages and policy.strict:
        raise PolicyError("; ".join(messages))
    if messages:
        warnings.warn("; ".join(messages), LowbitWarning, stacklevel=2)


def _install_guards(resolved: list[fqn.Resolved], compiled: _Compiled, opts: Options) -> None:
    sources = {compat.source_name(r.source): r.source for r in resolved if r.source is not None}
    for source in sources.values():
        compat.guard_identity(source)
    if boundaries(opts.policy):
        compat.guard_equals(phases.__name__, compiled.state.phase_name)
    compat.raise_recompile_limit(256 + 8 * len(compiled.records) * (1 + len(boundaries(opts.policy))))


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
    return hashlib.sha256(b"".join((here / f"{n}.py").read_bytes() for n in names)).hexdigest()[:12]


def compiled_models(model: nn.Module) -> list[_Compiled]:
    """Everything compiled for ``model`` (or for the model inside torch.compile's wrapper)."""
    inner = getattr(model, "_orig_mod", model)
    return list(_models.get(inner, {}).values())


def report(model: nn.Module) -> Report:
    """The records, graphs and recompiles of ``model``. Empty if it was never compiled by this backend."""
    result = Report()
    for compiled in compiled_models(model):
        result.records += compiled.records.values()
        result.graphs += sum(compiled.frames.values())
        result.recompiles += sum(n - 1 for n in compiled.frames.values())
    return result


def state(model: nn.Module) -> State:
    """The runtime state of ``model``, for saving, loading and own training loops."""
    found = compiled_models(model)
    if len(found) != 1:
        raise UnsupportedError(f"{type(model).__name__} has {len(found)} compiled policies; state() needs exactly one")
    return found[0].state


def step(model: nn.Module, *, learning_rate: float | None = None) -> None:
    """Advance ``model``'s state by one step: for training loops that don't use a torch optimizer.

    ``learning_rate`` of this step is needed where the policy's OsciReset starts at a learning rate (``start_lr``).
    """
    state(model).step(learning_rate=learning_rate)
