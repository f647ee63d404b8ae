"""The policy: which numerics every linear of a model uses, decided by the LAST rule that matches.

These records are what the compiler sees: frozen, hashable, equal by value, with one canonical text whose hash is the
policy's id. The models beside them say how a recipe is written; files, lines and merging are :mod:`.policy_file`'s.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field

from .errors import PolicyError, nearest
from .formats import ELEMENT_FORMATS
from .schedule import FileModel, Phase, fault
from .spec import GEMMS, GemmSpec, LinearSpec, OperandSpec

KEEP = "keep"  # as a rule's recipe: the linear is left as it is
KINDS = ("linear", "conv1d", "matmul", "addmm")
WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
ALGORITHMS = ("max", "most_recent", "ema")
CHOICES: dict[str, tuple[object, ...]] = {
    "scale": ("float32", "e8m0", "e4m3fn"),
    "rule": ("nearest", "ceil", "floor", "rceil", "rceil_satfinite", "even"),
    "scaling": ("current", "delayed"),
    "rounding": ("rne", "rna", "stochastic"),
    "hadamard": (0, 16, 32, 64, 128),
    "source": ("original", "dequantized"),
}
FILE_KEYS = {"rule": "scale_rule"}  # an OperandSpec field whose policy-file key differs

_TENSOR, _ROW = (-1, -1), (1, -1)
_MX = OperandSpec("e4m3fn", block=(1, 32), scale="e8m0", rule="rceil")
_NVFP4 = OperandSpec("e2m1", block=(1, 16), scale="e4m3fn", outer=_TENSOR)
_HIF8 = OperandSpec("hif8", target=15.0, rounding="rna")
# What an operand may be called in a file. A bare element format means one float32 scale for the whole tensor.
OPERANDS: dict[str, OperandSpec] = {
    **{name: OperandSpec(name, rounding=f.ties) for name, f in ELEMENT_FORMATS.items()},
    "bf16": OperandSpec(),
    "fp8_tensor": OperandSpec("e4m3fn"),
    "fp8_row": OperandSpec("e4m3fn", block=_ROW),
    "e5m2_tensor": OperandSpec("e5m2"),
    "mxfp8": _MX,
    "mxfp4": replace(_MX, format="e2m1"),
    "nvfp4": _NVFP4,
    "nvfp4_2d": replace(_NVFP4, block=(16, 16)),
    "nvfp4_double": replace(_NVFP4, outer=(1, 128)),
    "hif8": _HIF8,
    "hif8_grad": replace(_HIF8, target=224.0),
    "int8_row": OperandSpec("int8", block=_ROW),
    "int4_row": OperandSpec("int4", block=_ROW),
}


_Pair = Annotated[list[int], Field(min_length=2, max_length=2)]


class OperandModel(FileModel):
    """An operand as a policy file writes it: a name of ``OPERANDS`` or an element format, and what differs from it."""

    format: str
    block: _Pair | None = None
    scale: Literal["float32", "e8m0", "e4m3fn"] | None = None
    outer: _Pair | None = None
    scale_rule: Literal["nearest", "ceil", "floor", "rceil", "rceil_satfinite", "even"] | None = None
    scaling: Literal["current", "delayed"] | None = None
    target: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    rounding: Literal["rne", "rna", "stochastic"] | None = None
    hadamard: Literal[0, 16, 32, 64, 128] | None = None
    source: Literal["original", "dequantized"] | None = None
    four_over_six: bool | None = None


class _Fprop(FileModel):
    x: OperandModel
    w: OperandModel


class _Dgrad(FileModel):
    g: OperandModel
    w: OperandModel


class _Wgrad(FileModel):
    g: OperandModel
    x: OperandModel


class RecipeModel(FileModel):
    """A recipe as a policy file writes it, after :func:`expand_recipe`."""

    fprop: _Fprop
    dgrad: _Dgrad
    wgrad: _Wgrad


def expand_recipe(recipe: Any) -> Any:  # noqa: C901  (one branch a shorthand)
    """A raw recipe with its shorthands written out: a name for all operands, ``bwd``, ``same``, a name for an operand.

    Anything else is left as it is, for the checks that follow. Raises :class:`PolicyError` where ``bwd`` competes.
    """
    if isinstance(recipe, str):
        recipe = {"fprop": recipe, "bwd": recipe}
    if not isinstance(recipe, dict):
        return recipe
    gemms = dict(recipe)
    if "bwd" in gemms:
        if both := [g for g in ("dgrad", "wgrad") if g in gemms]:
            raise PolicyError(f"bwd stands for dgrad and wgrad; drop it or {both[0]}")
        bwd = gemms.pop("bwd")
        for gemm, other in (("dgrad", "x"), ("wgrad", "w")):
            gemms[gemm] = {k: v for k, v in bwd.items() if k != other} if isinstance(bwd, dict) else bwd
    if isinstance(gemms.get("fprop"), str):
        gemms["fprop"] = dict.fromkeys(GEMMS["fprop"], gemms["fprop"])
    fprop = gemms.get("fprop")
    for gemm, operands in gemms.items():
        if operands == "same" and gemm in GEMMS and isinstance(fprop, dict):
            sources = {k: "x" if k == "g" else k for k in GEMMS[gemm]}
            operands = {k: fprop[source] for k, source in sources.items() if source in fprop}
        elif isinstance(operands, str) and gemm in GEMMS:
            operands = dict.fromkeys(GEMMS[gemm], operands)
        if isinstance(operands, dict):
            operands = {k: {"format": v} if isinstance(v, str) else v for k, v in operands.items()}
        gemms[gemm] = operands
    return gemms


@lru_cache(maxsize=65536)
def strip_wrappers(path: str) -> str:
    """``path`` without the segments that torch.compile, FSDP, DDP and checkpointing add."""
    return ".".join(s for s in path.split(".") if s not in WRAPPERS)


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern[3:] if pattern.startswith("re:") else fnmatch.translate(pattern))


def matches(pattern: str, path: str, kind: str) -> bool:
    """True where a rule's ``match`` selects the linear at ``path``: the only matcher there is.

    Args:
        pattern: a glob (``*`` crosses dots), ``re:`` and a regex for the whole path, or ``type:`` and one of ``KINDS``.
        path: module path; it matches as it is and without wrapper segments.
        kind: operation, one of ``KINDS``.
    """
    if pattern.startswith("type:"):
        return pattern[5:] == kind
    return any(_compiled(pattern).fullmatch(name) for name in (path, strip_wrappers(path)))


def pattern_fault(pattern: str) -> str:
    """Why ``pattern`` can't be used, or an empty string."""
    if pattern.startswith("type:") and pattern[5:] not in KINDS:
        return f"unknown operation; allowed: type:{', type:'.join(KINDS)}{nearest(pattern[5:], KINDS)}"
    try:
        _compiled(pattern)
    except re.error as error:
        return f"not a regular expression: {error}"
    return "" if pattern else "is empty; allowed: a glob, re:REGEX or type:OPERATION"


def spec_faults(spec: LinearSpec) -> Iterator[tuple[str, str]]:
    """Every reason why ``spec`` has no meaning, as (place such as ``wgrad.g.rounding``, message)."""
    for gemm, names in GEMMS.items():
        pair: GemmSpec = getattr(spec, gemm)
        for name, operand in zip(names, (pair.a, pair.b), strict=True):
            for key, message in _operand_faults(operand):
                yield f"{gemm}.{name}.{key}", message
            if gemm == "fprop" and operand.rounding == "stochastic":
                yield f"{gemm}.{name}.rounding", "stochastic rounding in fprop diverges; allowed in fprop: rne, rna"
            if operand.source == "dequantized":
                used = {("dgrad", "w"): spec.fprop.b, ("wgrad", "x"): spec.fprop.a}.get((gemm, name))
                if used is None:
                    yield f"{gemm}.{name}.source", "dequantized is for dgrad's w and wgrad's x only"
                elif not used.quantized:
                    yield f"{gemm}.{name}.source", f"dequantized has no effect: fprop's {name} is not quantized"
        if pair.a.hadamard != pair.b.hadamard:
            a, b = (f"{n} has {o.hadamard}" for n, o in zip(names, (pair.a, pair.b), strict=True))
            yield gemm, f"hadamard must be equal on both operands, or it doesn't cancel: {a}, {b}"
    if spec.delayed and not spec.observe:
        yield "observe", "must be True where an operand has delayed scaling"


def _operand_faults(operand: OperandSpec) -> Iterator[tuple[str, str]]:  # noqa: C901  (a list of checks)
    if not operand.quantized:
        if replace(operand, source="original") != OperandSpec():
            yield "format", "bf16 is not quantized: of the other keys only source has an effect"
        return
    if operand.format not in ELEMENT_FORMATS:
        yield "format", f"{operand.format!r} can't hold elements; allowed: {', '.join(ELEMENT_FORMATS)}"
        return
    for field, allowed in CHOICES.items():
        if getattr(operand, field) not in allowed:
            shown = ", ".join(map(str, allowed))
            yield FILE_KEYS.get(field, field), f"found {getattr(operand, field)!r}; allowed: {shown}"
    if any(n != -1 and n < 1 for n in operand.block):
        yield "block", f"found {list(operand.block)}; allowed: two numbers, each >= 1 or -1 for the whole axis"
    if not 0 <= operand.target <= ELEMENT_FORMATS[operand.format].max:
        yield "target", f"{operand.target} is not within 0 and {operand.format}'s maximum"
    if operand.scale == "float32" and operand.rule != "nearest":
        yield "scale_rule", f"{operand.rule} has no effect: a float32 scale is not rounded"
    if operand.scaling == "delayed" and (operand.block != _TENSOR or operand.outer != (0, 0)):
        yield "scaling", "delayed needs one scale for the whole tensor: block [-1, -1], no outer"
    if operand.four_over_six and (operand.format, operand.scale) != ("e2m1", "e4m3fn"):
        yield "four_over_six", "is defined for e2m1 elements with e4m3fn scales only"
    if operand.outer != (0, 0):
        if operand.scale != "e4m3fn":
            yield "outer", "a second-level scale needs scale: e4m3fn"
        axes = zip(operand.outer, operand.block, strict=True)
        if not all(o == -1 or (o > 0 and b > 0 and o % b == 0) for o, b in axes):
            yield "outer", f"{list(operand.outer)} is not a whole number of blocks {list(operand.block)} on each axis"


@dataclass(frozen=True)
class AmaxWindow:
    """Runtime state of delayed scaling: ``window`` steps, how they become one amax, and bits of headroom."""

    window: int = 64
    algorithm: str = "max"
    margin: int = 0


@dataclass(frozen=True)
class Rule:
    """What the linears that ``match`` get.

    Fields:
        match: see :func:`matches`.
        spec: the numerics, None = keep in high precision.
        recipe: the name under which the file knows ``spec``; ``keep`` where it is None.
        reason: why, for reports.
        optional: the rule may match nothing.
        expect: how many linears it must match, None = any number.
    """

    match: str
    spec: LinearSpec | None = None
    recipe: str = KEEP
    reason: str = ""
    optional: bool = False
    expect: int | None = None

    def __str__(self) -> str:
        return f"{self.match!r} -> {self.recipe}"


@dataclass(frozen=True)
class Decision:
    """The outcome for one linear: its numerics (None = keep), the rule that won, those it beat, and why."""

    spec: LinearSpec | None
    rule_index: int | None
    rule: str
    losers: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Policy:
    """Rules in order, phases, amax window and strictness. Raises :class:`PolicyError` where they have no meaning."""

    rules: tuple[Rule, ...]
    schedule: tuple[Phase, ...] = ()
    amax: AmaxWindow = AmaxWindow()
    strict: bool = True
    allow_empty: bool = False

    def __post_init__(self) -> None:
        recipes: dict[str, LinearSpec | None] = {KEEP: None}
        for i, rule in enumerate(self.rules):
            if problem := pattern_fault(rule.match):
                raise PolicyError(f"rules[{i}].match: found {rule.match!r}: {problem}")
            for place, problem in spec_faults(rule.spec or LinearSpec()):
                raise PolicyError(f"rules[{i}].spec.{place}: {problem}")
            if recipes.setdefault(rule.recipe, rule.spec) != rule.spec:
                raise PolicyError(f"rules[{i}].recipe: {rule.recipe!r} already names other numerics")
        if (wrong := fault(self.schedule)) is not None:
            raise PolicyError(f"schedule[{wrong[0]}]: {wrong[1]}")
        amax = self.amax
        if amax.window < 1 or amax.margin < 0 or amax.algorithm not in ALGORITHMS:
            raise PolicyError(f"amax: {amax} is out of range; algorithm is one of {', '.join(ALGORITHMS)}")

    def resolve(self, path: str, kind: str) -> Decision:
        """The numerics of the linear at module ``path`` whose operation is ``kind``."""
        hits = [i for i, rule in enumerate(self.rules) if matches(rule.match, path, kind)]
        if not hits:
            return Decision(None, None, "", (), "no rule matches")
        *losers, winner = hits
        rule = self.rules[winner]
        return Decision(rule.spec, winner, str(rule), tuple(losers), rule.reason or f"rules[{winner}]: {rule}")

    def unused(self, paths_kinds: Sequence[tuple[str, str]]) -> list[str]:
        """One message for each rule that matched nothing, or not as many linears as it expects.

        A rule that matches and then loses counts as used; ``optional`` forgives a count of zero only.
        """
        messages = []
        for i, rule in enumerate(self.rules):
            count = sum(matches(rule.match, path, kind) for path, kind in paths_kinds)
            if count == 0 and rule.optional:
                continue
            if rule.expect is not None and count != rule.expect:
                messages.append(f"rules[{i}] {rule}: expects {rule.expect} linears, matched {count}")
            elif count == 0 and rule.expect is None:
                close = difflib.get_close_matches(rule.match, [path for path, _ in paths_kinds], n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                messages.append(f"rules[{i}] {rule}: matched none of {len(paths_kinds)} linears{hint}")
        return messages

    @cached_property
    def text(self) -> str:
        """Canonical JSON of the resolved policy: no shorthand, no ``extends``; it loads back to an equal policy."""
        return json.dumps(_document(self), indent=1) + "\n"

    @cached_property
    def id(self) -> str:
        """First 16 hex digits of the SHA-256 of :attr:`text`."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def _document(policy: Policy) -> dict[str, object]:
    recipes = {rule.recipe: rule.spec for rule in policy.rules if rule.spec is not None}
    rules: list[dict[str, object]] = []
    for r in policy.rules:
        options: dict[str, object] = {"reason": r.reason or None, "optional": r.optional or None, "expect": r.expect}
        rules.append({"match": r.match, "use": r.recipe} | {k: v for k, v in options.items() if v is not None})
    return {
        "version": 1,
        "recipes": {name: _recipe(spec) for name, spec in sorted(recipes.items())},
        "rules": rules,
        "schedule": [_phase(p) for p in policy.schedule],
        "amax": {"window": policy.amax.window, "algorithm": policy.amax.algorithm, "margin": policy.amax.margin},
        "strict": policy.strict,
        "allow_empty": policy.allow_empty,
    }


def _recipe(spec: LinearSpec) -> dict[str, object]:
    gemms = {gemm: getattr(spec, gemm) for gemm in GEMMS}
    return {g: {GEMMS[g][0]: _operand(s.a), GEMMS[g][1]: _operand(s.b)} for g, s in gemms.items()}


def _operand(operand: OperandSpec) -> dict[str, object]:
    if not operand.quantized:
        return {"format": operand.format, "source": operand.source}
    return {
        "format": operand.format,
        "block": list(operand.block),
        "scale": operand.scale,
        "outer": list(operand.outer),
        "scale_rule": operand.rule,
        "target": operand.target,
        "scaling": operand.scaling,
        "rounding": operand.rounding,
        "hadamard": operand.hadamard,
        "source": operand.source,
        "four_over_six": operand.four_over_six,
    }


def _phase(phase: Phase) -> dict[str, object]:
    shown: dict[str, object] = {"from_step": phase.from_step}
    if phase.until_step is not None:
        shown["until_step"] = phase.until_step
    if phase.keep:
        shown |= {"use": KEEP, "observe": phase.observe}
    return shown | dict.fromkeys(phase.high, "bf16")
