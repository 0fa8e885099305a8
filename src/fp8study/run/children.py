"""Children that end with their parent, and why a child ended that could not say so itself.

The parent keeps the other end of the child's standard input. When the parent is gone, even if it
was killed outright, that end closes, and the child ends itself.

    python -m fp8study.run.children MODULE [ARGUMENTS...]    runs a module on such a leash

With ``--outright`` before the module it is killed without a chance to end what it started
elsewhere, as SLURM's jobs.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

#: Signals that ask a program to end.
_STOPPING = (signal.SIGTERM, signal.SIGHUP)
#: A scheduler's, some time before it ends a run: of use to one that can save its state.
_WARNING_OF_END = signal.SIGUSR1
#: Seconds that a process has after each signal to end it.
_PATIENCE_S = 15.0
#: What torchrun reports of the rank that failed first; it names that one last.
_TORCHRUN_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank", re.MULTILINE)
_TORCHRUN_EXIT = re.compile(r"^\s*exitcode\s*: (-?\d+)", re.MULTILINE)
_ERROR = re.compile(r"^(\[\w+\]: ?)*([\w.]*\.)?\w*(Error|Exception|Interrupt)\b(?!.*ChildFailed)")
_WARNING = re.compile(r"Warning\b|^\s*warnings\.warn|^\W*[WI]\d{4} |^Failed to load |^[\s=*-]*$")


class Stopped(KeyboardInterrupt):
    """We were told to end; the message says by which signal."""


@contextmanager
def stoppable(by_warning: bool = True) -> Iterator[None]:
    """Treat `_STOPPING` like Ctrl-C in a block of code: it cleans up and says what ended it.

    `_WARNING_OF_END` too, unless it shall be ignored.

    Raises:
        Stopped: One of them has come.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(f"stopped by {signal.Signals(number).name}")

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say what a signal does
        return
    warned = stop if by_warning else signal.SIG_IGN
    with answering(_STOPPING, stop), answering((_WARNING_OF_END,), warned):
        yield


@contextmanager
def answering(
    numbers: Iterable[signal.Signals],
    answer: Callable[[int, FrameType | None], None] | signal.Handlers,
) -> Iterator[None]:
    """Answer signals in a block of the main thread's code as `answer` does."""
    before = {number: signal.signal(number, answer) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def follow_parent(whole_group: bool = False, sign: signal.Signals = signal.SIGTERM) -> None:
    """End this process, or all processes of its group, when its standard input closes."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(0 if whole_group else os.getpid(), sign)

    threading.Thread(target=watch, daemon=True).start()


def end(child: subprocess.Popen[Any]) -> None:
    """Stop a child, started with ``start_new_session=True``, and its group, ever more firmly."""
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if child.poll() is not None:
            return
        os.killpg(child.pid, sign)
        try:
            child.wait(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            continue


def end_left(leader: int, patience_s: float = _PATIENCE_S) -> None:
    """Stop what is left of a group whose leader was killed, if anything is."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGTERM)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            os.killpg(leader, 0)
            time.sleep(0.1)
        os.killpg(leader, signal.SIGKILL)


@contextmanager
def ending_after(seconds: float, child: subprocess.Popen[Any]) -> Iterator[None]:
    """End a child that is still there after so many seconds of a block of code."""
    timer = threading.Timer(seconds, end, (child,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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


if __name__ == "__main__":
    del sys.argv[0]
    outright = sys.argv[0] == "--outright"
    follow_parent(whole_group=True, sign=signal.SIGKILL if outright else signal.SIGTERM)
    del sys.argv[: int(outright)]
    sys.path.insert(0, str(Path.cwd()))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
