"""Every error that a user of the package can meet.

A message names the thing, the value found, the choices, and the place; :func:`nearest` adds the closest spelling.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LowbitError(ValueError):
    """Base of all errors raised by the package."""


class PolicyError(LowbitError):
    """A policy file, preset, option or rule is wrong; the message carries the file and key path."""


class UnsupportedError(LowbitError):
    """The input is valid in general but can't be handled: the message says what can."""


class RewriteError(LowbitError):
    """A pass failed on one linear; the message names it, and the original graph is left as it was."""


class StateError(LowbitError):
    """Runtime state doesn't fit the model or the policy it is loaded into."""


class LowbitWarning(UserWarning):
    """A fallback or a surprise that is worth a line, never silent."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the closest of ``choices``, or an empty string."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
