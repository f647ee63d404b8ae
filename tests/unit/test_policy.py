"""Policies: which rule wins, what files may say, how errors read, and what a schedule does."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit_compile.errors import PolicyError
from lowbit_compile.policy import Policy, Rule, matches
from lowbit_compile.policy_file import load_policy, parse_policy, preset_names
from lowbit_compile.recipe import CHOICES, FILE_KEYS, OPERANDS, OperandModel
from lowbit_compile.schedule import Phase
from lowbit_compile.spec import GEMMS, GemmSpec, LinearSpec, OperandSpec, Outliers, parse_linear
from lowbit_compile.windows import Oscillation

LINEARS = [f"model.layers.{i}.{n}" for i in range(12) for n in ("q_proj", "mlp.up")] + ["lm_head"]
BASE: dict[str, Any] = {"version": 1, "recipes": {"a": "mxfp8"}, "rules": [{"match": "*", "use": "a"}]}
SR16: dict[str, Any] = {"rounding": "stochastic", "hadamard": 16}


def fails(source: Any, *parts: str) -> str:
    """Loads ``source`` (a mapping, or YAML text) and checks that the error has all ``parts``."""
    with pytest.raises(PolicyError) as caught:
        parse_policy(source, "p.yaml") if isinstance(source, str) else load_policy(source)
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    return message


@pytest.mark.parametrize("head_last", [True, False])
def test_last_rule_wins_whole_and_losers_are_listed(head_last: bool) -> None:
    rules = [{"match": "*", "use": "a"}, {"match": "*head", "use": "keep", "reason": "head"}]
    policy = load_policy(BASE | {"rules": rules if head_last else rules[::-1]})
    decision = policy.resolve("lm_head", "linear")
    assert decision.losers == (0,)
    assert decision.rule_index == 1
    assert (decision.spec is None) == head_last
    assert (decision.reason == "head") == head_last
    assert policy.resolve("other", "linear").losers == ()


def test_no_rule_keeps() -> None:
    decision = load_policy(BASE | {"rules": [{"match": "x", "use": "a"}]}).resolve("y", "linear")
    assert (decision.spec, decision.rule_index, decision.reason) == (None, None, "no rule matches")


def test_glob_regex_and_exact_names_select_equal_sets() -> None:
    def selected(patterns: list[str]) -> set[str]:
        return {p for p in LINEARS if any(matches(m, p, "linear") for m in patterns)}

    exact = [f"model.layers.{i}.mlp.up" for i in range(12)]
    assert selected(["*.mlp.up"]) == selected([r"re:.*\.mlp\.up"]) == selected(exact) == set(exact)
    assert selected(["*layers.1*"]) == selected([r"re:model\.layers\.1\d?\..*"])
    assert selected(["re:layers"]) == set()  # the whole path, not a part of it
    assert selected(["type:linear"]) == set(LINEARS)
    assert selected(["type:matmul"]) == set()


@pytest.mark.parametrize("wrap", ["_orig_mod.{}", "module.{}", "a._fsdp_wrapped_module.{}._checkpoint_wrapped_module"])
def test_wrappers_are_stripped_and_the_raw_name_matches_too(wrap: str) -> None:
    raw = wrap.format("b.c")
    clean = "a.b.c" if raw.startswith("a.") else "b.c"
    assert matches(clean, raw, "linear")
    assert matches(raw, raw, "linear")


NAMES = st.lists(st.text("ab0_", min_size=1, max_size=4), min_size=1, max_size=5).map(".".join)


@given(NAMES, st.data())
def test_a_glob_made_from_a_path_matches_it(path: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(path)))
    stop = data.draw(st.integers(start, len(path)))
    assert matches(path[:start] + "*" + path[stop:], path, "linear")
    assert matches("re:" + re.escape(path), f"module.{path}", "linear")


@given(NAMES, NAMES)
def test_a_plain_pattern_matches_only_itself(pattern: str, path: str) -> None:
    assert matches(pattern, path, "linear") == (pattern == path)


def test_unused_rules() -> None:
    rules = [
        {"match": "*", "use": "a"},
        {"match": "lm_haed", "use": "keep"},
        {"match": "absent", "use": "keep", "optional": True},
        {"match": "*.mlp.up", "use": "keep", "expect": 11},
        {"match": "absent", "use": "keep", "expect": 0},
        {"match": "*q_proj", "use": "keep", "expect": 12},
    ]
    first, second = load_policy(BASE | {"rules": rules}).unused([(p, "linear") for p in LINEARS])
    assert "rules[1]" in first
    assert "did you mean 'lm_head'?" in first
    assert "rules[3]" in second
    assert "expects 11 linears, matched 12" in second


@pytest.mark.parametrize("name", preset_names())
def test_preset_loads_and_its_text_round_trips(name: str, tmp_path: Path) -> None:
    policy = load_policy(name)
    again = parse_policy(policy.text)
    (tmp_path / "p.json").write_text(policy.text)
    assert policy == again == load_policy(json.loads(policy.text)) == load_policy(tmp_path / "p.json")
    assert policy == pickle.loads(pickle.dumps(policy))
    assert (policy.text, policy.id, hash(policy)) == (again.text, again.id, hash(again))
    for rule in policy.rules:
        assert rule.spec is None or (parse_linear(str(rule.spec)) == rule.spec and rule.spec.quantized)
    assert len({load_policy(n).id for n in preset_names()}) == len(preset_names())
    assert policy.resolve("model.lm_head", "linear").spec is None


def test_presets_hold_what_their_papers_say() -> None:
    def spec(name: str) -> LinearSpec:
        found = load_policy(name).resolve("layers.0.fc", "linear").spec
        assert found is not None
        return found

    shipped = "bf16 fp8_delayed fp8_rowwise hif8_max_window mxfp8 nvfp4_nvidia tetrajet_v2"
    assert preset_names() == tuple(shipped.split())
    nvidia = spec("nvfp4_nvidia")
    assert nvidia.dgrad.b == nvidia.fprop.b == OPERANDS["nvfp4_2d"]
    assert (nvidia.dgrad.a.rounding, nvidia.dgrad.a.hadamard) == ("stochastic", 0)
    assert (nvidia.wgrad.a.rounding, nvidia.wgrad.b.rounding) == ("stochastic", "rne")
    assert (nvidia.wgrad.b.hadamard, nvidia.wgrad.b.source) == (16, "original")
    double = OPERANDS["nvfp4_double"]
    pair = GemmSpec(replace(double, **SR16), replace(double, **SR16, source="dequantized"))
    outliers = Outliers(OPERANDS["mxfp8"], 0.1, 0, 501, 551)
    assert spec("tetrajet_v2") == LinearSpec(GemmSpec(double, double), pair, pair, outliers)
    assert load_policy("tetrajet_v2").oscillation == Oscillation(None, start_lr=0.35, min_flips=0)
    mx = GemmSpec(OPERANDS["mxfp8"], OPERANDS["mxfp8"])
    assert spec("mxfp8") == LinearSpec(mx, mx, mx)
    hif8 = spec("hif8_max_window")
    assert hif8.observe
    assert hif8.fprop.a == hif8.fprop.b == OperandSpec("hif8", target=15.0, scaling="delayed", rounding="rna")
    assert hif8.wgrad == GemmSpec(OperandSpec(), OperandSpec(source="dequantized"))
    assert spec("fp8_delayed").observe


def test_text_changes_with_every_field() -> None:
    policy = load_policy("hif8_max_window")
    changes: dict[str, Any] = {"strict": False, "allow_empty": True, "schedule": (), "rules": policy.rules[::-1]}
    changes["amax"] = replace(policy.amax, margin=1)
    changes["oscillation"] = Oscillation(start_step=7)
    assert set(changes) == {f.name for f in fields(Policy)}
    assert len({policy.id} | {replace(policy, **{k: v}).id for k, v in changes.items()}) == len(changes) + 1


def test_file_models_and_specs_name_the_same_choices() -> None:
    for field, allowed in CHOICES.items():
        annotation = OperandModel.model_fields[FILE_KEYS.get(field, field)].annotation
        assert get_args(get_args(annotation)[0]) == allowed
    assert {FILE_KEYS.get(f.name, f.name) for f in fields(OperandSpec)} == set(OperandModel.model_fields)


def test_yaml_toml_json_mapping_and_policy_are_equal(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps(BASE, indent="\t"))
    (tmp_path / "p.toml").write_text('version = 1\n[recipes]\na = "mxfp8"\n[[rules]]\nmatch = "*"\nuse = "a"\n')
    (tmp_path / "p.yml").write_text('version: 1\nrecipes: {a: mxfp8}\nrules: [{match: "*", use: a}]\n')
    policy = load_policy(BASE)
    for name in ("p.json", "p.toml", "p.yml"):
        assert load_policy(tmp_path / name) == load_policy(str(tmp_path / name)) == policy
    assert load_policy(policy) is policy


def test_extends_appends_rules_and_merges_recipes(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    base = BASE | {"extends": ["hif8_max_window"], "strict": False, "rules": [{"match": "a", "use": "a"}]}
    top = {"version": 1, "extends": ["sub/base.json"], "recipes": {"a": "mxfp4"}}
    top["rules"] = [{"match": "b", "use": "keep"}]
    (tmp_path / "sub" / "base.json").write_text(json.dumps(base))
    (tmp_path / "top.yaml").write_text(json.dumps(top))
    policy = load_policy(tmp_path / "top.yaml")
    assert [r.match for r in policy.rules] == ["*", "*lm_head", "a", "b"]
    assert policy.rules[2].spec is not None
    assert policy.rules[2].spec.fprop.a == OPERANDS["mxfp4"]
    assert not policy.strict
    assert policy.schedule == (Phase(0, 500, keep=True, observe=True),)
    assert load_policy({"version": 1, "extends": ["hif8_max_window"], "schedule": []}).schedule == ()


def test_a_preset_can_be_used_without_extending_it() -> None:
    policy = load_policy({"version": 1, "rules": [{"match": "*", "use": "mxfp8"}]})
    assert len(policy.rules) == 1
    assert policy.rules[0].spec == load_policy("mxfp8").rules[0].spec


def test_extends_cycles_and_missing_files_are_errors(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("version: 1\nextends: [./b.yaml]\n")
    (tmp_path / "b.yaml").write_text("version: 1\nextends: [a.yaml]\n")
    fails({"version": 1, "extends": [str(tmp_path / "a.yaml")]}, "extends itself")
    fails(BASE | {"extends": ["mxfp7"]}, "extends[0]", "did you mean 'mxfp8'?")
    for source in ("mxfp7", tmp_path / "no.yaml", tmp_path / "p.txt", tmp_path, "a\0.yaml", 3):
        with pytest.raises(PolicyError):
            load_policy(source)  # type: ignore[arg-type]


def test_shorthands_equal_their_long_forms() -> None:
    def spec(recipe: Any) -> LinearSpec | None:
        return load_policy(BASE | {"recipes": {"a": recipe}}).rules[0].spec

    x, w = "nvfp4", "nvfp4_2d"
    same = {"fprop": {"x": x, "w": w}, "dgrad": {"g": x, "w": w}, "wgrad": {"g": x, "x": x}}
    assert spec({"fprop": {"x": x, "w": w}, "bwd": "same"}) == spec(same)
    assert spec({"fprop": {"x": x, "w": w}, "bwd": {"g": x, "w": w, "x": x}}) == spec(same)
    assert spec({"dgrad": "same", "wgrad": "same", "fprop": {"x": x, "w": w}}) == spec(same)
    assert spec("mxfp8") == spec(dict.fromkeys(GEMMS, "mxfp8")) == spec({"fprop": "mxfp8", "bwd": "same"})
    e8m0 = {"format": "e2m1", "block": [1, 32], "scale": "e8m0"}
    assert spec({"fprop": {"x": e8m0, "w": e8m0}, "bwd": "same"}) == spec("mxfp4")


AGAIN, ROTATED = {"format": "mxfp8", "source": "dequantized"}, {"format": "bf16", "hadamard": 16}
WRONG = """version: 1
recipes:
  a:
    fprop: {x: mxfp8, w: {format: mxfp8, KEY}}
    bwd: same
rules:
  - {match: "*", use: a}
"""


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("rouding: rne", ["w.rouding: unknown key", "did you mean 'rounding'?"]),
        ("rounding: stochastic", ["w.rounding", "in fprop diverges"]),
        ("hadamard: 15", ["w.hadamard: found 15; allowed: 0, 16, 32, 64, 128"]),
        ("hadamard: 16", ["fprop: hadamard must be equal", "x has 0, w has 16"]),
        ("scale: e4m3fm", ["w.scale: found 'e4m3fm'", "did you mean 'e4m3fn'?"]),
        ("scale: float32, scale_rule: ceil", ["w.scale_rule", "no effect"]),
        ("block: [1, 0]", ["w.block: found [1, 0]; allowed"]),
        ("outer: [1, 128]", ["w.outer", "e4m3fn"]),
        ("scale: e4m3fn, outer: [1, 48]", ["w.outer", "[1, 48] is not a whole number of blocks"]),
        ("target: big", ["w.target: found 'big' (str)"]),
        ("target: 500", ["w.target: 500.0", "maximum"]),
        ("scaling: delayed", ["w.scaling", "whole tensor"]),
        ("source: dequantized", ["w.source", "dgrad's w and wgrad's x only"]),
        ("four_over_six: true", ["w.four_over_six", "e2m1"]),
        ("four_over_six: 1", ["w.four_over_six: found 1 (int)"]),
        ("rounding: ", ["w.rounding", "has no value"]),
    ],
)
def test_wrong_operand_keys_name_file_line_path_and_choice(key: str, parts: list[str]) -> None:
    fails(WRONG.replace("KEY", key), "p.yaml:4: recipes.a.fprop", *parts)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"versoin": 1}, ["versoin: unknown key", "did you mean 'version'?"]),
        ({"version": 2}, ["version: found 2; allowed: 1"]),
        ({"strict": "yes"}, ["strict: found 'yes' (str)"]),
        ({"rules": {}}, ["rules: found {} (dict)"]),
        ({"rules": []}, ["rules: no rule quantizes anything"]),
        ({"rules": [{"match": "*", "use": "mxfp9"}]}, ["rules[0].use: found 'mxfp9'", "did you mean 'mxfp8'?"]),
        ({"rules": [{"match": "*"}]}, ["rules[0]: required key 'use' is missing"]),
        ({"rules": [{"use": "a"}]}, ["rules[0]: required key 'match' is missing"]),
        ({"rules": [{"match": "re:(", "use": "a"}]}, ["rules[0].match: found 're:('", "regular expression"]),
        ({"rules": [{"match": "type:linaer", "use": "a"}]}, ["rules[0].match", "did you mean 'linear'?"]),
        ({"rules": [{"match": "", "use": "a"}]}, ["rules[0].match", "is empty"]),
        ({"recipes": {"keep": "mxfp8"}}, ["recipes.keep", "reserved"]),
        ({"recipes": {"a": "mxfp"}}, ["recipes.a: found 'mxfp'", "did you mean 'mxfp8'?"]),
        ({"recipes": {"a": "e8m0"}}, ["recipes.a: found 'e8m0'", "e8m0 is for scales"]),
        ({"recipes": {"a": 3}}, ["recipes.a: found 3"]),
        ({"amax": {"windwo": 3}}, ["amax.windwo: unknown key", "did you mean 'window'?"]),
        ({"amax": {"algorithm": "mean"}}, ["amax.algorithm: found 'mean'; allowed: max, most_recent, ema"]),
    ],
)
def test_wrong_keys_and_values(change: dict[str, Any], parts: list[str]) -> None:
    fails(BASE | change, "<mapping>: ", *parts)


@pytest.mark.parametrize(
    ("gemms", "parts"),
    [
        ({"bwd": "mxfp8"}, ["recipes.a: required key 'fprop' is missing"]),
        ({"fprop": "mxfp8"}, ["required key 'dgrad'", "required key 'wgrad'"]),
        ({"fprop": {"x": "mxfp8"}, "bwd": "mxfp8"}, ["recipes.a.fprop: required key 'w'"]),
        ({"fprop": "mxfp8", "bwd": {"g": "mxfp8", "w": "mxfp8"}}, ["recipes.a.bwd: required key 'x'"]),
        ({"fprop": "mxfp8", "bwd": "mxfp8", "dgrad": "mxfp8"}, ["recipes.a.bwd", "drop it or dgrad"]),
        ({"fprop": "mxfp8", "bwd": "mxfp4", "accumulate": "float32"}, ["recipes.a.accumulate: unknown key"]),
        ({"fprop": "bf16", "bwd": {"g": "bf16", "w": "bf16", "x": AGAIN}}, ["recipes.a.bwd.x.source", "not quantized"]),
        ({"fprop": "mxfp8", "bwd": {"g": ROTATED, "w": "mxfp8", "x": "mxfp8"}}, ["a.bwd.g.format", "bf16 is not"]),
    ],
)
def test_wrong_recipes(gemms: dict[str, Any], parts: list[str]) -> None:
    fails(BASE | {"recipes": {"a": gemms}}, *parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["top level", "found NoneType"]),
        ("- 1", ["top level", "found list"]),
        ("version: 1\nstrct: 1\nrules:\n - {match: a, use: a, f: 1}", ["p.yaml:2: strct", "p.yaml:4: rules[0].f"]),
        ("version: 1\nversion: 1", ["p.yaml:2: version", "twice"]),
        ("version: 1\n1: 2", ["p.yaml:2", "keys must be text"]),
        ("a: &a [*a]", ["p.yaml:1", "drop aliases"]),
        ("[" * 5000, ["p.yaml", "not YAML"]),
        ("a: !!python/object:os.system x", ["p.yaml:1", "not YAML"]),
        ("#" * 1_000_001, ["p.yaml", "more than"]),
        ("\n".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}' if i else 'x'] * 10)}]" for i in range(6)), ["drop aliases"]),
    ],
)
def test_wrong_files(text: str, parts: list[str]) -> None:
    fails(text, *parts)


def test_wrong_toml_and_json_name_the_line(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text("version = 1\nrules = = 3")
    (tmp_path / "p.json").write_text('{"version": 1,\n "rules": [}')
    (tmp_path / "q.json").write_text('{"version": 1,\n\t"rulse": []}')
    (tmp_path / "r.json").write_bytes(b"\xff\xfe")
    for name, part in (("p.toml", "line 2"), ("p.json", "p.json:2"), ("q.json", "q.json:2: rulse"), ("r.json", "JSON")):
        with pytest.raises(PolicyError, match=part):
            load_policy(tmp_path / name)


def test_policies_built_by_hand_are_checked() -> None:
    delayed = OperandSpec("e4m3fn", scaling="delayed")
    spec = LinearSpec(GemmSpec(delayed, delayed))
    with pytest.raises(PolicyError, match="observe"):
        Policy((Rule("*", spec, "r"),))
    Policy((Rule("*", replace(spec, observe=True), "r"),))
    with pytest.raises(PolicyError, match="already names other"):
        Policy((Rule("*", replace(spec, observe=True), "r"), Rule("a", LinearSpec(), "r")))
    with pytest.raises(PolicyError, match="cover"):
        Policy((), (Phase(5, 5, keep=True),))
