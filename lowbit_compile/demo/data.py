"""Batches of the text that ships with the package (see ``data/README.md``), tokenized when a run asks for it."""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import torch
from torch import Tensor

BYTES_PER_TOKEN = 3.3  # a little under the tokenizer's 3.47, so that an estimate never comes out short
SEPARATOR = 0
SPLITS = ("train", "val")


def _bytes(name: str) -> bytes:
    return (resources.files(__package__) / "data" / name).read_bytes()


@cache
def tokenizer() -> Any:
    """The byte-level BPE of 8192 tokens that the text was sampled for; id 0 separates documents."""
    from tokenizers import Tokenizer  # imported here: a policy check needs no tokenizer

    return Tokenizer.from_str(_bytes("bpe8k.json").decode())


@cache
def documents(split: str) -> tuple[str, ...]:
    """Whole documents of ``"train"`` or ``"val"``, grouped by section."""
    if split not in SPLITS:
        raise ValueError(f"split is one of {', '.join(SPLITS)}, not {split!r}")
    return tuple(lzma.decompress(_bytes(f"{split}.bin.xz")).decode().split("\0"))


def spread(split: str, max_bytes: float) -> list[str]:
    """Documents of about ``max_bytes`` in all, taken evenly over the split so that every section is there."""
    docs = documents(split)
    total = sum(len(d) for d in docs)
    if total <= max_bytes:
        return list(docs)
    chosen, seen, kept = [], 0, 0
    for doc in docs:
        seen += len(doc)
        if kept < seen * max_bytes / total:
            chosen.append(doc)
            kept += len(doc)
    return chosen


@cache
def token_ids(split: str, need: int) -> Tensor:
    """At least ``need`` token ids of the split where it has as many, all of them otherwise."""
    encoded = tokenizer().encode_batch_fast(spread(split, need * BYTES_PER_TOKEN * 1.1))
    parts = [np.array([*e.ids, SEPARATOR], dtype=np.int32) for e in encoded]
    return torch.from_numpy(np.concatenate(parts))


def batches(split: str, *, steps: int, batch: int, context: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """``steps`` pairs (tokens, targets), each [batch, context]: windows drawn at random, the same for the same seed."""
    ids = token_ids(split, max(steps * batch * context, batch * (context + 1)))
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(ids) - context, (steps, batch, 1), generator=generator)
    offsets = torch.arange(context + 1)
    for start in starts:
        windows = ids[start + offsets].long()
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
