"""Shared by all tiers."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported

sys.path.insert(0, str(pathlib.Path(__file__).parent / "graph"))


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
