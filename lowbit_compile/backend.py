"""The torch.compile entry: ``torch.compile(model, backend="lowbit", options={"policy": ...})``.

Runs on every Dynamo compile, compile-cache hit or not, and is the only place with side effects: it matches, decides,
creates state, rewrites, installs guards, then hands the graph to Inductor. Registered through the entry-point group
``torch_dynamo_backends`` only; a second registration by decorator would collide with it.
"""

from __future__ import annotations

import hashlib
import pathlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from . import compat, registry
from .codegen import select
from .errors import LowbitWarning, PolicyError, UnsupportedError
from .options import Options, read_options
from .passes import fqn
from .passes.match import LinearSite, find
from .passes.rewrite import Edit, rewrite
from .policy import KINDS, Decision, strip_wrappers
from .registry import Compiled
from .report import SiteRecord
from .runtime import phases
from .runtime.site import SiteState
from .runtime.state import State, install_step_hook
from .schedule import boundaries


def lowbit(
    gm: GraphModule, example_inputs: list[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Backend function that torch.compile calls with Dynamo's graph. Options: :data:`.options.OPTIONS`; Inductor's
    own options are passed on. Raises :class:`PolicyError` for an unknown one."""
    opts = read_options(mode, options)
    compiler = compat.inner_compiler(opts.inner, opts.mode, dict(opts.inductor))
    scope, code = compat.frame_scope()
    sites = list(find(gm))
    resolved = [fqn.resolve(s, scope) for s in sites]
    homes = [r.home for r in resolved] or [_frame_home(scope)]
    entries = [registry.get(home, opts.policy, opts.seed) for home in homes]
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


def _frame_home(scope: dict[str, Any]) -> fqn.Home:
    """The home of a frame without linears: of the outermost model that runs it."""
    here = scope["L"].get("self")
    running = [*([here] if isinstance(here, nn.Module) else []), *compat.stack_modules()]
    return fqn.home_of_root(running[-1]) if running else fqn.Home()


def _plan(site: LinearSite, name: fqn.Resolved, compiled: Compiled, opts: Options) -> Edit | None:
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


def _pending(root: Any, compiled: Compiled) -> list[str]:
    """Paths in ``root`` that hold a matrix and weren't seen in a graph yet: they may still turn out to be linears."""
    if not isinstance(root, nn.Module):
        return []
    found = []
    for path, module in root.named_modules():
        for key, value in module.named_parameters(recurse=False):
            if value.dim() >= 2 and not isinstance(module, nn.Embedding):
                found.append(strip_wrappers(path if key == "weight" else f"{path}.{key}".lstrip(".")))
    return [path for path in found if path not in compiled.records]


def _check(root: Any, compiled: Compiled, opts: Options) -> None:
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


def _install_guards(resolved: list[fqn.Resolved], compiled: list[Compiled], opts: Options) -> None:
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
