"""Where the time goes between a run's launch and its first step."""

from __future__ import annotations

import time

import psutil

#: The parts in their order; a record names each with the suffix ``_seconds``.
PARTS = ("launch", "imports", "gpu_wait", "device", "model", "sharding", "rest")


class StartupClock:
    """Splits a process's start-up into parts, each from the end of the one before."""

    def __init__(self, launched_at: float) -> None:
        """Close the first two parts: until this process existed, and until now, its imports.

        Args:
            launched_at: When the launcher started, seconds since the epoch.
        """
        existed_at = psutil.Process().create_time()
        self._last = time.time()
        self.parts: dict[str, float] = {
            "launch_seconds": max(0.0, existed_at - launched_at),
            "imports_seconds": max(0.0, self._last - existed_at),
        }

    def end(self, part: str) -> None:
        """Close a part of `PARTS`."""
        now = time.time()
        self.parts[f"{part}_seconds"] = now - self._last
        self._last = now

    @property
    def busy_seconds(self) -> float:
        """All parts closed so far, but for the wait for a GPU, which is others' time."""
        return sum(v for k, v in self.parts.items() if k != "gpu_wait_seconds")
