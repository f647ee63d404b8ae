"""One record per linear feeds every view: tables, JSON, the demo."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tabulate import tabulate


@dataclass(frozen=True)
class SiteRecord:
    """One linear as it was compiled last. ``reason`` is set where it was kept in high precision; ``state`` says what
    runs beside it between steps."""

    path: str
    shape: tuple[int, int]
    kind: str
    rule: str
    fprop: str
    dgrad: str
    wgrad: str
    implementation: str
    reason: str = ""
    state: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Report:
    """All linears of one model, the graphs compiled for it, and how many of those were recompiles."""

    records: list[SiteRecord] = field(default_factory=list)
    graphs: int = 0
    recompiles: int = 0

    def table(self) -> str:
        names = ("path", "shape", "kind", "rule", "fprop", "dgrad", "wgrad", "implementation", "state", "reason")
        rows = [[getattr(r, n) for n in names] for r in self.records]
        return tabulate(rows, headers=names)
