#!/usr/bin/env bash
# Makes a virtual environment, installs the package and runs the demo; arguments go to `lowbit demo`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python3 -m venv .venv
.venv/bin/pip install --quiet torch==2.13.0 triton==3.7.1 . -c constraints.txt
exec .venv/bin/lowbit demo "$@"
