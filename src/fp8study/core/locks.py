"""Lock files that cannot be left behind.

The lock belongs to the open file, not to its name: it lasts as long as any process holds that
file open, our children included if they are handed the descriptor, and the operating system
releases it however they end.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fp8study.core.errors import UserError


def open_lock(path: Path, field: str) -> int:
    """Open a lock file, with its folder, and return the descriptor; nothing is locked yet.

    Args:
        path: The lock file.
        field: What the user set to get here, for the message.

    Raises:
        UserError: The folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UserError(
            f"{field}: cannot write '{path.parent}' ({error.strerror}); choose a writable folder "
            "with free space"
        ) from error


def try_lock(descriptor: int) -> bool:
    """Take the lock if nobody holds it; return whether we have it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(path: Path, field: str, busy: str | None = None) -> Iterator[int]:
    """Hold a lock and yield its descriptor.

    Args:
        path: The lock file.
        field: As `open_lock`.
        busy: What to say if somebody else holds it; None waits for them instead.

    Raises:
        UserError: The folder cannot be written, or the lock is held and `busy` given.
    """
    descriptor = open_lock(path, field)
    try:
        if busy is None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        elif not try_lock(descriptor):
            raise UserError(busy)
        yield descriptor
    finally:
        os.close(descriptor)
