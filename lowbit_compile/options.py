"""The options of ``torch.compile(model, backend="lowbit", options={...})``, read and checked once a compile."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import compat
from .codegen import IMPLEMENTATIONS
from .errors import PolicyError, nearest
from .policy import Policy
from .policy_file import load_policy

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
