"""``lowbit demo``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from tabulate import tabulate

from ..errors import LowbitError


def add(commands: Any) -> None:
    demo = commands.add_parser("demo", help="train a small model in BF16 and in low bit, and compare")
    demo.add_argument("--policy", default=None, help="preset or policy file (default: the demo's preset)")
    demo.add_argument("--steps", type=int, default=None, help="optimizer steps of each run")
    demo.add_argument("--device", default=None, help="cpu or cuda (default: cuda where there is one)")
    demo.add_argument("--out", default="lowbit_demo", metavar="DIR", help="folder for the report (%(default)s)")
    demo.add_argument("--json", action="store_true", help="print the report as JSON and nothing else")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--record", metavar="FILE", default=None, help="merge the measured bars into this JSON list")
    demo.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> int:
    from ..demo import train  # imported here: the other commands need no data and no compiler

    result = train.run_demo(
        args.policy or train.DEFAULT_POLICY, steps=args.steps, device=args.device, out=args.out, seed=args.seed
    )
    if args.record:
        _record(args.record, result)
    print(json.dumps(result) if args.json else demo_text(result))
    return 0


def _record(file: str, result: dict[str, Any]) -> None:
    from .. import bars

    if result["card"] == "cpu":
        values = {
            "demo.cpu.loss_ratio": (result["loss_ratio"], "x bf16"),
            "demo.cpu.seconds": (result["seconds"], "s"),
            "demo.cpu.recompiles": (float(result["runs"]["lowbit"]["recompiles"]), "count"),
        }
    elif "H200" in result["card"]:
        values = {"demo.h200.loss_ratio": (result["loss_ratio"], "x bf16")}
    else:
        raise LowbitError(f"--record: no bar is defined for {result['card']}, only for cpu and the H200")
    bars.record(file, bars.measured(values, card=result["card"], rows=f"{result['folder']}/loss.csv"))


def demo_text(result: dict[str, Any]) -> str:
    """The report for people: every linear, both runs side by side, a line from each model."""
    names = ("path", "shape", "rule", "fprop", "dgrad", "wgrad", "implementation", "state", "reason")
    linears = [[_cell(record.get(name)) for name in names] for record in result["linears"]]
    runs = result["runs"]
    rows = [
        (label, *(format(runs[name][key], spec) for name in ("bf16", "lowbit")))
        for label, key, spec in (
            ("eval loss", "eval_loss", ".4f"),
            ("tokens/s, steady", "tokens_per_s", ",.0f"),
            (f"peak MB, {result['memory_is']}", "peak_memory_mb", ",.0f"),
            ("graphs", "graphs", "d"),
            ("recompiles after step 1", "recompiles", "d"),
            ("seconds, compiling too", "seconds", ".1f"),
        )
    ]
    return "\n".join(
        (
            f"{result['parameters'] / 1e6:.1f} M parameters on {result['card']}, policy {result['policy']}, "
            f"{result['steps']} steps of {result['tokens_per_step']} tokens, seed {result['seed']}",
            "",
            tabulate(linears, headers=names, disable_numparse=True),
            "",
            tabulate(rows, headers=("", "bf16", "lowbit"), disable_numparse=True, colalign=("left", "right", "right")),
            "",
            f"bf16   writes: {runs['bf16']['sample']}",
            f"lowbit writes: {runs['lowbit']['sample']}",
            "",
            f"loss ratio {result['loss_ratio']:.4f}, {result['seconds']:.0f} s in all; files in {result['folder']}/",
        )
    )


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return "x".join(str(v) for v in value) if isinstance(value, list | tuple) else str(value)
