"""The one exception that a user is meant to read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake that the user can mend: one line naming the field, the value and the remedy.

    The command line prints it without a traceback and exits with status 2.
    """


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message, or its type if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def one_line(error: Exception) -> str:
    """Return an exception's message without its line breaks, or its type if it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the candidate closest to `word`, or an empty string."""
    close = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}'?)" if close else ""
