"""Random Hadamard transform along the contraction axis: y = H_w (D x) / sqrt(w) on each group of w elements.

H is the Sylvester matrix in natural order and D a diagonal of random signs, the same for every group and for both
operands of a GEMM, so that the products are unchanged (TetraJet-v2, NVIDIA 2509.25149).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .errors import UnsupportedError
from .random_bits import random_sign_bits

WIDTHS = (16, 32, 64, 128)


def random_signs(width: int, seed: Tensor, stream: int | Tensor) -> Tensor:
    """Float32 [width] of +1 and -1 (bit set), from one Philox call; ``seed`` is int64[4]: key 0, key 1, step, site."""
    return 1.0 - 2.0 * random_sign_bits(width, seed, stream).to(torch.float32)


def rotate(x: Tensor, width: int, signs: Tensor) -> Tensor:
    """x [R, K] float32, K a multiple of ``width``; signs [width] float32 -> [R, K] float32.

    Butterflies in float32, distance 1, 2, 4, ... and the factor 1/sqrt(width), rounded to float32, last: a fixed order
    of additions, so that eager, compiled and kernel code agree bit for bit.
    """
    if width not in WIDTHS:
        raise UnsupportedError(f"Hadamard width {width}; possible: {', '.join(map(str, WIDTHS))}")
    rows, cols = x.shape
    y = x.reshape(rows, cols // width, width) * signs
    distance = 1
    while distance < width:
        pairs = y.reshape(rows, cols // width, width // (2 * distance), 2, distance)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((low + high, low - high), -2)
        distance *= 2
    return y.reshape(rows, cols) * (1.0 / math.sqrt(width))
