"""The reference quantizer: published test vectors (TV1-TV5, TV7 of the NVFP4 notes), special values, compile."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowbit_compile.casts import decode, encode, pack, round_to_grid, unpack
from lowbit_compile.errors import UnsupportedError
from lowbit_compile.formats import E2M1, E4M3FN, ELEMENT_FORMATS, get_format
from lowbit_compile.hadamard import rotate
from lowbit_compile.quantize import dequantize, fake_quantize, padded_k, payload_like, quantize
from lowbit_compile.scaling import E8M0_RULES, e8m0_scale, inverse
from lowbit_compile.spec import OperandSpec, parse_operand

SEED = torch.tensor([0x12345678, 0x9ABCDEF0, 3, 5], dtype=torch.int64)
DOUBLE = OperandSpec("e2m1", (1, 16), "e4m3fn", (1, 128))
TE_SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
UNBIASED_TARGET = 6 * 16 / 17
FORMATS = list(ELEMENT_FORMATS)
SPECS = [
    OperandSpec(f, block, scale, rule=rule)
    for f in FORMATS
    for block, scale, rule in (
        ((-1, -1), "float32", "nearest"),
        ((1, -1), "float32", "nearest"),
        ((1, 16), "float32", "nearest"),
        ((16, 16), "float32", "nearest"),
        ((1, 16), "e4m3fn", "nearest"),
        *(((1, 32), "e8m0", rule) for rule in E8M0_RULES),
    )
] + [OperandSpec(f, (1, 16), "e4m3fn", outer) for f in FORMATS for outer in ((1, 128), (-1, -1))]
each_spec = pytest.mark.parametrize("spec", SPECS, ids=str)


def raw(x: Tensor) -> Tensor:
    """Bits, so that NaN equals NaN and -0 differs from 0; NaN payloads don't count."""
    return torch.where(x.isnan(), 0x7FC00000, x.view(torch.int32)) if x.dtype == torch.float32 else x


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(raw(p), raw(q)) for p, q in zip(a, b, strict=True))


def hexes(codes: Tensor) -> str:
    return bytes(codes.flatten().tolist()).hex(" ").upper()


def word(x: Tensor) -> str:
    return f"{x.view(torch.int32).item():08X}"


# --- published vectors


def test_tv1() -> None:
    eighth = 2.0**-10
    blocks: list[list[float]] = [
        [2688, -1344, 672, 100],
        [0.25, -0.25, 0.75, -0.75, 1.25, 1.75, 2.5, -2.5, 3.5, 5, -5, 6, 0.2, 0.3, 4.9, 5.1],
        [],
        [6.375, -6.375, 6, 5, 3, 0.25],
        [6 * eighth, -eighth],
        [9 * 2.0**-9, 2.0**-9, -(2.0**-7)],
        [(i - 7) * 0.1 for i in range(16)],
        [-4.7, 4.7, 0.39, -0.4],
    ]
    x = torch.tensor([v for b in blocks for v in b + [0.0] * (16 - len(b))]).reshape(1, 128)
    codes, scale, outer = quantize(x, DOUBLE)
    assert word(outer) == "3F800000"
    assert hexes(scale) == "7E 38 01 38 00 02 21 35"
    expected = ["D703", "80A242C4667E1076", "", "F76705", "80", "160C", "EEDEBC0931546676", "7F91"]
    assert codes.flatten().tolist() == [b for e in expected for b in bytes.fromhex(e.ljust(16, "0"))]
    value = dequantize([codes, scale, outer], DOUBLE).reshape(8, 16)
    assert value[0, :4].tolist() == [2688, -1344, 672, 0]
    assert value[1].tolist() == [0, 0, 1, -1, 1, 2, 2, -2, 4, 4, -4, 6, 0, 0.5, 4, 6]
    assert math.copysign(1, value[1, 1].item()) < 0
    assert value[3, :6].tolist() == [6, -6, 6, 4, 3, 0]
    assert not value[4].any()
    assert value[5, :3].tolist() == [0.015625, 0.001953125, -0.0078125]
    assert value[7, :4].tolist() == [-4.875, 4.875, 0.40625, -0.40625]


def test_tv2() -> None:
    x = ((torch.arange(128) - 63.5) / 16).reshape(1, 128)
    payload = quantize(x, DOUBLE)
    assert word(payload[2]) == "3AC18618"
    assert hexes(payload[1]) == "7E 7A 76 6E 6E 76 7A 7E"
    assert hexes(payload[0]).replace(" ", "") == (
        "FFFFFFFFFFEFEEEE" "FFFFFFFFFFEEEEEE" "FFFFFFEEEEEEDEDD" "FFEFEEDECDBCAB89"
        "1032435465667677" "5565666666777777" "6666667777777777" "6666767777777777"
    )  # fmt: skip
    value = dequantize(payload, DOUBLE).double()
    assert (x - value).abs().sum().item() == pytest.approx(25.3216147, abs=1e-6)
    assert value.sum().item() == pytest.approx(0, abs=1e-5)
    assert value.square().sum().item() == pytest.approx(708.914178, abs=1e-4)


@pytest.mark.parametrize(("target", "greatest"), [(0.0, 6.283464), (UNBIASED_TARGET, 5.913849)])
def test_tv2_clipping(target: float, greatest: float) -> None:
    x = ((torch.arange(128) - 63.5) / 16).reshape(1, 128)
    _, scale, outer = quantize(x, OperandSpec("e2m1", (1, 16), "e4m3fn", (1, 128), target=target))
    y = x.reshape(8, 16) * inverse(scale, "e4m3fn", outer).reshape(8, 1)
    assert y.abs().max().item() == pytest.approx(greatest, abs=1e-6)


def test_unbiased_target_never_clips() -> None:
    x = torch.randn(64, 512) * torch.randn(64, 512).exp()
    for outer in ((1, 128), (-1, -1)):
        _, scale, out = quantize(x, OperandSpec("e2m1", (1, 16), "e4m3fn", outer, target=UNBIASED_TARGET))
        wide = out.repeat_interleave(8, 1) if outer == (1, 128) else out
        inv = inverse(scale, "e4m3fn", wide)
        assert (x * inv.repeat_interleave(16, 1)).abs().max() <= 6 * (1 + 1e-6)


def test_tv3() -> None:
    x = torch.arange(16.0) - 7.5
    x[3] = 100
    signs = torch.tensor(TE_SIGNS, dtype=torch.float32)
    y = rotate(x.reshape(1, 16), 16, signs)
    expected = [-33.125, 18.625, 25.125, -26.625, -27.125, 25.625, 19.125, -17.625]
    expected += [-26.125, 25.625, 19.125, -24.625, -33.125, 23.625, 28.125, -26.625]
    assert y.flatten().tolist() == expected
    codes, scale, outer = quantize(y.repeat(1, 8), DOUBLE)
    assert word(outer) == "3C49E79F"
    assert hexes(scale) == " ".join(["7E"] * 8)
    assert hexes(codes) == " ".join(["5F E6 6E D5 6E E5 6F E7"] * 8)


def test_tv4() -> None:
    y = torch.tensor([0.1, -0.3, 0.5, 0.6, -0.9, 1.1, 1.6, -1.9, 2.2, 2.9, 3.3, -3.6, 4.4, 5, -5.9, 6])
    u = torch.tensor([(((7 * i) % 16) * 4096 + 2048) for i in range(16)], dtype=torch.int32)
    rounded = round_to_grid(y, E2M1, "stochastic", u)
    assert rounded.tolist() == [0.5, -0.5, 0.5, 0.5, -1, 1, 1.5, -2, 2, 2, 3, -3, 4, 4, -6, 6]
    assert hexes(pack(encode(rounded, E2M1))) == "91 11 2A C3 44 D5 66 7F"


def test_tv5_four_over_six() -> None:
    x = torch.tensor([10.0, 20, 30, 40]).repeat(1, 4)
    plain = OperandSpec("e2m1", (1, 16), "e4m3fn", (-1, -1))
    codes, scale, outer = quantize(x, plain)
    assert word(outer) == "3C73CF3D"
    assert hexes(scale) == "7E"
    assert dequantize([codes, scale, outer], plain)[0, :4].tolist() == pytest.approx([10, 20, 26.6667, 40], abs=1e-4)
    either = OperandSpec("e2m1", (1, 16), "e4m3fn", (-1, -1), four_over_six=True)
    payload = quantize(x, either)
    assert word(payload[2]) == "3CD55555"
    assert hexes(payload[1]) == "7C"
    torch.testing.assert_close(dequantize(payload, either), x, rtol=1e-6, atol=0)
    two = torch.cat((x, torch.full((1, 16), 64.0)), 1)
    payload = quantize(two, either)
    assert hexes(payload[1]) == "77 7C"
    torch.testing.assert_close(dequantize(payload, either), two, rtol=1e-6, atol=0)


def test_tv7() -> None:
    x = torch.zeros(1, 32)
    x[0, :5] = torch.tensor([1, -0.875, 0.3, 1e-3, 0.5])
    spec = OperandSpec("e4m3fn", (1, 32), "e8m0", rule="rceil")
    codes, scale = quantize(x, spec)
    assert scale.item() == 0x77
    assert hexes(codes[0, :5]) == "78 F6 6A 28 70"
    assert dequantize([codes, scale], spec)[0, :5].tolist() == [1, -0.875, 0.3125, 0.0009765625, 0.5]


# --- codes


@pytest.mark.parametrize("name", FORMATS)
def test_encode_inverts_decode(name: str) -> None:
    fmt = get_format(name)
    codes = torch.arange(1 << fmt.bits, dtype=torch.uint8)
    value = decode(codes, fmt)
    plain = value.abs() <= fmt.max  # neither NaN, infinity nor the code below -max that no quantizer writes
    assert torch.equal(encode(round_to_grid(value[plain], fmt, "rne"), fmt), codes[plain])
    infinite = value.isinf()
    assert torch.equal(encode(value[infinite], fmt), codes[infinite])
    assert decode(encode(value[value.isnan()], fmt), fmt).isnan().all()


def test_pack_round_trip() -> None:
    codes = torch.randint(0, 16, (5, 64), dtype=torch.uint8)
    assert torch.equal(unpack(pack(codes)), codes)
    assert pack(torch.tensor([[1, 2]], dtype=torch.uint8)).item() == 0x21


# --- special values


@each_spec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_stays_not_finite(spec: OperandSpec, bad: float) -> None:
    x = torch.randn(32, 256)
    x[3, 17] = bad
    value = fake_quantize(x, spec)
    assert not value[3, 17].isfinite()
    if spec.rule != "rceil_satfinite" or math.isnan(bad):  # there an infinity decodes to infinity and the rest to ~0
        assert value[3, 16:32].isnan().all()
        if spec.outer == (1, 128):
            assert value[3, :128].isnan().all()
    if spec.block[0] > 0 and spec.outer != (-1, -1):
        assert value[20].isfinite().all()


@each_spec
def test_zero_and_subnormal_blocks(spec: OperandSpec) -> None:
    x = torch.zeros(16, 256)
    x[:, 1] = -0.0
    assert (fake_quantize(x, spec) == 0).all()
    for tiny in (2.0**-149, 2.0**-140, 2.0**-126, 1e-38):
        x[:, ::3] = tiny
        x[:, 1::3] = -0.0
        value = fake_quantize(x, spec)
        assert value.isfinite().all()
        assert (value[:, 1::3] == 0).all()
        assert (value.abs() <= 2.0**-120).all()


@pytest.mark.parametrize("name", FORMATS)
def test_delayed(name: str) -> None:
    spec, fmt = OperandSpec(name, scaling="delayed"), get_format(name)
    x = torch.randn(8, 32)
    window = torch.tensor(1.0)
    scale = quantize(x, spec, amax=window)[1]
    assert scale.item() == (torch.tensor(1.0) / torch.tensor(fmt.max)).item()
    assert fake_quantize(x, spec, amax=window).abs().max() <= 1.0 + 1e-6  # beyond the window: saturated
    assert same(quantize(x, spec, amax=torch.zeros(())), quantize(x, spec))
    for bad in (math.nan, math.inf, -math.inf):
        x[2, 3] = bad
        value = fake_quantize(x, spec, amax=window)
        assert value[2, 3].isnan()
        if fmt.nan_code is not None:
            assert value.isnan().sum() == 1
    assert fake_quantize(torch.ones(2, 4), spec, amax=torch.tensor(math.nan)).isnan().all()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    spec=st.sampled_from(SPECS),
    values=st.lists(st.floats(width=32), min_size=1, max_size=40),
    rounding=st.sampled_from(["rne", "rna", "stochastic"]),
    hadamard=st.sampled_from([0, 16]),
    window=st.one_of(st.none(), st.floats(0, width=32)),
)
def test_nan_never_becomes_a_number(
    spec: OperandSpec, values: list[float], rounding: str, hadamard: int, window: float | None
) -> None:
    spec = replace(spec, rounding=rounding, hadamard=hadamard)
    x = torch.tensor([values])
    amax = torch.tensor(window) if window is not None and spec.block == (-1, -1) else None
    value = fake_quantize(x, spec, amax=amax, seed=SEED)
    assert not value[~x.isfinite()].isfinite().any()
    if not hadamard and amax is None and x.isfinite().all() and spec.rule != "even":
        assert not value.isnan().any()


# --- shapes


@each_spec
def test_shapes_padding_and_payload(spec: OperandSpec) -> None:
    for rows, k in ((5, 37), (1, 1), (0, 40), (33, 256)):
        x = torch.randn(rows, k).to(torch.bfloat16)
        payload = quantize(x, spec)
        assert [(tuple(p.shape), p.dtype) for p in payload] == payload_like(rows, k, spec)
        value = dequantize(payload, spec)
        assert value.shape == (rows, padded_k(k, spec))
        assert (value[:, k:] == 0).all()
        wide = torch.nn.functional.pad(x, (0, padded_k(k, spec) - k))
        assert same(payload, quantize(wide, spec))


def test_high_precision_is_left_alone() -> None:
    x = torch.randn(3, 5)
    assert quantize(x, OperandSpec())[0] is x
    assert torch.equal(fake_quantize(x, OperandSpec()), x)


def test_transposed_blocks_agree() -> None:
    x = torch.randn(48, 32)
    for text in ("e4m3fn(block=16x16)", "e2m1(block=16x16,scale=e4m3fn,outer=-1x-1)", "hif8"):
        spec = parse_operand(text)
        assert torch.equal(fake_quantize(x, spec).t(), fake_quantize(x.t().contiguous(), spec))
        assert same(quantize(x.t(), spec), quantize(x.t().contiguous(), spec))


def test_refusals() -> None:
    x = torch.randn(2, 32)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("e2m1(rounding=stochastic)", {}),
        ("e2m1(block=1x16)", {"amax": torch.ones(())}),
        ("e2m1(block=1x16,outer=1x128)", {}),
        ("e2m1(block=1x32,scale=e8m0,rule=rciel)", {}),
        ("e2m1(block=1x32,scale=e4m3fn,outer=1x48)", {}),
        ("e2m1(four_over_six=true)", {}),
    ]
    for text, kwargs in cases:
        with pytest.raises(UnsupportedError):
            quantize(x, parse_operand(text), **kwargs)


# --- rounding at random


def test_stochastic_quantize_is_unbiased_and_reproducible() -> None:
    spec = OperandSpec("e2m1", (1, 16), "e4m3fn", (1, 128), target=UNBIASED_TARGET, rounding="stochastic")
    x = torch.randn(1, 128)
    draws = fake_quantize(x.repeat(4096, 1), spec, seed=SEED, stream=1).double()
    error = (draws.mean(0) - x[0]) / (draws.std(0) / 64 + 1e-5)
    assert error.abs().max() < 5
    assert same(quantize(x, spec, seed=SEED, stream=1), quantize(x, spec, seed=SEED.clone(), stream=1))
    assert not same(quantize(x, spec, seed=SEED, stream=1), quantize(x, spec, seed=SEED, stream=2))


# --- compile

COMPILED = [
    "e2m1(block=1x16,scale=e4m3fn,outer=1x128,rounding=stochastic,hadamard=16)",
    "hif8(rounding=rna)",
    "e4m3fn(block=1x32,scale=e8m0,rule=rceil_satfinite)",
]


@pytest.mark.parametrize("text", COMPILED)
def test_compiled_equals_eager(text: str) -> None:
    spec = parse_operand(text)

    def both(x: Tensor, seed: Tensor) -> list[Tensor]:
        payload = quantize(x, spec, seed=seed, stream=1, sign_stream=16)
        return [*payload, dequantize(payload, spec)]

    torch._dynamo.reset()
    compiled = torch.compile(both, fullgraph=True)  # not dynamic=True, which makes the spec's own integers symbolic
    for rows in (12, 5):
        x = torch.randn(rows, 160) * (torch.randn(rows, 160) * 6).exp()
        x[1, 40:60] *= 1e-38
        if rows == 12 and spec.block[0] > 0:
            x[2, 3], x[3, 5] = math.nan, math.inf
        torch._dynamo.mark_dynamic(x, 0)
        assert same(compiled(x, SEED), both(x, SEED))


def test_e4m3_scale_saturates() -> None:
    spec = OperandSpec("e2m1", (1, 16), "e4m3fn")
    assert quantize(torch.full((1, 16), 1e6), spec)[1].item() == 0x7E
    assert decode(quantize(torch.zeros(1, 16), spec)[1], E4M3FN).item() == 2.0**-9
    assert e8m0_scale(torch.zeros(1), E2M1, "nearest").item() == 0
