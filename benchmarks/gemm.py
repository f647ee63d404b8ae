"""GEMMs of factored operands beside cuBLAS: BF16, FP8 and the faithful NVFP4 product (1x128 outer scales).

``python -m benchmarks.gemm --record benchmarks/results/bars.json`` writes the CSV too. Operands rotate beyond the L2
cache, candidates take turns in CUDA graphs, and one that computes something else has no time.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.timing import microseconds, need_cuda
from lowbit_compile import bars
from lowbit_compile.codegen.matmul_kernel import Factors, Tile, gemm, vendor

CSV = "benchmarks/results/h200/gemm.csv"
SHAPES = ((8192, 14336, 4096), (8192, 4096, 4096), (8192, 4096, 14336), (2048, 6144, 4096), (16384, 8192, 8192))
NVFP4_SHAPE = SHAPES[0]
L2_BYTES = 60e6
BF16 = torch.bfloat16
TILES = {
    "fp8": (Tile(128, 256, 128, 8, 3), Tile(128, 128, 128, 4, 4), Tile(128, 256, 128, 8, 4)),
    "bf16": (Tile(128, 256, 64, 8, 3), Tile(128, 256, 64, 8, 4)),
    "chunked": (Tile(128, 128, 128, 8, 3), Tile(128, 256, 64, 8, 3), Tile(128, 256, 128, 8, 2)),
}


def operands(rows: int, k: int, kind: str) -> Factors:
    """``bf16``, ``tensor`` and ``row`` (FP8), or ``chunk`` (BF16 with 1x128 scales)."""
    x = torch.randn(rows, k, device="cuda")
    if kind == "bf16":
        return Factors(x.to(BF16))
    if kind == "chunk":
        return Factors(x.to(BF16), torch.rand(rows, -(-k // 128), device="cuda") + 0.5, (1, 128))
    shape, block = ((1, 1), (-1, -1)) if kind == "tensor" else ((rows, 1), (1, -1))
    return Factors(x.to(torch.float8_e4m3fn), torch.rand(shape, device="cuda") + 0.5, block)


def _right(d: Tensor, a: Factors, b: Factors) -> bool:
    """Compares 64 rows and columns with the float64 product."""

    def part(f: Factors) -> Tensor:
        values = f.values[:64].double()
        if f.scale is None:
            return values
        scale = f.scale[:64].double()
        return values * (scale.repeat_interleave(128, 1)[:, : values.shape[1]] if f.block[1] == 128 else scale)

    wanted = part(a) @ part(b).t()
    return bool((d[:64, :64].double() - wanted).norm() <= 4e-3 * wanted.norm())


def _vendor(a: Factors, b: Factors) -> Tensor | None:
    return vendor([(a, b)], None, BF16)


def _triton(a: Factors, tile: Tile, b: Factors) -> Tensor | None:
    return gemm([(a, b)], None, BF16, tile=tile)


def measure(shape: tuple[int, int, int]) -> list[dict[str, Any]]:
    """One row a candidate."""
    m, n, k = shape
    copies = int(L2_BYTES / (n * k)) + 2
    rows: list[dict[str, Any]] = []
    base = 0.0
    for kind, family in (("bf16", "bf16"), ("tensor", "fp8"), ("row", "fp8"), ("chunk", "chunked")):
        a, bs = operands(m, k, kind), [operands(n, k, kind) for _ in range(copies)]
        candidates: dict[str, Callable[[Factors], Tensor | None]] = {}
        if family != "chunked":
            candidates["vendor"] = partial(_vendor, a)
        for tile in TILES[family]:
            candidates[f"triton {tile.m}x{tile.n}x{tile.k} w{tile.warps} s{tile.stages}"] = partial(_triton, a, tile)
        good = {}
        for name, call in candidates.items():
            d = call(bs[0])
            good[name] = d is not None and _right(d, a, bs[0])
        timed = [name for name in candidates if good[name]]
        found = microseconds(*[[partial(candidates[name], b) for b in bs] for name in timed])
        times = dict(zip(timed, found, strict=True))
        base = base or times["vendor"]
        for name in candidates:
            row: dict[str, Any] = {"m": m, "n": n, "k": k, "operands": kind, "candidate": name, "us": "wrong"}
            if us := times.get(name):
                row |= {"us": round(us, 1), "tflops": round(2e-6 * m * n * k / us), "x_bf16": round(base / us, 3)}
                row |= {"x_vendor": round(times.get("vendor", base) / us, 3)}
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=CSV)
    parser.add_argument("--record", help="file of bars to write into")
    arguments = parser.parse_args()
    card = need_cuda("benchmarks.gemm")
    rows = [row for shape in SHAPES for row in measure(shape)]
    print(tabulate(rows, headers="keys"))
    out = Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    if arguments.record:
        ours = [r for r in rows if r["candidate"] != "vendor" and "x_vendor" in r]
        eight = [
            max(r["x_vendor"] for r in ours if r["operands"] == "tensor" and (r["m"], r["n"], r["k"]) == s)
            for s in SHAPES
        ]
        four = [r["x_bf16"] for r in ours if r["operands"] == "chunk" and (r["m"], r["n"], r["k"]) == NVFP4_SHAPE]
        found = {
            "gemm.fp8.triton_vs_vendor": (min(eight), "x cuBLAS"),
            "gemm.nvfp4.dequantized_vs_bf16": (max(four), "x bf16 cuBLAS"),
        }
        bars.record(arguments.record, bars.measured(found, card=card, rows=arguments.out))


if __name__ == "__main__":
    main()
