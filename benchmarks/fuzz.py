"""Kernels against the reference on random blocks: codes and scales, byte by byte, on one CUDA device.

``python -m benchmarks.fuzz --record benchmarks/results/bars.json``. Data are normal numbers of widely different size,
with blocks of zeros, subnormals, ties, infinities and NaN among them; every round has another seed.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.timing import need_cuda
from lowbit_compile import bars
from lowbit_compile.jobs import Cast
from lowbit_compile.ops import run_cast
from lowbit_compile.spec import parse_operand

CSV = "benchmarks/results/h200/fuzz.csv"
ROWS, K, BLOCKS = 4096, 2048, 1_000_000
SPECS = {
    "fp8 tensor": "e4m3fn",
    "fp8 row": "e4m3fn(block=1x-1)",
    "fp8 1x128": "e4m3fn(block=1x128)",
    "fp8 128x128": "e4m3fn(block=128x128)",
    "e5m2 1x128 stochastic": "e5m2(block=1x128,rounding=stochastic)",
    "mxfp8 floor": "e4m3fn(block=1x32,scale=e8m0,rule=floor)",
    "mxfp8 rceil": "e4m3fn(block=1x32,scale=e8m0,rule=rceil)",
    "mxfp8 e5m2 even": "e5m2(block=1x32,scale=e8m0,rule=even)",
    "mxfp4 Hadamard stochastic": "e2m1(block=1x32,scale=e8m0,rule=floor,rounding=stochastic,hadamard=32)",
    "mxfp4 ceil": "e2m1(block=1x32,scale=e8m0,rule=ceil)",
    "nvfp4": "e2m1(block=1x16,scale=e4m3fn,outer=-1x-1)",
    "nvfp4 16x16": "e2m1(block=16x16,scale=e4m3fn,outer=-1x-1)",
    "nvfp4 double": "e2m1(block=1x16,scale=e4m3fn,outer=1x128)",
    "nvfp4 double Hadamard stochastic": "e2m1(block=1x16,scale=e4m3fn,outer=1x128,rounding=stochastic,hadamard=16)",
    "nvfp4 four over six": "e2m1(block=1x16,scale=e4m3fn,outer=-1x-1,four_over_six=true)",
    "nvfp4 16/17": "e2m1(block=1x16,scale=e4m3fn,outer=1x128,target=6.375,rounding=stochastic)",
    "hif8": "hif8(target=15.0)",
    "hif8 1x128 stochastic": "hif8(block=1x128,rounding=stochastic)",
    "int8 row": "int8(block=1x-1)",
    "int4 1x32": "int4(block=1x32)",
}


def data(generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """[ROWS, K]: sizes differ by row and by 16 columns, and a few hundred blocks are special."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    x = (
        draw(ROWS, K // 16, 16)
        * torch.exp2((draw(ROWS, 1, 1) * 8).round())
        * torch.exp2((draw(1, K // 16, 1) * 2).round())
    )
    kind = torch.randint(0, 400, (ROWS, K // 16, 1), device="cuda", generator=generator)
    x = torch.where(kind == 0, 0.0, torch.where(kind == 1, x * 2.0**-130, torch.where(kind == 2, x.round(), x)))
    x = torch.where(kind == 3, torch.exp2((x % 8).round()) * 1.25, x).reshape(ROWS, K)
    rows = torch.randint(0, ROWS, (24,), device="cuda", generator=generator)
    x[rows[:8], 5], x[rows[8:16], 77], x[rows[16:], 300] = float("nan"), float("inf"), -float("inf")
    return x.to(dtype)


def different(spec: str, seed: int, finite: bool, dtype: torch.dtype) -> int:
    """Bytes that differ between kernel and reference for one draw of data."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = data(generator, dtype)
    x = x.nan_to_num(0.0, 0.0, 0.0) if finite else x
    cast, amax = Cast("wgrad.g", parse_operand(spec)), torch.zeros(3, device="cuda")
    key = torch.tensor([seed, 17 * seed + 5, 3, 4], device="cuda")
    pairs = zip(run_cast("triton", x, amax, key, cast), run_cast("eager", x, amax, key, cast), strict=True)
    return sum(int((a.nan_to_num(-1.0) != b.nan_to_num(-1.0)).sum()) for a, b in pairs)


def fuzz(name: str, seed: int) -> dict[str, Any]:
    """Draws data until BLOCKS blocks of 16 were seen; dtypes in turn, every second draw without NaN and infinity."""
    blocks = differences = draws = 0
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    while blocks < BLOCKS or draws < len(dtypes):
        differences += different(SPECS[name], seed + draws, draws % 2 == 1, dtypes[draws % 3])
        blocks += ROWS * K // 128 if "128" in SPECS[name] else ROWS * K // 16
        draws += 1
    return {"format": name, "blocks": blocks, "differences": differences, "first_seed": seed, "spec": SPECS[name]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default=CSV)
    parser.add_argument("--record", help="file of bars to write into")
    arguments = parser.parse_args()
    card = need_cuda("benchmarks.fuzz")
    rows = [fuzz(name, arguments.seed) for name in SPECS]
    print(tabulate(rows, headers="keys"))
    out = Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    if arguments.record:
        found = {
            "fuzz.blocks_per_format": (min(row["blocks"] for row in rows), "blocks"),
            "fuzz.differences": (sum(row["differences"] for row in rows), "bytes"),
        }
        bars.record(arguments.record, bars.measured(found, card=card, rows=arguments.out))


if __name__ == "__main__":
    main()
