"""Time of work on a CUDA device: captured in a CUDA graph, so that launches cost nothing; the median of the replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch

WARM_UPS, REPLAYS = 3, 15


def need_cuda(what: str) -> str:
    """The card's name; ends the program with a message where there is none."""
    if not torch.cuda.is_available():
        raise SystemExit(f"{what} measures a CUDA device, and this machine has none")
    return torch.cuda.get_device_name()


def captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """One graph that makes all ``calls``, each of which has run before (kernels are compiled by then)."""
    for _ in range(WARM_UPS):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def microseconds(*candidates: Sequence[Callable[[], object]]) -> list[float]:
    """Median time of one call for each candidate, a list of equal calls on different data; candidates take turns."""
    graphs = [captured(calls) for calls in candidates]
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(REPLAYS):
        for graph, calls, found in zip(graphs, candidates, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end) * 1000 / len(calls))
    return [median(found) for found in times]


def copy_bandwidth() -> float:
    """Bytes read and written per microsecond by the faster of a memcpy and an elementwise kernel, 1 GiB of data."""
    source, target = (torch.randn(1 << 28, device="cuda") for _ in range(2))
    times = microseconds([lambda: target.copy_(source)], [lambda: torch.neg(source, out=target)])
    return 2 * source.nbytes / min(times)
