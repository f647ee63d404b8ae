#!/usr/bin/env bash
# Makes a virtual environment, installs the pinned development tools and runs every check.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python3 -m venv .venv
.venv/bin/pip install --quiet torch==2.13.0 triton==3.7.1 -e ".[dev]" -c constraints.txt
.venv/bin/ruff check .
.venv/bin/mypy
.venv/bin/pytest -n auto "$@"
