"""Reading policies: presets, YAML, TOML, JSON and mappings become one frozen :class:`~lowbit_compile.policy.Policy`.

Three steps: shorthands are expanded in the raw document, pydantic checks keys and types, and the result is merged with
what the document extends. Every error names file, line (YAML and JSON), key path, what was found and what is allowed.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError

from .errors import PolicyError, nearest
from .policy import KEEP, Policy, Rule, pattern_fault
from .recipe import Place, RecipeModel, expand_recipe, freeze_recipe
from .schedule import FileModel, Phase, PhaseModel, fault
from .spec import LinearSpec
from .windows import AmaxModel, AmaxWindow, Oscillation, OscillationModel

SUFFIXES = (".yaml", ".yml", ".toml", ".json")
MAX_BYTES = 1_000_000
MAX_NODES = 100_000  # YAML aliases can make a small file huge


class _Rule(FileModel):
    match: str
    use: str
    reason: str = ""
    optional: bool = False
    expect: Annotated[int, Field(ge=0)] | None = None


class _File(FileModel):
    version: Literal[1]
    extends: list[str] = Field(default_factory=list)
    recipes: dict[str, RecipeModel] = Field(default_factory=dict)
    rules: list[_Rule] = Field(default_factory=list)
    schedule: list[PhaseModel] | None = None
    amax: AmaxModel | None = None
    oscillation: OscillationModel | None = None
    strict: bool | None = None
    allow_empty: bool | None = None


@dataclass
class _Document:
    """One source as it was written: where it came from, its raw value, and the line of every key path."""

    name: str
    raw: Any
    folder: Path
    identity: str = ""
    lines: dict[Place, int] = field(default_factory=dict)

    def error(self, place: Place, problem: str) -> PolicyError:
        """An error at ``place``, cut back to what is really in the document (shorthands have no inner keys)."""
        known: Place = ()
        here = self.raw
        for key in place:
            if isinstance(here, dict):
                if key in ("dgrad", "wgrad") and key not in here and "bwd" in here:
                    key = "bwd"
                found = key in here
            else:
                found = isinstance(here, list) and isinstance(key, int) and key < len(here)
            if not found:
                break
            here, known = here[key], (*known, key)
        line = self.lines.get(known)
        return PolicyError(f"{self.name}{f':{line}' if line else ''}: {_show(known)}: {problem}")

    def uses_bwd(self, place: Place) -> bool:
        """True where ``place`` lies in a recipe that writes ``bwd``."""
        recipe = self.raw["recipes"].get(place[1]) if len(place) > 1 and place[0] == "recipes" else None
        return isinstance(recipe, dict) and "bwd" in recipe


@dataclass
class _Merged:
    """What a document and everything it extends amount to; rules keep their document for error messages."""

    recipes: dict[str, LinearSpec] = field(default_factory=dict)
    rules: list[tuple[_Rule, _Document, int]] = field(default_factory=list)
    schedule: tuple[list[PhaseModel], _Document] | None = None
    amax: AmaxWindow | None = None
    oscillation: Oscillation | None = None
    strict: bool | None = None
    allow_empty: bool | None = None


def preset_names() -> tuple[str, ...]:
    """Names of the presets shipped with the package, sorted."""
    folder = resources.files(__package__) / "presets"
    return tuple(sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")))


def load_policy(source: str | os.PathLike[str] | Mapping[str, Any] | Policy) -> Policy:
    """The policy that ``source`` describes: a preset's name, a path, a mapping with a file's keys, or a policy.

    Raises :class:`PolicyError` for everything that is wrong with it.
    """
    if isinstance(source, Policy):
        return source
    if isinstance(source, Mapping):
        document = _Document("<mapping>", _plain(source), Path.cwd())
    elif isinstance(source, str | os.PathLike):
        document = _find(source, Path.cwd())
    else:
        raise PolicyError(f"a policy is a preset name, a path, a mapping or a Policy, not {type(source).__name__}")
    return _freeze(_merge(document, ()), document)


def parse_policy(text: str, name: str = "<text>") -> Policy:
    """The policy in ``text`` (YAML or JSON), such as :attr:`Policy.text` taken from a checkpoint."""
    document = _read(name, text.encode(), ".yaml", Path.cwd())
    return _freeze(_merge(document, ()), document)


# ---- documents


def _find(source: str | os.PathLike[str], folder: Path) -> _Document:
    """A preset where ``source`` is a preset's name, else the file at that path relative to ``folder``."""
    presets = preset_names()
    if isinstance(source, str) and source in presets:
        data = (resources.files(__package__) / "presets" / f"{source}.yaml").read_bytes()
        return _read(f"presets/{source}.yaml", data, ".yaml", folder)
    path = folder / source
    if path.suffix not in SUFFIXES:
        if isinstance(source, str) and not path.exists():
            known = ", ".join(presets)
            raise PolicyError(f"no preset or file {source!r}; presets: {known}{nearest(source, presets)}")
        raise PolicyError(f"{source}: a policy file ends in {', '.join(SUFFIXES)}, found {path.suffix!r}")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise PolicyError(f"{source}: can't be read: {error}") from None
    return replace(_read(str(source), data, path.suffix, path.parent), identity=str(path.resolve()))


def _read(name: str, data: bytes, suffix: str, folder: Path) -> _Document:
    if len(data) > MAX_BYTES:
        raise PolicyError(f"{name}: more than {MAX_BYTES} bytes is not a policy")
    try:
        text = data.decode()
        if suffix == ".toml":
            return _Document(name, tomllib.loads(text), folder, name)
        raw = json.loads(text) if suffix == ".json" else None
        node = yaml.compose(text.replace("\t", " ") if raw is not None else text, Loader=yaml.SafeLoader)
        lines: dict[Place, int] = {}
        if node is not None:
            _map_lines(name, node, (), lines)
        raw = yaml.safe_load(text) if raw is None else raw
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise PolicyError(f"{name}{line}: not YAML: {error.problem or error.context}") from None
    except json.JSONDecodeError as error:
        raise PolicyError(f"{name}:{error.lineno}: not JSON: {error.msg}") from None
    except PolicyError:
        raise
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        kind = suffix[1:].upper().replace("YML", "YAML")
        raise PolicyError(f"{name}: not {kind}: {str(error) or 'nested too deeply'}") from None
    return _Document(name, _plain(raw), folder, name, lines)


def _map_lines(name: str, node: yaml.Node, place: Place, lines: dict[Place, int]) -> None:
    """Notes the line of every key path; refuses what YAML would silently accept: duplicate keys and alias bombs."""
    lines.setdefault(place, node.start_mark.line + 1)
    if len(lines) > MAX_NODES or len(place) > 50:
        raise PolicyError(f"{name}:{node.start_mark.line + 1}: too many or too deep values for a policy; drop aliases")
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*place, str(key.value))
            line = key.start_mark.line + 1
            if key.tag != "tag:yaml.org,2002:str":
                raise PolicyError(f"{name}:{line}: {_show(inner)}: keys must be text; merge keys are refused")
            if inner in lines:
                raise PolicyError(f"{name}:{line}: {_show(inner)}: the key is there twice, also in line {lines[inner]}")
            lines[inner] = line
            _map_lines(name, value, inner, lines)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            _map_lines(name, value, (*place, i), lines)


def _plain(value: Any) -> Any:
    """The same with ordinary dicts and lists, so that a Python mapping and a file read alike."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _show(place: Place) -> str:
    text = "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in place)
    return text.removeprefix(".") or "top level"


# ---- shorthands and validation


def _nulls(value: Any, place: Place) -> Iterator[Place]:
    if value is None:
        yield place
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _nulls(inner, (*place, key))


def _expand(document: _Document) -> dict[str, Any]:
    """The document with recipe shorthands written out, for the models to check."""
    raw = document.raw
    if not isinstance(raw, dict):
        raise document.error((), f"a policy is a mapping of keys, found {type(raw).__name__}")
    for place in _nulls(raw, ()):
        raise document.error(place, "has no value; give one or drop the key")
    recipes = raw.get("recipes")
    if not isinstance(recipes, dict):
        return raw
    expanded = {}
    for name, recipe in recipes.items():
        try:
            expanded[name] = expand_recipe(recipe)
        except PolicyError as error:
            raise document.error(("recipes", name, "bwd"), str(error)) from None
    return raw | {"recipes": expanded}


def _validate(document: _Document) -> _File:
    try:
        return _File.model_validate(_expand(document))
    except ValidationError as errors:
        found = [str(_explain(document, e)) for e in errors.errors(include_url=False)]
        raise PolicyError("\n".join(dict.fromkeys(found))) from None


def _explain(document: _Document, error: Any) -> PolicyError:
    """A pydantic error in this package's words."""
    place: Place = tuple(error["loc"])
    allowed = _keys_at(place[:-1])
    if len(place) == 3 and place[0] == "recipes":
        allowed = (*allowed, "bwd")
    elif len(place) == 4 and place[2] != "fprop" and document.uses_bwd(place):
        allowed = ("g", "w", "x")
    if error["type"] == "extra_forbidden":
        key = str(place[-1])
        return document.error(place, f"unknown key {key!r}; allowed: {', '.join(allowed)}{nearest(key, allowed)}")
    if error["type"] == "missing":
        return document.error(place[:-1], f"required key {place[-1]!r} is missing; allowed: {', '.join(allowed)}")
    value = error["input"]
    if error["type"] == "literal_error":
        expected = error["ctx"]["expected"]
        choices = re.findall(r"'([^']*)'", expected) or re.findall(r"\d+", expected)
        hint = nearest(value, choices) if isinstance(value, str) else ""
        return document.error(place, f"found {value!r}; allowed: {', '.join(choices)}{hint}")
    if error["type"] == "model_type":
        keys = ", ".join(_keys_at(place))
        return document.error(place, f"found {value!r}; allowed: a mapping with {keys}, or a shorthand")
    return document.error(place, f"found {value!r} ({type(value).__name__}); {error['msg'].removeprefix('Input ')}")


def _keys_at(place: Place) -> tuple[str, ...]:
    """The keys that the model at ``place`` accepts."""
    kind: Any = _File
    for key in place:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            kind = kind.model_fields[str(key)].annotation if str(key) in kind.model_fields else None
            kind = get_args(kind)[0] if type(None) in get_args(kind) else kind  # Optional[X] -> X
        else:
            kind = (get_args(kind) or (None,))[-1]  # the value type of a list or dict
    return tuple(kind.model_fields) if isinstance(kind, type) and issubclass(kind, BaseModel) else ()


# ---- conversion


def _merge(document: _Document, chain: tuple[str, ...]) -> _Merged:
    """``document`` on top of what it extends: recipes by name, rules appended, other keys replaced whole."""
    if document.identity in chain:
        raise document.error(("extends",), f"extends itself: {' -> '.join((*chain, document.identity))}")
    model = _validate(document)
    merged = _Merged()
    for i, parent in enumerate(model.extends):
        try:
            found = _find(parent, document.folder)
        except PolicyError as error:
            if parent in preset_names() or (document.folder / parent).exists():
                raise
            raise document.error(("extends", i), str(error)) from None
        _overlay(merged, _merge(found, (*chain, document.identity)))
    if KEEP in model.recipes:
        raise document.error(("recipes", KEEP), "'keep' is reserved for rules that leave a linear as it is")
    own = _Merged({name: freeze_recipe(name, recipe, document.error) for name, recipe in model.recipes.items()})
    own.rules = [(rule, document, i) for i, rule in enumerate(model.rules)]
    own.schedule = None if model.schedule is None else (model.schedule, document)
    own.amax = None if model.amax is None else model.amax.freeze()
    if model.oscillation is not None:
        if problem := model.oscillation.fault():
            raise document.error(("oscillation",), problem)
        own.oscillation = model.oscillation.freeze()
    own.strict, own.allow_empty = model.strict, model.allow_empty
    _overlay(merged, own)
    return merged


def _overlay(under: _Merged, over: _Merged) -> None:
    under.recipes |= over.recipes
    under.rules += over.rules
    under.schedule = over.schedule or under.schedule
    under.amax = over.amax or under.amax
    under.oscillation = over.oscillation or under.oscillation
    under.strict = under.strict if over.strict is None else over.strict
    under.allow_empty = under.allow_empty if over.allow_empty is None else over.allow_empty


def _freeze(merged: _Merged, document: _Document) -> Policy:
    rules = tuple(_rule(merged, *entry) for entry in merged.rules)
    if not merged.allow_empty and all(rule.spec is None for rule in rules):
        raise document.error(("rules",), "no rule quantizes anything; add one, or set allow_empty: true")
    phases: tuple[Phase, ...] = ()
    if merged.schedule is not None:
        models, source = merged.schedule
        for i, model in enumerate(models):
            if problem := model.fault():
                raise source.error(("schedule", i), problem)
        phases = tuple(model.freeze() for model in models)
        if (wrong := fault(phases)) is not None:
            raise source.error(("schedule", wrong[0]), wrong[1])
        for i, phase in enumerate(phases):
            if phase.observe and not any(rule.spec and rule.spec.delayed for rule in rules):
                raise source.error(("schedule", i, "observe"), "has no effect: no rule uses delayed scaling")
    return Policy(
        rules,
        phases,
        merged.amax or AmaxWindow(),
        merged.oscillation,
        merged.strict is not False,
        bool(merged.allow_empty),
    )


def _rule(merged: _Merged, model: _Rule, document: _Document, index: int) -> Rule:
    if problem := pattern_fault(model.match):
        raise document.error(("rules", index, "match"), f"found {model.match!r}: {problem}")
    spec, name = None, model.use
    if name != KEEP:
        spec = merged.recipes.get(name)
        if spec is None and name in preset_names():  # a preset's recipe needs no extends, which would bring its rules
            spec = _merge(_find(name, document.folder), ()).recipes[name]
        if spec is None:
            known = (KEEP, *dict.fromkeys((*merged.recipes, *preset_names())))
            allowed = ", ".join(known)
            raise document.error(("rules", index, "use"), f"found {name!r}; allowed: {allowed}{nearest(name, known)}")
        if not spec.quantized:
            spec, name = None, KEEP
    return Rule(model.match, spec, name, model.reason, model.optional, model.expect)
