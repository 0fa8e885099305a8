"""Results that are costly to compute and cheap to keep, until what they were made of changes."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from fp8study.core.paths import cache_dir

T = TypeVar("T")


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
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError):
        pass  # none yet, or of another version of pandas: made anew
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
