"""Random numbers: Philox's known vectors, their layout and independence, stochastic rounding, random Hadamard signs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lowbit_compile.casts import round_to_grid
from lowbit_compile.formats import ELEMENT_FORMATS, get_format
from lowbit_compile.hadamard import WIDTHS, random_signs, rotate
from lowbit_compile.random_bits import philox, random_bits_for

SEED = torch.tensor([0x12345678, 0x9ABCDEF0, 3, 5], dtype=torch.int64)


def test_philox_known_vectors() -> None:
    def words(counter: int, key: int) -> list[str]:
        c, k = torch.tensor(counter), torch.tensor(key)
        return [f"{w.item():08x}" for w in philox((c, c, c, c), (k, k))]

    assert words(0, 0) == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    assert words(0xFFFFFFFF, 0xFFFFFFFF) == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]


def test_random_bits_layout() -> None:
    zero = torch.zeros(4, dtype=torch.int64)
    assert [f"{v:04x}" for v in random_bits_for(1, 5, zero, 0)[0].tolist()] == ["e8d5", "6627", "c58d", "e169", "ac4c"]
    assert torch.equal(random_bits_for(6, 10, SEED, 2), random_bits_for(9, 10, SEED, 2)[:6])
    flat = random_bits_for(256, 256, SEED, 1).double() / 65536
    assert flat.mean().item() == pytest.approx(0.5, abs=5 / math.sqrt(12 * 65536))


@pytest.mark.parametrize("name", ELEMENT_FORMATS)
def test_stochastic_mean(name: str) -> None:
    fmt = get_format(name)
    count = 1 << 15
    for fraction in (0.03, 0.37, 0.9):
        for low, high in ((fmt.positives[2], fmt.positives[3]), (fmt.positives[-3], fmt.positives[-2])):
            x = torch.full((8, count // 8), -(low + fraction * (high - low)))
            got = round_to_grid(x, fmt, "stochastic", random_bits_for(8, count // 8, SEED, 4)).double()
            assert set(got.flatten().tolist()) == {-low, -high}
            up = (-got - low) / (high - low)
            sigma = math.sqrt(fraction * (1 - fraction) / count)
            assert up.mean().item() == pytest.approx(fraction, abs=5 * sigma + 2.0**-16)


def test_streams_are_independent() -> None:
    def noise(stream: int, seed: Tensor = SEED) -> Tensor:
        return random_bits_for(128, 256, seed, stream).double().flatten() / 65536 - 0.5

    draws = [noise(s) for s in range(4)]
    draws += [noise(0, SEED + torch.tensor(d)) for d in ([1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1])]
    correlation = torch.corrcoef(torch.stack(draws)) - torch.eye(len(draws))
    assert correlation.abs().max() < 5 / math.sqrt(128 * 256)
    for lag in (1, 4, 8, 256):
        pair = torch.stack((draws[0][lag:], draws[0][:-lag]))
        assert abs(torch.corrcoef(pair)[0, 1]) < 5 / math.sqrt(128 * 256)


@pytest.mark.parametrize("width", WIDTHS)
def test_hadamard_is_orthogonal(width: int) -> None:
    signs = random_signs(width, SEED, 16)
    assert set(signs.tolist()) == {1.0, -1.0}
    matrix = rotate(torch.eye(width), width, signs)
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(width))
    sylvester = torch.tensor([[1.0]])
    while sylvester.shape[0] < width:
        sylvester = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), sylvester)
    torch.testing.assert_close(matrix, signs[:, None] * sylvester / math.sqrt(width))
    a, b = torch.randn(3, 2 * width), torch.randn(4, 2 * width)
    torch.testing.assert_close(rotate(a, width, signs) @ rotate(b, width, signs).t(), a @ b.t(), rtol=1e-4, atol=1e-4)
