"""Inductor's on-disk caches across processes: the same numerics hit and give the same bits, other numerics miss."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# reference="eager": the quantize functions are not compiled, so the counters speak of the model's graph alone.
SCRIPT = """
import hashlib, json, sys, torch
from torch import nn
from torch._dynamo.utils import counters
from lowbit_compile import backend

policy, seed, numerics = sys.argv[1:]
if numerics:  # as if a numerics source of the package had changed
    backend.implementation_hash = lambda: numerics
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
run = torch.compile(model, backend="lowbit", options={"policy": policy, "reference": "eager", "seed": int(seed)})
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = []
for _ in range(3):
    optimizer.zero_grad()
    loss = run(torch.randn(32, 64)).pow(2).mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item().hex())
weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
counts = counters["aot_autograd"] | counters["inductor"]
print(json.dumps({"numbers": [*losses, weights], "counters": counts}))
"""


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Trains in a new process; all processes share one cache, filled by the first."""
    caches = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    env = {**os.environ, **caches, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor"))}

    def run(policy="tetrajet_v2", seed=0, numerics=""):
        command = [sys.executable, "-c", SCRIPT, policy, str(seed), numerics]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="module")
def first(train):
    return train()


def assert_hit(result):
    assert counts(result, "autograd_cache") == {"hit": 1}
    assert counts(result, "fxgraph_cache") == {"hit": 2}  # forward and backward


def assert_miss(result):
    assert counts(result, "autograd_cache") == {"miss": 1, "saved": 1}
    assert counts(result, "fxgraph_cache") == {"miss": 2}


def counts(result, cache):
    """Hits, misses, bypasses... of one of the two caches."""
    return {name.removeprefix(cache + "_"): n for name, n in result["counters"].items() if name.startswith(cache)}


def test_the_first_process_fills_the_cache(first):
    assert_miss(first)


def test_a_second_process_hits_with_the_same_bits(first, train):
    second = train()
    assert_hit(second)
    assert second["numbers"] == first["numbers"]


def test_another_seed_hits_with_other_numbers(first, train):
    """State is an input of the graph, not baked into what is cached."""
    other = train(seed=1)
    assert_hit(other)
    assert other["numbers"] != first["numbers"]


def test_another_policy_misses_with_other_numbers(first, train):
    other = train(policy="mxfp8")
    assert_miss(other)
    assert other["numbers"] != first["numbers"]


def test_changed_numerics_sources_miss(first, train):
    other = train(numerics="changed")
    assert_miss(other)
    assert other["numbers"] == first["numbers"]
