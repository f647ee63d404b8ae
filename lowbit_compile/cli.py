"""The ``lowbit`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .commands import demo, formats, policy
from .errors import LowbitError

COMMANDS = (demo, formats, policy)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; 2 with one line on stderr for whatever the user can put right."""
    parser = argparse.ArgumentParser(prog="lowbit", description="Low-bit training through torch.compile.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
    except LowbitError as error:
        print(f"lowbit: error: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
