"""Counter-based random bits: Philox 4x32-10 (Salmon et al., SC 2011), the generator of Triton and of curand.

The bits are a pure function of (seed, step, site, operand, element), so eager, compiled, recomputed, replayed and
resumed runs round alike, and no generator state exists. The two key words are the seed; the four counter words are:

    counter[0] = optimizer step
    counter[1] = element index // 8   (row-major index in the padded operand)
    counter[2] = site number
    counter[3] = operand stream, see :data:`STREAMS`

The index is a word that the first round does not multiply: Inductor would fold 32-bit constant times index into one
Triton index expression, which overflows int32 (torch 2.11, H200).

One call gives 128 bits: eight elements take 16 bits each, low half of word 0 first.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF

# Every use of noise in one linear has its own stream, so that the noises of two operands are independent
# (nvfp4 pitfall P3: shared noise biases the product by about one percent). Signs belong to a GEMM, not to an operand.
STREAMS = {"dgrad.g": 0, "dgrad.w": 1, "wgrad.g": 2, "wgrad.x": 3, "fprop.x": 4, "fprop.w": 5}
SIGN_STREAMS = {"dgrad": 16, "wgrad": 17, "fprop": 18}


def _multiply(word: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """(high, low) 32 bits of a 32 x 32-bit product. By 16-bit halves: a 64-bit product overflows a signed int64,
    which is undefined in compiled C++ (seen to change the bits, torch 2.13.0 CPU)."""
    low = word * (constant & 0xFFFF)
    high = word * (constant >> 16)
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & _MASK


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four int64 tensors holding 32-bit words. Counter and key words are int64 values in [0, 2^32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high_a, low_a = _multiply(c0, _ROUND_A)
        high_b, low_b = _multiply(c2, _ROUND_B)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0 = (k0 + _KEY_A) & _MASK
        k1 = (k1 + _KEY_B) & _MASK
    return c0, c1, c2, c3


def random_words(index: Tensor, seed: Tensor, stream: int | Tensor) -> tuple[Tensor, ...]:
    """The four Philox words of each counter ``index`` (int64, any shape), int32 bit patterns of the same shape.

    ``seed`` is int64[4], key 0, key 1, step, site; ``stream`` a number or an int64 scalar.
    """
    key0, key1, step, site = (seed[i] & _MASK for i in range(4))
    words = philox((step, index, site, torch.zeros_like(index) + stream), (key0, key1))
    return tuple(word.to(torch.int32) for word in words)


def counters_for(elements: int, device: torch.device) -> Tensor:
    """The counters whose words are the noise of an operand of so many elements, int64 [count, 1]."""
    return torch.arange((elements + 7) // 8, device=device, dtype=torch.int64)[:, None]


def split_words(words: tuple[Tensor, ...], rows: int, cols: int) -> Tensor:
    """Words of :func:`random_words` as 16 bits an element, int32 [rows, cols] with values in [0, 2^16).

    Element i in row-major order takes half-word i % 8 (word 0 low, word 0 high, word 1 low, ...) of counter i // 8, so
    rows added below change nothing.
    """
    halves = torch.stack(words, -1).reshape(-1).view(torch.uint16)[: rows * cols]
    return halves.to(torch.int32).reshape(rows, cols)


def random_bits_for(rows: int, cols: int, seed: Tensor, stream: int | Tensor) -> Tensor:
    """Random 16-bit integers for an operand, int32 [rows, cols] in [0, 2^16); source: the layout above."""
    return split_words(random_words(counters_for(rows * cols, seed.device), seed, stream), rows, cols)


def random_sign_bits(width: int, seed: Tensor, stream: int | Tensor) -> Tensor:
    """``width`` <= 128 random bits, int32 [width] of 0 and 1: bit i % 32 of word i // 32 of counter 0."""
    words = torch.stack(random_words(torch.zeros((), device=seed.device, dtype=torch.int64), seed, stream))
    place = torch.arange(width, device=seed.device)
    return (words[place // 32] >> (place % 32).to(torch.int32)) & 1
