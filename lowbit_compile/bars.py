"""One list of measured values (``bars.json``), written by the command that measured each; a later run replaces it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

from .errors import LowbitError


@dataclass(frozen=True)
class Bar:
    """One record. ``value`` is the worst where an id stands for several shapes; ``rows`` is the file with all rows."""

    id: str
    value: float
    unit: str
    card: str
    date: str
    command: str
    torch: str
    triton: str
    commit: str
    rows: str


def measured(values: Mapping[str, tuple[float, str]], *, card: str, rows: str) -> list[Bar]:
    """Records of ``id -> (value, unit)`` measured by this process just now."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    versions = (str(torch.__version__), _version("triton"))
    facts = (card, date, command_line(), *versions, _commit(), rows)
    return [Bar(key, value, unit, *facts) for key, (value, unit) in values.items()]


def command_line() -> str:
    """The command that this process runs, without paths of this machine."""
    as_module = "-m" in sys.orig_argv[:3]
    return " ".join(["python", *sys.orig_argv[1:]] if as_module else [Path(sys.argv[0]).name, *sys.argv[1:]])


def record(file: str | os.PathLike[str], bars: Iterable[Bar]) -> None:
    """Merges ``bars`` into the list in ``file``; records of the same id are replaced, the others kept."""
    path = Path(file)
    merged: dict[str, object] = {}
    if path.exists():
        try:
            merged = {entry["id"]: entry for entry in json.loads(path.read_text())}
        except (ValueError, TypeError, KeyError):
            raise LowbitError(f"{path}: not a list of records with an id; move it away or name another file") from None
    merged |= {bar.id: asdict(bar) for bar in bars}
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f"{path.name}.tmp")
    whole.write_text(json.dumps([merged[key] for key in sorted(merged)], indent=1) + "\n")
    whole.replace(path)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """The commit of the source tree that runs, empty for an installed package."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
