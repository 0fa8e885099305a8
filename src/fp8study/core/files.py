"""Where things are in a checkout, locks that cannot be left behind, and results that are kept.

A lock belongs to the open file, not to its name: it lasts as long as any process holds that file
open, our children included if they are handed the descriptor, and the operating system releases it
however they end.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import TypeVar

from fp8study.core.errors import UserError, one_line

T = TypeVar("T")


def project_root() -> Path:
    """Return the nearest folder, from the current one upwards, that holds ``pipelines/studies``.

    Outside a checkout that is the current folder, so that ``results/`` appears where one works.
    """
    here = Path.cwd()
    parents = (here, *here.parents)
    return next((f for f in parents if (f / "pipelines" / "studies").is_dir()), here)


def studies_dir() -> Path:
    return project_root() / "pipelines" / "studies"


def results_dir() -> Path:
    """Return the folder that holds ``local/`` and ``reference/``."""
    return project_root() / "results"


def own_results() -> Path:
    """Return the folder of what was run here: a folder a study in it."""
    return results_dir() / "local"


def report_dir() -> Path:
    return project_root() / "report"


def cache_dir() -> Path:
    """Return ``$FP8STUDY_CACHE``, or ``fp8study`` below the user's cache folder."""
    chosen = os.environ.get("FP8STUDY_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(chosen) if chosen else Path(base) / "fp8study"


@contextmanager
def writing(
    field: str, path: Path, remedy: str = "choose a writable folder with free space"
) -> Iterator[None]:
    """Name what the user set to get here, what could not be written, and the remedy.

    Raises:
        UserError: Instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        why = _broken_link(path) or error.strerror or one_line(error)
        raise UserError(f"{field}: cannot write '{path}' ({why}); {remedy}") from error


def _broken_link(path: Path) -> str | None:
    """Name the link to nothing on a path, of which the system says that the file exists."""
    links = (f for f in (path, *path.parents) if f.is_symlink() and not f.exists())
    link = next(links, None)
    return f"'{link}' is a link to '{link.readlink()}', which is not there" if link else None


def check_writable(folder: Path, field: str) -> None:
    """Refuse a folder that cannot be written, or not be made, without making it.

    Raises:
        UserError: It names `field`, what the user set to get here.
    """
    with writing(field, folder):
        parents = (folder, *folder.absolute().parents)
        there = next(f for f in parents if f.exists() or f.is_symlink())
        TemporaryFile(dir=there).close()


def open_lock(path: Path, field: str) -> int:
    """Open a lock file, with its folder, and return the descriptor; nothing is locked yet.

    Raises:
        UserError: The folder cannot be written; it names `field`, what the user set to get here.
    """
    with writing(field, path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def try_lock(descriptor: int) -> bool:
    """Take the lock if nobody holds it; return whether we have it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_held(path: Path) -> bool:
    """Return whether somebody holds a lock file, or may: what cannot be asked counts as held."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def locked(path: Path, field: str, busy: str | None = None) -> Iterator[int]:
    """Hold a lock, opened as by `open_lock`, and yield its descriptor.

    Raises:
        UserError: The folder cannot be written, or somebody else holds the lock: then it says
            `busy`. Without `busy` we wait for them.
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


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old one or the whole new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def kept(name: str, sources: Iterable[Path], make: Callable[[], T]) -> T:
    """Return what `make` returned last time, unless a file changed since.

    Args:
        name: Of what is kept; there is one at a time.
        sources: The files that it is made of, known by name, size and time of change. This
            package's own code is one of them.
        make: Makes it anew; its result can be pickled.
    """
    code = Path(__file__).parents[1].rglob("*.py")
    digest = hashlib.sha256(sys.version.encode())
    for path in sorted({*sources, *code}):
        facts = path.stat()
        digest.update(f"{path}\0{facts.st_size}\0{facts.st_mtime_ns}\0".encode())
    key, place = digest.hexdigest(), cache_dir() / f"{name}.pickle"
    try:
        with place.open("rb") as stream:
            if pickle.load(stream) == key:
                return pickle.load(stream)
    except Exception:  # a damaged pickle raises almost anything
        with suppress(OSError):
            place.unlink()  # none yet, damaged, or of another version of pandas: made anew
    made = make()
    part = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as stream:
            pickle.dump(key, stream)
            pickle.dump(made, stream)
        part.replace(place)
    except OSError:  # a full or closed disk costs time, no result
        with suppress(OSError):
            part.unlink()
    return made
