"""Bandwidth of the quantize kernels: the bytes that a cast has to read and write, over its time, beside a plain copy.

``python -m benchmarks.quantize --record benchmarks/results/bars.json`` writes the CSV too. Each case's bytes are first
compared with the reference on a part of the data; a case that differs has no time.
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.timing import copy_bandwidth, microseconds, need_cuda
from lowbit_compile import bars
from lowbit_compile.jobs import Cast, Job
from lowbit_compile.ops import run_jobs
from lowbit_compile.spec import parse_operand

CSV = "benchmarks/results/h200/quantize.csv"
SHAPES = ((8192, 4096), (8192, 14336))
L2_BYTES = 60e6
DOUBLE = "e2m1(block=1x16,scale=e4m3fn,outer=1x128{})"
ROTATED = DOUBLE.format(",rounding=stochastic,hadamard=16")


@dataclass(frozen=True)
class Case:
    """``straight`` is cast along K; ``transposed`` along the rows, from what straight made where ``again``."""

    name: str
    straight: str
    transposed: str = ""
    again: bool = False
    bar: str = ""

    def jobs(self) -> str:
        first = Cast("fprop.x", parse_operand(self.straight))
        found = [Job(first)]
        if self.transposed:
            second = Cast("wgrad.x", parse_operand(self.transposed))
            found.append(Job(second, transposed=True, via=(first,) if self.again else ()))
        return " | ".join(map(str, found))


MX = "e4m3fn(block=1x32,scale=e8m0,rule=rceil)"
CASES = (
    Case("fp8 row", "e4m3fn(block=1x-1)", bar="quantize.fp8_row.bw"),
    Case("fp8 tensor, current", "e4m3fn"),
    Case("fp8 1x128", "e4m3fn(block=1x128)", bar="quantize.fp8_1x128.bw"),
    Case("mxfp8", MX),
    Case("mxfp8 both", MX, MX),
    Case("nvfp4 double", DOUBLE.format("")),
    Case("nvfp4 double both", DOUBLE.format(""), DOUBLE.format(""), bar="quantize.nvfp4_rtn_both.bw"),
    Case("nvfp4 double, cast again RHT SR", DOUBLE.format(""), ROTATED, True, "quantize.nvfp4_rht_sr_both.bw"),
    Case("nvfp4 double RHT SR both", ROTATED, ROTATED),
    Case("hif8", "hif8(target=15.0)"),
)


def _same(jobs: str, x: Tensor, amax: Tensor, seed: Tensor) -> bool:
    part = x[:384, :640]
    return all(
        map(
            torch.equal,
            run_jobs("triton", part, amax, seed, None, jobs),
            run_jobs("eager", part, amax, seed, None, jobs),
        )
    )


def measure(shape: tuple[int, int]) -> list[dict[str, Any]]:
    """One row a case, at one shape [rows, K] of BF16."""
    copies = max(2, int(2 * L2_BYTES / (2 * shape[0] * shape[1])) + 1)
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    amax, seed = torch.zeros(3, device="cuda"), torch.tensor([1, 2, 3, 4], device="cuda")
    roof = copy_bandwidth()
    rows = []
    for case in CASES:
        jobs = case.jobs()
        row: dict[str, Any] = {"case": case.name, "rows": shape[0], "k": shape[1], "us": "wrong", "of_copy": 0.0}
        if _same(jobs, tensors[0], amax, seed):
            made = run_jobs("triton", tensors[0], amax, seed, None, jobs)
            needed = tensors[0].nbytes + sum(t.nbytes for t in made)
            (us,) = microseconds([partial(run_jobs, "triton", x, amax, seed, None, jobs) for x in tensors])
            row |= {"us": round(us, 2), "gb_per_s": round(needed / us / 1e3), "of_copy": round(needed / us / roof, 3)}
        rows.append(row | {"copy_gb_per_s": round(roof / 1e3), "bar": case.bar, "jobs": jobs})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=CSV)
    parser.add_argument("--record", help="file of bars to write into")
    arguments = parser.parse_args()
    card = need_cuda("benchmarks.quantize")
    rows = [row for shape in SHAPES for row in measure(shape)]
    print(tabulate([{k: v for k, v in r.items() if k != "jobs"} for r in rows], headers="keys"))
    out = Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    if arguments.record:
        found: dict[str, tuple[float, str]] = {}
        for row in rows:
            if row["bar"]:
                found[row["bar"]] = (min(row["of_copy"], found.get(row["bar"], (1e9, ""))[0]), "x copy")
        bars.record(arguments.record, bars.measured(found, card=card, rows=arguments.out))


if __name__ == "__main__":
    main()
