"""Schedules: which numerics hold at which step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_policy import BASE, fails

from lowbit_compile.policy import Policy
from lowbit_compile.policy_file import load_policy
from lowbit_compile.schedule import boundaries, phase_index, spec_at
from lowbit_compile.spec import GEMMS, GemmSpec, LinearSpec


def scheduled(*phases: dict[str, Any], extends: str = "hif8_max_window") -> Policy:
    return load_policy({"version": 1, "extends": [extends], "schedule": list(phases)})


def test_boundaries_and_phase_index() -> None:
    late = {"from_fraction": 0.29, "total_steps": 10000, "fprop": "bf16"}
    policy = scheduled({"until_step": 500, "use": "keep"}, late)
    assert boundaries(policy) == (500, 2900)
    assert [phase_index(policy, s) for s in (0, 499, 500, 2899, 2900, 10**9)] == [0, 0, 1, 1, 2, 2]
    assert phase_index(load_policy("mxfp8"), 7) == 0
    touching = scheduled({"until_step": 5, "use": "keep"}, {"from_step": 5, "until_step": 9, "wgrad": "bf16"})
    assert boundaries(touching) == (5, 9)


def test_spec_at_keeps_and_observes() -> None:
    policy = load_policy("hif8_max_window")
    spec = policy.resolve("fc", "linear").spec
    assert spec is not None
    assert spec_at(policy, spec, 499) == LinearSpec(observe=True)
    assert spec_at(policy, spec, 500) == spec
    current = load_policy("mxfp8").rules[0].spec or LinearSpec()
    assert spec_at(policy, current, 0) == LinearSpec()  # no window to fill
    assert spec_at(scheduled({"until_step": 5, "use": "keep"}), spec, 0) == LinearSpec()


@pytest.mark.parametrize("gemm", GEMMS)
def test_spec_at_holds_one_gemm_high(gemm: str) -> None:
    policy = scheduled({"from_step": 10, gemm: "bf16"}, extends="tetrajet_v2")
    spec = policy.resolve("fc", "linear").spec
    assert spec is not None
    late = spec_at(policy, spec, 10)
    assert spec_at(policy, spec, 9) == replace(spec, outliers=None)  # those come at step 551
    assert getattr(late, gemm) == GemmSpec()
    assert [getattr(late, g).quantized for g in GEMMS] == [g != gemm for g in GEMMS]
    assert (late.dgrad.b.source == "dequantized") == (gemm == "wgrad")


@pytest.mark.parametrize(
    ("phases", "part"),
    [
        ([{"use": "keep"}], "covers every step"),
        ([{"from_step": 5, "until_step": 5, "use": "keep"}], "covers no step"),
        ([{"until_step": 5}], "exactly one of use: keep"),
        ([{"until_step": 5, "use": "keep", "fprop": "bf16"}], "exactly one of use: keep"),
        ([{"until_step": 5, "fprop": "bf16", "observe": True}], "observe goes with use: keep"),
        ([{"from_fraction": 0.5, "use": "keep"}], "go together"),
        ([{"from_step": 1, "from_fraction": 0.5, "total_steps": 5, "use": "keep"}], "say the same"),
        ([{"from_fraction": 1.5, "total_steps": 5, "use": "keep"}], "found 1.5"),
        ([{"until_step": 5, "use": "kep"}], "did you mean 'keep'?"),
        ([{"until_step": 5, "fprop": "mxfp8"}], "found 'mxfp8'; allowed: bf16"),
        ([{"until_stp": 5, "use": "keep"}], "did you mean 'until_step'?"),
    ],
)
def test_wrong_phases(phases: list[dict[str, Any]], part: str) -> None:
    fails(BASE | {"schedule": phases}, "schedule[0]", part)


def test_overlaps_and_pointless_observation_are_errors() -> None:
    phases = [{"until_step": 5, "use": "keep"}, {"from_step": 4, "fprop": "bf16"}]
    fails(BASE | {"schedule": phases}, "schedule[1]: overlaps schedule[0] at step 4")
    fails(BASE | {"schedule": [{"until_step": 5, "use": "keep", "observe": True}]}, "schedule[0].observe", "no effect")
