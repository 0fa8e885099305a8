"""How long a run goes on: when its warm-up ends, and after which step it stops.

A GPU that starts cold slows down as it warms: 2.7 % within 45 s on an H200. So a run that is there
to be timed (``timed_seconds``) warms up until its step time has settled, and then times steps for
as long as was asked. Its clock needs no look of its own: step times follow it.

Looks wait for the GPU and let the ranks agree, so there are none inside the timed window: how many
steps it has is decided as it opens.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from fp8study.core.config import ResolvedConfig
from fp8study.core.records import UNSTEADY
from fp8study.measure.clock import FinishedStep, from_all_ranks

#: Median step times of so many rounds in a row, each a quarter of ``timed_seconds``, are compared.
_ROUNDS = 3
#: They are steady if they lie within this share of each other.
_STEADY = 0.01
#: After so many times ``timed_seconds``, and those rounds, the window opens all the same, and the
#: record says so. In the records, steps that wait for the host never settle: their rounds differ by
#: 3 % for as long as they last. Those that wait for the GPU differ by 0.3 to 0.5 %.
_LONGEST = 2.0
#: Fewer timed steps would say nothing of how they vary.
_FEWEST_STEPS = 5


class Pace:
    """Decides, alike on every rank, which steps are timed and which is the last."""

    def __init__(self, config: ResolvedConfig, first_step: int = 0) -> None:
        self._config = config
        self._seconds = config.timed_seconds
        self.first_timed: int | None = first_step + config.num_warmup_steps
        """The step, counted from 0, with which the timed window opens; None: not decided yet."""
        if self._seconds:
            self.first_timed = None
        self.num_steps = config.num_steps
        """Steps of the whole run; until `first_timed` is known, the most there can be."""
        self._looked_at = 1  # the first step compiles
        self._next_look = max(2, config.num_warmup_steps)
        self._warm_seconds = 0.0
        self._rounds: list[float] = []

    def wants_look(self, steps_done: int) -> bool:
        """Whether `look` is due; never inside the timed window."""
        return self.first_timed is None and steps_done >= self._next_look

    def look(self, steps: Sequence[FinishedStep]) -> None:
        """Open the timed window, or decide when to look again; every rank must call it.

        `steps` are all that were done so far. The slowest rank's step time counts.
        """
        assert self._seconds is not None
        done = len(steps)
        times = [step.step_time_ms / 1000 for step in steps[self._looked_at :]]
        ranks = from_all_ranks({"step_seconds": statistics.median(times)})
        step_seconds = max(rank["step_seconds"] for rank in ranks)
        self._warm_seconds += len(times) * step_seconds
        self._rounds.append(step_seconds)
        self._looked_at = done
        needed = max(_FEWEST_STEPS, math.ceil(self._seconds / step_seconds))
        last_chance = self._config.num_steps - needed
        is_warm = self._warm_seconds >= self._seconds and self.change <= _STEADY
        is_late = self._warm_seconds >= _LONGEST * self._seconds and len(self._rounds) >= _ROUNDS
        if is_warm or is_late or done >= last_chance:
            self.first_timed, self.num_steps = done, min(done + needed, self._config.num_steps)
        round_steps = math.ceil(self._seconds / 4 / step_seconds)
        self._next_look = min(done + round_steps, max(last_chance, done + 1))

    @property
    def change(self) -> float:
        """The share by which the last rounds' step times differ; infinite before they are done."""
        last = self._rounds[-_ROUNDS:]
        return max(last) / min(last) - 1 if len(last) == _ROUNDS else math.inf

    def facts(self) -> dict[str, Any]:
        """Return ``seconds`` of warm-up without compilation, and ``step_time_ms`` by round."""
        if not self._rounds:
            return {}
        return {"seconds": self._warm_seconds, "step_time_ms": [1000 * r for r in self._rounds]}

    def warnings(self) -> list[str]:
        """Say of a run that was timed before its step time had settled how far it was from that."""
        if self.first_timed is None or not self._seconds or self.change <= _STEADY:
            return []
        changed = "" if math.isinf(self.change) else f": it still changed by {self.change:.1%}"
        return [f"{UNSTEADY}, after {self._warm_seconds:.0f} s{changed}"]
