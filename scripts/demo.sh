#!/usr/bin/env bash
# Makes a virtual environment, installs the package and runs the demo; arguments go to `lowbit demo`.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python3 -m venv "$root/.venv"
"$root/.venv/bin/pip" install --quiet torch==2.13.0 triton==3.7.1 "$root" -c "$root/constraints.txt"
exec "$root/.venv/bin/lowbit" demo "$@"
