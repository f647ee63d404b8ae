"""The ``lowbit`` command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from .errors import LowbitError
from .formats import ALL_FORMATS, Format
from .policy import Policy
from .policy_file import load_policy, preset_names


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; 2 with one line on stderr for whatever the user can put right."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except LowbitError as error:
        print(f"lowbit: error: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lowbit", description="Low-bit training through torch.compile.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="train a small model in BF16 and in low bit, and compare")
    demo.add_argument("--policy", default=None, help="preset or policy file (default: the demo's preset)")
    demo.add_argument("--steps", type=int, default=None, help="optimizer steps of each run")
    demo.add_argument("--device", default=None, help="cpu or cuda (default: cuda where there is one)")
    demo.add_argument("--out", default="lowbit_demo", metavar="DIR", help="folder for the report (%(default)s)")
    demo.add_argument("--json", action="store_true", help="print the report as JSON and nothing else")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--record", metavar="FILE", default=None, help="merge the measured bars into this JSON list")
    demo.set_defaults(run=_demo)
    commands.add_parser("presets", help="list the policies that ship with the package").set_defaults(run=_presets)
    commands.add_parser("formats", help="list the number formats").set_defaults(run=_formats)
    policy = commands.add_parser("policy", help="work with policy files")
    check = policy.add_subparsers(required=True, metavar="COMMAND").add_parser("check", help="read a policy")
    check.add_argument("file", metavar="FILE", help="preset or policy file")
    check.set_defaults(run=_policy_check)
    return parser


def _demo(args: argparse.Namespace) -> int:
    from .demo import train  # imported here: the other commands need no data and no compiler

    result = train.run_demo(
        args.policy or train.DEFAULT_POLICY, steps=args.steps, device=args.device, out=args.out, seed=args.seed
    )
    if args.record:
        _record(args.record, result)
    print(json.dumps(result) if args.json else demo_text(result))
    return 0


def _record(file: str, result: dict[str, Any]) -> None:
    from . import bars

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


def _presets(_args: argparse.Namespace) -> int:
    print("\n".join(preset_names()))
    return 0


def _formats(_args: argparse.Namespace) -> int:
    headers = ("format", "bits", "max", "min positive", "NaN", "codes")
    print(tabulate([_format_row(f) for f in ALL_FORMATS.values()], headers=headers, disable_numparse=True))
    return 0


def _format_row(fmt: Format) -> tuple[str, int, str, str, str, int]:
    smallest = next(v for v in fmt.positives if v > 0)
    has_nan = "no" if fmt.nan_code is None else "yes"
    return fmt.name, fmt.bits, f"{fmt.max:g}", f"{smallest:g}", has_nan, len(fmt.values)


def _policy_check(args: argparse.Namespace) -> int:
    policy: Policy = load_policy(args.file)
    rows = [(rule.match, rule.recipe, rule.reason) for rule in policy.rules]
    print(tabulate(rows, headers=("match", "use", "reason"), disable_numparse=True))
    print(f"id {policy.id}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
