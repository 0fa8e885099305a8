"""The one exception that a user is meant to read."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any


class UserError(Exception):
    """A mistake that the user can mend: one line naming the field, the value and the remedy.

    Of several mistakes a line each. The command line prints it without a traceback and exits with
    `status`.
    """

    status = 2


class NoFp8(UserError):
    """A GPU without FP8: a mistake where one is to be used, and an `answer` to who asks of it."""

    def __init__(self, mistake: str, answer: str) -> None:
        super().__init__(mistake)
        self.answer = answer


class StoppedByUser(UserError):
    """What Ctrl-C ended: a line on what is kept, and how to go on."""

    status = 130


def together(*checks: Callable[[], Any]) -> list[Any]:
    """Return what each check returns.

    Raises:
        UserError: What all of them refuse, a line each, so that it can be mended at once; of one
            its own.
    """
    found: list[Any] = []
    wrong: list[UserError] = []
    for check in checks:
        try:
            found.append(check())
        except UserError as error:
            wrong.append(error)
    if len(wrong) == 1:
        raise wrong[0]
    if wrong:
        raise UserError("\n".join(map(str, wrong)))
    return found


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message, or its type if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def one_line(error: Exception) -> str:
    """Return an exception's message without its line breaks, or its type if it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def nearest(word: str, candidates: Iterable[str], cutoff: float = 0.5) -> str:
    """Return `` (did you mean 'x'?)`` for the candidate closest to `word`, or an empty string.

    `cutoff`: how alike they must be, 0 to 1.
    """
    known = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=cutoff)
    return f" (did you mean '{known[close[0]]}'?)" if close else ""
