"""What quantization costs on a CPU: seconds of a training step of the demo model, beside BF16 and float32 Inductor.

All variants are compiled first and then take turns, one step each, so that a busy moment hits all of them; the median
of the rounds counts. ``python -m benchmarks.cpu_overhead --record benchmarks/results/bars.json`` writes the CSV too.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from lowbit_compile import bars
from lowbit_compile.demo.model import LanguageModel
from lowbit_compile.demo.train import Setup, batches, make_optimizer, setup_for

CSV = "benchmarks/results/cpu_overhead.csv"
BASE = "bf16 inductor"
# name -> (torch.compile arguments, autocast to BF16)
VARIANTS: dict[str, tuple[dict[str, Any], bool]] = {
    BASE: ({"backend": "inductor"}, True),
    "float32 inductor": ({"backend": "inductor"}, False),
    **{
        f"{policy} {reference}": ({"backend": "lowbit", "options": {"policy": policy, "reference": reference}}, True)
        for policy, reference in (
            ("tetrajet_v2", "compiled"),
            ("tetrajet_v2", "eager"),
            ("nvfp4_nvidia", "compiled"),
            ("mxfp8", "compiled"),
            ("fp8_rowwise", "compiled"),
        )
    },
}


def stepper(setup: Setup, arguments: dict[str, Any], autocast: bool) -> Callable[[tuple[Tensor, Tensor]], None]:
    """A function that makes one training step."""
    torch.manual_seed(setup.seed)
    model: Any = torch.compile(LanguageModel(setup.model), **arguments)
    optimizer = make_optimizer(model, setup)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(rounds: int) -> list[dict[str, Any]]:
    """One row a variant."""
    setup = setup_for("cpu", None, seed=0)
    data = list(batches("train", setup, rounds + 2, setup.seed))
    steps, first = {}, {}
    for name, variant in VARIANTS.items():
        steps[name] = stepper(setup, *variant)
        start = time.perf_counter()
        steps[name](data[0])
        first[name] = time.perf_counter() - start
        steps[name](data[1])
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for batch in data[2:]:
        for name, step in steps.items():
            start = time.perf_counter()
            step(batch)
            seconds[name].append(time.perf_counter() - start)
    medians = {name: median(times) for name, times in seconds.items()}
    return [
        {
            "variant": name,
            "step_s": round(medians[name], 4),
            "ratio_to_bf16": round(medians[name] / medians[BASE], 3),
            "tokens_per_s": round(setup.tokens_per_step / medians[name]),
            "first_step_s": round(first[name], 1),
        }
        for name in VARIANTS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--record", metavar="FILE", help="merge the bar into this list, and write the rows as CSV")
    args = parser.parse_args()
    rows = measure(args.rounds)
    print(tabulate(rows, headers="keys"))
    if args.record:
        with Path(CSV).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        ratio = next(row["ratio_to_bf16"] for row in rows if row["variant"] == "tetrajet_v2 compiled")
        bars.record(args.record, bars.measured({"cpu.nvfp4_step_vs_bf16": (ratio, "x bf16")}, card="cpu", rows=CSV))


if __name__ == "__main__":
    main()
