"""Bad input: one clear error, and the graph as it was."""

from __future__ import annotations

import pytest
import torch
from test_backend import FAST, Mlp
from torch import nn

from lowbit_compile.backend import lowbit as lowbit_backend
from lowbit_compile.passes import rewrite


@pytest.mark.parametrize("fault", ["second site", "lint"])
def test_a_failing_rewrite_leaves_the_graph_as_it_was(fault, monkeypatch):
    seen = []

    def backend(gm, inputs):
        before, buffers = gm.print_readable(print_output=False), set(gm._buffers)
        try:
            lowbit_backend(gm, inputs, options={"policy": "mxfp8", **FAST})
        finally:
            seen.append(gm.print_readable(print_output=False) == before and set(gm._buffers) == buffers)

    original = rewrite._apply

    def failing(root, edit, *args):
        if edit.path == "mid":
            raise KeyError("broken on purpose")
        original(root, edit, *args)

    if fault == "lint":
        found = torch.fx.Graph.lint
        broken = lambda graph: 1 / 0 if "lowbit" in str(graph) else found(graph)  # noqa: E731
        monkeypatch.setattr(torch.fx.Graph, "lint", broken)
    else:
        monkeypatch.setattr(rewrite, "_apply", failing)
    with pytest.raises(Exception, match="can't be rewritten") as caught:
        torch.compile(Mlp(), backend=backend)(torch.randn(16, 40))
    assert ("mid" if fault == "second site" else "down") in str(caught.value)
    assert seen == [True]


KEEP_NOPE = {"match": "nope", "use": "keep", "reason": "x"}


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (Mlp(), {"policy": "tetrajet_v3"}, ["tetrajet_v3", "did you mean 'tetrajet_v2'"]),
        (Mlp(), {"mode": "reduce-overhed"}, ["reduce-overhed", "did you mean 'reduce-overhead'"]),
        (Mlp(), {"mode": "reduce-overhead"}, ["aot_eager ignores mode"]),
        (Mlp(), {"polcy": "bf16"}, ["polcy", "did you mean 'policy'"]),
        (Mlp(), {"policy": {"version": 1, "extends": ["mxfp8"], "rules": [KEEP_NOPE], "strict": True}}, ["nope"]),
        (Mlp(), {"policy": {"version": 1, "rules": [{**KEEP_NOPE, "match": "*"}]}}, ["no rule quantizes anything"]),
        (nn.Sequential(nn.ReLU()), {"policy": "mxfp8"}, ["no linear"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(model, options, words):
    run = torch.compile(model, backend="lowbit", options={**FAST, **options})
    with pytest.raises(Exception) as caught:  # noqa: PT011  (Dynamo wraps the error in its own type)
        run(torch.randn(16, 40))
    for word in words:
        assert word in str(caught.value)


def test_integer_weight_is_an_error():
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32, 32, dtype=torch.int32), requires_grad=False)

        def forward(self, x):
            return x @ self.weight

    run = torch.compile(Whole(), backend="lowbit", options={"policy": "mxfp8", **FAST})
    with pytest.raises(Exception, match="int32"):
        run(torch.ones(16, 32, dtype=torch.int32))


def test_complex_weight_is_an_error():
    model = nn.Linear(32, 32, bias=False).to(torch.complex64)
    run = torch.compile(nn.Sequential(model), backend="lowbit", options={"policy": "mxfp8", **FAST})
    with pytest.raises(Exception, match="complex64"):
        run(torch.randn(16, 32, dtype=torch.complex64))
