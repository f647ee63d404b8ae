"""``lowbit policy``."""

from __future__ import annotations

import argparse
from typing import Any

from tabulate import tabulate

from ..policy import Policy
from ..policy_file import load_policy


def add(commands: Any) -> None:
    policy = commands.add_parser("policy", help="work with policy files")
    check = policy.add_subparsers(required=True, metavar="COMMAND").add_parser("check", help="read a policy")
    check.add_argument("file", metavar="FILE", help="preset or policy file")
    check.set_defaults(run=_check)


def _check(args: argparse.Namespace) -> int:
    policy: Policy = load_policy(args.file)
    rows = [(rule.match, rule.recipe, rule.reason) for rule in policy.rules]
    print(tabulate(rows, headers=("match", "use", "reason"), disable_numparse=True))
    print(f"id {policy.id}")
    return 0
