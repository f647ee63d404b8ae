"""Bit-for-bit agreement with the golden tables in tests/data. NaN is compared by class."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowbit_compile.casts import decode, encode, pack, round_to_grid
from lowbit_compile.formats import E8M0, HIF8, get_format
from lowbit_compile.quantize import quantize
from lowbit_compile.scaling import e8m0_scale, e8m0_value
from lowbit_compile.spec import OperandSpec

DATA = Path(__file__).parents[1] / "data"


def rows(name: str) -> list[dict[str, str]]:
    with open(DATA / f"{name}.csv", newline="") as f:
        return list(csv.DictReader(f))


def floats(words: list[int]) -> Tensor:
    return torch.tensor([w - (1 << 32) if w >> 31 else w for w in words], dtype=torch.int32).view(torch.float32)


def column(table: list[dict[str, str]], name: str) -> Tensor:
    return torch.tensor([int(r[name], 16) for r in table], dtype=torch.uint8)


def bits(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), 0x7FC00000, x.view(torch.int32))


@pytest.mark.parametrize("name", ["e2m1", "e4m3fn", "e5m2", "e8m0", "hif8"])
def test_codes(name: str) -> None:
    table = rows("hif8_codes" if name == "hif8" else f"codes_{name}")
    assert len(table) == 1 << get_format(name).bits
    codes = torch.tensor([int(r["code"]) for r in table], dtype=torch.uint8)
    expected = bits(floats([int(r["f32_bits"], 16) for r in table]))
    assert torch.equal(bits(decode(codes, get_format(name))), expected)
    if name == "e8m0":
        assert torch.equal(bits(e8m0_value(codes)), expected)


@pytest.mark.parametrize("name", ["e2m1", "e4m3fn", "e5m2"])
def test_cast(name: str) -> None:
    fmt, table = get_format(name), rows(f"cast_{name}")
    x = floats([int(r["f32_bits"], 16) for r in table])
    codes, expected = encode(round_to_grid(x, fmt, "rne"), fmt), column(table, "code_sat")
    if fmt.nan_code is None:
        assert torch.equal(codes[~x.isnan()], expected[~x.isnan()])
    else:
        assert torch.equal(decode(codes, fmt).isnan(), x.isnan())
        assert torch.equal(codes[~x.isnan()], expected[~x.isnan()])


def test_cast_e8m0() -> None:
    table = rows("cast_e8m0")
    amax = floats([int(r["f32_bits"], 16) for r in table])
    for rule, name in (("floor", "floor"), ("ceil", "ceil"), ("rceil", "ceil"), ("rceil_satfinite", "ceil_satfinite")):
        assert torch.equal(e8m0_scale(amax, E8M0, rule, 1.0), column(table, name)), rule
    # ml_dtypes makes 0 NaN, a scale rule gives it the least scale
    got, expected = e8m0_scale(amax, E8M0, "nearest", 1.0), column(table, "nearest_ml_dtypes")
    assert torch.equal(got[amax != 0], expected[amax != 0])
    assert got[amax == 0].tolist() == [0]


@pytest.mark.parametrize("rule", ["floor", "ceil", "rceil", "rceil_satfinite", "even"])
@pytest.mark.parametrize("elem", ["e2m1", "e4m3fn", "e5m2"])
def test_mx_scale(elem: str, rule: str) -> None:
    table = [r for r in rows("mx_scale") if r["elem"] == elem]
    amax = floats([int(r["amax_f32_bits"], 16) for r in table])
    assert len(table) > 100
    assert torch.equal(e8m0_scale(amax, get_format(elem), rule), column(table, rule))


def test_mx_scale_rceil_is_exact() -> None:
    table = rows("mx_scale")
    assert all(r["rceil"] == r["rceil_exact"] for r in table)


@pytest.mark.parametrize("row", rows("mx_blocks"), ids=lambda r: f"{r['block']}-{r['elem']}-{r['rule']}")
def test_mx_block(row: dict[str, str]) -> None:
    fmt = get_format(row["elem"])
    x = floats([int(row["f32_bits_hex"][i : i + 8], 16) for i in range(0, 256, 8)]).reshape(1, 32)
    codes, scale = quantize(x, OperandSpec(row["elem"], (1, 32), "e8m0", rule=row["rule"]))
    assert scale.item() == int(row["scale"], 16)
    if row["scale"] != "0xff":
        digits = 1 if fmt.bits == 4 else 2
        hexes = [row["codes_hex"][i : i + digits] for i in range(0, len(row["codes_hex"]), digits)]
        expected = torch.tensor([[int(h, 16) for h in hexes]], dtype=torch.uint8)
        assert torch.equal(codes, pack(expected) if fmt.bits == 4 else expected)


HIF8_COLUMNS = {
    "ta_inf": ("rna", "infinity", 0),
    "ta_sat": ("rna", "saturate", 0),
    "hybrid_inf": ("hybrid", "infinity", 0),
    "sr0_inf": ("stochastic", "infinity", 0),
    "srmax_inf": ("stochastic", "infinity", 16383),
    "trunc_inf": ("down", "infinity", 0),
}


@pytest.mark.parametrize("name", HIF8_COLUMNS)
def test_hif8_cast(name: str) -> None:
    table = rows("hif8_cast")
    rounding, overflow, random = HIF8_COLUMNS[name]
    x = floats([int(r["f32_bits"], 16) for r in table])
    noise = torch.full_like(x, random, dtype=torch.int32)
    got = encode(round_to_grid(x, HIF8, rounding, noise, random_width=14, overflow=overflow), HIF8)
    expected = column(table, name)
    wrong = [(table[i]["f32_bits"], table[i][name], hex(got[i])) for i in (got != expected).nonzero().flatten()]
    assert not wrong
