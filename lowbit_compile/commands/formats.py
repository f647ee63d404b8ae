"""``lowbit formats`` and ``lowbit presets``."""

from __future__ import annotations

import argparse
from typing import Any

from tabulate import tabulate

from ..formats import ALL_FORMATS, Format
from ..policy_file import preset_names


def add(commands: Any) -> None:
    commands.add_parser("presets", help="list the policies that ship with the package").set_defaults(run=_presets)
    commands.add_parser("formats", help="list the number formats").set_defaults(run=_formats)


def _presets(_args: argparse.Namespace) -> int:
    print("\n".join(preset_names()))
    return 0


def _formats(_args: argparse.Namespace) -> int:
    headers = ("format", "bits", "max", "min positive", "NaN", "codes")
    print(tabulate([_format_row(f) for f in ALL_FORMATS.values()], headers=headers, disable_numparse=True))
    return 0


def _format_row(fmt: Format) -> tuple[str, int, str, str, str, int]:
    smallest = next(v for v in fmt.positives if v > 0)
    has_nan = "no" if fmt.nan_code is None else "yes"
    return fmt.name, fmt.bits, f"{fmt.max:g}", f"{smallest:g}", has_nan, len(fmt.values)
