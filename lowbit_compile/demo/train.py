"""Trains the demo model in BF16 and again through the ``lowbit`` backend, on the same batches, and compares the two."""

from __future__ import annotations

import csv
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import lowbit_compile

from .. import bars, compat
from ..errors import LowbitError
from ..policy_file import load_policy
from . import data
from .model import CPU_CONFIG, GPU_CONFIG, LanguageModel, ModelConfig, parameter_count

DEFAULT_POLICY = "tetrajet_v2"
WARM_STEPS = 3  # compile and first-touch time stays out of the tokens per second
PROMPT = "In the year of"


@dataclass(frozen=True)
class Setup:
    """What both runs share."""

    model: ModelConfig
    batch: int
    steps: int
    learning_rate: float
    eval_batches: int
    device: str
    seed: int
    sample_tokens: int = 32

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.model.context


@dataclass
class Run:
    """What one run gave."""

    name: str
    losses: list[float] = field(default_factory=list)
    eval_loss: float = math.nan
    tokens_per_s: float = math.nan
    peak_memory_mb: float = math.nan
    graphs: int = 0
    recompiles: int = 0
    seconds: float = math.nan
    sample: str = ""


def setup_for(device: str | None, steps: int | None, seed: int) -> Setup:
    """The CPU preset (about a minute a run on two cores) or the GPU one (82 million parameters)."""
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        kind = torch.device(where).type
    except RuntimeError:
        raise LowbitError(f"unknown device {where!r}; the demo runs on cpu and cuda") from None
    if kind not in ("cpu", "cuda"):
        raise LowbitError(f"the demo runs on cpu and cuda, not on {where!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise LowbitError(f"device {where!r}: torch sees no CUDA device here; leave --device out or name cpu")
    if steps is not None and steps <= WARM_STEPS:
        raise LowbitError(f"steps is {steps}; the demo needs more than {WARM_STEPS}, which warm up and aren't timed")
    if kind == "cuda":
        return Setup(GPU_CONFIG, 16, steps or 200, 6e-4, 16, where, seed)
    return Setup(CPU_CONFIG, 8, steps or 120, 3e-3, 16, where, seed)


def run_demo(
    policy: str | os.PathLike[str] = DEFAULT_POLICY,
    *,
    steps: int | None = None,
    device: str | None = None,
    out: str | os.PathLike[str] = "lowbit_demo",
    progress: bool = True,
    seed: int = 0,
    backend: str = "lowbit",
) -> dict[str, Any]:
    """Both runs, one after the other; writes ``report.json``, ``loss.csv``, ``loss.png`` and ``graphs/`` to ``out``.

    Args:
        policy: preset or policy file of the second run.
        steps: optimizer steps of each run, the device's preset when None.
        device: ``"cpu"``, ``"cuda"``, or None for the best there is.
        progress: a bar on stderr.
        seed: of the weights, the batches and the sampled line.
        backend: torch.compile backend of the second run; another one than ``"lowbit"`` gets no policy (tests).

    Returns: everything that ``report.json`` holds.
    """
    start = time.perf_counter()
    checked = load_policy(policy)
    setup = setup_for(device, steps, seed)
    folder = Path(out)
    (folder / "graphs").mkdir(parents=True, exist_ok=True)
    options = {"policy": checked, "dump_dir": str(folder / "graphs")} if backend == "lowbit" else None
    with tqdm(total=2 * setup.steps, disable=not progress, file=sys.stderr, unit="step") as bar:
        base, _ = _run("bf16", setup, "inductor", None, bar)
        low, linears = _run("lowbit", setup, backend, options, bar)
    result = {
        "policy": str(policy),
        **_facts(setup),
        "loss_ratio": low.eval_loss / base.eval_loss,
        "seconds": time.perf_counter() - start,
        "linears": linears,
        "runs": {"bf16": asdict(base), "lowbit": asdict(low)},
        "folder": str(folder),
    }
    _dump(folder, result)
    return result


def _facts(setup: Setup) -> dict[str, Any]:
    cuda = setup.device.startswith("cuda")
    with torch.device("meta"):
        parameters = parameter_count(LanguageModel(setup.model))
    return {
        "device": setup.device,
        "card": torch.cuda.get_device_name(setup.device) if cuda else "cpu",
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": bars.command_line(),
        "seed": setup.seed,
        "steps": setup.steps,
        "tokens_per_step": setup.tokens_per_step,
        "parameters": parameters,
        "memory_is": "CUDA max_memory_allocated" if cuda else "peak RSS of the process so far (ru_maxrss)",
    }


def _run(
    name: str, setup: Setup, backend: str, options: dict[str, Any] | None, bar: tqdm[Any]
) -> tuple[Run, list[dict[str, Any]]]:
    """One training run, its evaluation and its sampled line; also the report's linears where it has one."""
    torch.compiler.reset()
    before = compat.graphs_compiled()
    cuda = setup.device.startswith("cuda")
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(setup.device)
    torch.manual_seed(setup.seed)
    model = LanguageModel(setup.model).to(setup.device)
    compiled = torch.compile(model, backend=backend, options=options)
    run = Run(name)

    def graphs() -> int:
        """Graphs of the model so far; the low-bit run also compiles small functions of its own."""
        own = lowbit_compile.report(model).graphs
        return own if backend == "lowbit" else compat.graphs_compiled() - before

    start = time.perf_counter()
    bar.set_description(f"{name} compiles")
    try:
        step_seconds = _train(compiled, setup, run, bar, graphs)
    except RuntimeError as error:  # Dynamo wraps what a backend raises; the user gets the message inside
        inner = getattr(error, "inner_exception", None)
        if isinstance(inner, LowbitError):
            raise inner from None
        raise
    run.tokens_per_s = setup.tokens_per_step / median(step_seconds[WARM_STEPS:])
    run.peak_memory_mb = _peak_memory_mb(setup.device)
    bar.set_description(f"{name} evaluates")
    run.eval_loss = _evaluate(compiled, setup)
    run.sample = _sample(compiled, setup)
    run.seconds = time.perf_counter() - start
    run.graphs = graphs()
    return run, [record.to_dict() for record in lowbit_compile.report(model).records]


def _train(compiled: Any, setup: Setup, run: Run, bar: tqdm[Any], graphs: Callable[[], int]) -> list[float]:
    """Trains, notes every loss and what was compiled after the first step, and returns the seconds of every step."""
    optimizer = make_optimizer(compiled, setup)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _warm_cosine(step, setup.steps))
    seconds: list[float] = []
    first = 0
    for tokens, targets in batches("train", setup, setup.steps, setup.seed):
        start = time.perf_counter()
        with torch.autocast(tokens.device.type, torch.bfloat16):
            loss = compiled(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(compiled.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        first = graphs() if not seconds else first
        run.losses.append(loss.item())  # waits for the device, so the time below is the step's
        seconds.append(time.perf_counter() - start)
        if not math.isfinite(run.losses[-1]):
            raise LowbitError(f"{run.name}: the loss is {run.losses[-1]} at step {len(run.losses)}; the run diverged")
        bar.set_description(run.name, refresh=False)
        bar.set_postfix(loss=f"{run.losses[-1]:.3f}", refresh=False)
        bar.update()
    run.recompiles = graphs() - first
    return seconds


def make_optimizer(model: nn.Module, setup: Setup) -> torch.optim.Optimizer:
    """Fused AdamW on the float32 weights; weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=setup.learning_rate, betas=(0.9, 0.95), fused=True)


def _warm_cosine(step: int, steps: int) -> float:
    """Linear warm-up over a tenth of the run, then a cosine down to a tenth of the peak."""
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, steps - warm))))


def batches(split: str, setup: Setup, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    for tokens, targets in data.batches(split, steps=steps, batch=setup.batch, context=setup.model.context, seed=seed):
        yield tokens.to(setup.device), targets.to(setup.device)


def _logits(compiled: Any, tokens: Tensor) -> Tensor:
    """Evaluation and sampling share this call and its shape, so both cost one further graph, not two."""
    with torch.no_grad(), torch.autocast(tokens.device.type, torch.bfloat16):
        logits: Tensor = compiled(tokens)
    return logits


def _evaluate(compiled: Any, setup: Setup) -> float:
    """Mean cross entropy of the same validation batches whatever the seed."""
    losses = [
        F.cross_entropy(_logits(compiled, tokens).float().flatten(0, 1), targets.flatten()).item()
        for tokens, targets in batches("val", setup, setup.eval_batches, seed=0)
    ]
    return sum(losses) / len(losses)


def _sample(compiled: Any, setup: Setup) -> str:
    """A line at temperature 0.8, written by the compiled model into a context of fixed size."""
    ids = data.tokenizer().encode(PROMPT).ids
    context = torch.full((setup.batch, setup.model.context), data.SEPARATOR, device=setup.device)
    context[:, : len(ids)] = torch.tensor(ids, device=setup.device)
    generator = torch.Generator().manual_seed(setup.seed)
    for _ in range(setup.sample_tokens):
        scores = _logits(compiled, context)[0, len(ids) - 1].float().cpu() / 0.8
        scores[data.SEPARATOR] = -math.inf
        ids.append(int(torch.multinomial(scores.softmax(0), 1, generator=generator)))
        context[:, len(ids) - 1] = ids[-1]
    return " ".join(data.tokenizer().decode(ids).split())


def _peak_memory_mb(device: str) -> float:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device) / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def _dump(folder: Path, result: dict[str, Any]) -> None:
    (folder / "report.json").write_text(json.dumps(result, indent=1) + "\n")
    base, low = result["runs"]["bf16"]["losses"], result["runs"]["lowbit"]["losses"]
    with (folder / "loss.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "bf16", "lowbit"])
        writer.writerows(zip(range(1, len(base) + 1), base, low, strict=True))
    _plot(folder / "loss.png", base, low, result["policy"])


def _plot(path: Path, base: list[float], low: list[float], policy: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps = range(1, len(base) + 1)
    axes.plot(steps, base, label="bf16")
    axes.plot(steps, low, label=f"lowbit, {policy}", linestyle="--")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("training loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
