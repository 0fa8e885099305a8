"""All that looks at a run while it trains, from its first step to its last.

The timed window is the steps after the warm-up. Its two ends wait for the GPU; inside it nothing
does. What would disturb a timing (the profiled step, the achievable peaks) comes after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fp8study.core.config import ResolvedConfig
from fp8study.measure.clock import FinishedStep, StepMeter, from_all_ranks
from fp8study.measure.energy import PowerMeter, summarise_energy
from fp8study.measure.memory import MemoryMeter, summarise_memory


class Instruments:
    """One rank's clock, memory meter and power meter."""

    def __init__(self, config: ResolvedConfig, device: torch.device, num_steps: int) -> None:
        self._config = config
        self.clock = StepMeter(device, num_steps)
        self.memory = MemoryMeter(device)
        self.power = PowerMeter(device)

    def start(self, step: int = 0) -> None:
        """Begin the first step, counted from 0."""
        self.memory.start()
        self.clock.start(step)

    def open_window(self, replays: bool) -> Iterator[FinishedStep]:
        """Wait for the warm-up's last step, yield what is unread, and begin the timed window.

        `replays`: as `MemoryMeter.open_window`.
        """
        yield from self.clock.finish()
        self.memory.open_window(replays)
        self.power.open_window()
        self.clock.restart()

    def pause(self) -> Iterator[FinishedStep]:
        """Wait for the last step and yield what is unread; what comes until `go_on` is no step."""
        yield from self.clock.finish()
        self.power.pause()

    def go_on(self) -> None:
        """Begin the next step."""
        self.power.go_on()
        self.clock.restart()

    def close_window(self) -> Iterator[FinishedStep]:
        """Wait for the last step, yield what is unread, and read every meter."""
        yield from self.clock.finish()
        self.power.close_window()
        self.memory.close_window()

    def stop(self) -> None:
        """Let go of everything, also where the window never closed."""
        self.power.stop()

    def facts(self, num_timed_steps: int) -> dict[str, Any]:
        """Return ``memory`` and ``energy`` over all ranks; every rank must call it."""
        ranks = from_all_ranks({"memory": self.memory.facts, "power": self.power.facts})
        num_tokens = max(1, num_timed_steps) * self._config.tokens_per_step
        return {
            "memory": summarise_memory([rank["memory"] for rank in ranks]),
            "energy": summarise_energy([rank["power"] for rank in ranks], num_tokens),
        }
