"""What one ``lowbit::quantize`` produces, as records with one text form: casts of a tensor, straight or transposed.

The text crosses into the graph, ``fprop.w:rest e2m1(...) + fprop.w:outliers e4m3fn(...) > dgrad.w^T e2m1(...)``: what
is left of ``>`` is cast first and read back, its parts put together again; ``^T`` is cast along the first axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .spec import OperandSpec, parse_operand

ALL, REST, OUTLIERS = "", "rest", "outliers"


@dataclass(frozen=True)
class Cast:
    """One cast: the operand's name (``wgrad.x``, which keys its noise), numerics, and which input channels it holds.

    ``part``: all of them, the ``rest`` (outlier columns are zero, in their places) or the ``outliers`` alone, gathered.
    """

    name: str
    spec: OperandSpec
    part: str = ALL

    def __str__(self) -> str:
        return f"{self.label} {self.spec}"

    @property
    def label(self) -> str:
        return f"{self.name}:{self.part}" if self.part else self.name


@dataclass(frozen=True)
class Job:
    """One result: ``cast``, along the last axis or along the first where ``transposed``; from the values of the casts
    ``via`` (all parts that make up ``cast.part``) where the recipe says ``source: dequantized``."""

    cast: Cast
    transposed: bool = False
    via: tuple[Cast, ...] = ()

    def __str__(self) -> str:
        via = f"{' + '.join(map(str, self.via))} > " if self.via else ""
        return f"{via}{self.cast.label}{'^T' if self.transposed else ''} {self.cast.spec}"


def parse_cast(text: str) -> Cast:
    """Inverse of ``str(Cast)``."""
    label, _, spec = text.partition(" ")
    name, _, part = label.partition(":")
    return Cast(name, parse_operand(spec), part)


def parse_job(text: str) -> Job:
    """Inverse of ``str(Job)``."""
    *before, last = text.split(" > ")
    via = tuple(map(parse_cast, before[0].split(" + "))) if before else ()
    label, _, spec = last.partition(" ")
    return Job(parse_cast(f"{label.removesuffix('^T')} {spec}"), label.endswith("^T"), via)


@lru_cache(maxsize=4096)
def parse_jobs(text: str) -> tuple[Job, ...]:
    """Jobs as they cross into a graph: their texts, joined by a bar."""
    return tuple(map(parse_job, text.split(" | ")))
