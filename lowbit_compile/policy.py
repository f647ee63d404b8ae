"""The policy: which numerics every linear of a model uses, decided by the LAST rule that matches.

These records are what the compiler sees: frozen, hashable, equal by value, with one canonical text whose hash is the
policy's id. How a recipe is written is :mod:`.recipe`'s, files, lines and merging are :mod:`.policy_file`'s.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache

from .errors import PolicyError, nearest
from .recipe import recipe_document, spec_faults
from .schedule import Phase, fault
from .spec import LinearSpec
from .windows import AmaxWindow, Oscillation

KEEP = "keep"  # as a rule's recipe: the linear is left as it is
KINDS = ("linear", "conv1d", "matmul", "addmm")
DEFAULT_AMAX = AmaxWindow()
WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


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
    """Rules in order, phases, state and strictness. Raises :class:`PolicyError` where they have no meaning."""

    rules: tuple[Rule, ...]
    schedule: tuple[Phase, ...] = ()
    amax: AmaxWindow = DEFAULT_AMAX
    oscillation: Oscillation | None = None
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
        for name, part in (("amax", self.amax), ("oscillation", self.oscillation)):
            if part is not None and (problem := part.fault()):
                raise PolicyError(f"{name}: {problem}")

    def resolve(self, path: str, kind: str) -> Decision:
        """The numerics of the linear at module ``path`` whose operation is ``kind``."""
        hits = [i for i, rule in enumerate(self.rules) if matches(rule.match, path, kind)]
        if not hits:
            return Decision(None, None, "", (), "no rule matches")
        *losers, winner = hits
        rule = self.rules[winner]
        return Decision(rule.spec, winner, str(rule), tuple(losers), rule.reason or f"rules[{winner}]: {rule}")

    def unused(self, paths_kinds: Sequence[tuple[str, str]], pending: Sequence[str] = ()) -> list[str]:
        """One message for each rule that matched nothing, or not as many linears as it expects.

        A rule that matches and then loses counts as used; ``optional`` forgives a count of zero only. ``pending`` are
        paths that may still turn out to be linears: a rule that could match one of them isn't judged yet.
        """
        messages = []
        for i, rule in enumerate(self.rules):
            count = sum(matches(rule.match, path, kind) for path, kind in paths_kinds)
            later = any(matches(rule.match, path, kind) for path in pending for kind in KINDS)
            if later or (count == 0 and rule.optional):
                continue
            if rule.expect is not None and count != rule.expect:
                messages.append(f"rules[{i}] {rule}: expects {rule.expect} linears, matched {count}")
            elif count == 0 and rule.expect is None:
                names = [*(path for path, _ in paths_kinds), *pending]
                close = difflib.get_close_matches(rule.match, names, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                messages.append(f"rules[{i}] {rule}: matched none of {len(names)} linears{hint}")
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
    found: dict[str, object] = {
        "version": 1,
        "recipes": {name: recipe_document(spec) for name, spec in sorted(recipes.items())},
        "rules": rules,
        "schedule": [_phase(p) for p in policy.schedule],
        "amax": asdict(policy.amax),
        "strict": policy.strict,
        "allow_empty": policy.allow_empty,
    }
    if policy.oscillation is not None:
        found["oscillation"] = {k: v for k, v in asdict(policy.oscillation).items() if v is not None}
    return found


def _phase(phase: Phase) -> dict[str, object]:
    shown: dict[str, object] = {"from_step": phase.from_step}
    if phase.until_step is not None:
        shown["until_step"] = phase.until_step
    if phase.keep:
        shown |= {"use": KEEP, "observe": phase.observe}
    return shown | dict.fromkeys(phase.high, "bf16")
