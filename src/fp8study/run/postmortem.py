"""Why a process ended that could not say so itself: what was killed, or which line tells."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

#: What torchrun reports of the rank that failed first; it names that one last.
_TORCHRUN_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank", re.MULTILINE)
_TORCHRUN_EXIT = re.compile(r"^\s*exitcode\s*: (-?\d+)", re.MULTILINE)
_ERROR = re.compile(r"^(\[\w+\]: ?)*([\w.]*\.)?\w*(Error|Exception|Interrupt)\b(?!.*ChildFailed)")
_WARNING = re.compile(r"Warning\b|^\s*warnings\.warn|^\W*[WI]\d{4} |^Failed to load |^[\s=*-]*$")


class Stopped(KeyboardInterrupt):
    """We were told to end; the message says by which signal."""


@contextmanager
def stoppable() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C in a block of code: it cleans up and says what ended it.

    Raises:
        Stopped: One of them has come.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(f"stopped by {signal.Signals(number).name}")

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say what a signal does
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def killed(code: int, lines: Iterable[str]) -> str | None:
    """Return what was killed by which signal, or None if nothing was.

    Args:
        code: Exit status of the process that was started, negative after a signal.
        lines: The end of its output, with torchrun's report of ranks if it ran several.
    """
    text, who = "\n".join(lines), "the training process"
    if told := _TORCHRUN_EXIT.findall(text):
        code, who = int(told[-1]), f"rank {(_TORCHRUN_RANK.findall(text) or ['?'])[-1]}"
    if code >= 0:
        return None
    by_memory = ", as the system does when memory runs out" * (code == -signal.SIGKILL)
    return f"{who} was killed by signal {-code} ({signal.Signals(-code).name}){by_memory}"


def telling_line(lines: Iterable[str]) -> str | None:
    """Return the last line that names an error, else the last that is no warning and no ruler."""
    said = [line.strip() for line in lines if not _WARNING.search(line)]
    return next((line for line in reversed(said) if _ERROR.match(line)), said[-1] if said else None)
