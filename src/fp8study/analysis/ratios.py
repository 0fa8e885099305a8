"""Ratios of rates that were measured a few times each.

Rates are compared on a log scale: a factor of 1.1 and one of 1/1.1 are then the same step, and the
interval of a ratio has no negative end. The interval speaks of the spread between the runs at
hand. Two calls on one machine can differ by more than that; only repeated calls show it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fp8study.analysis.stats import MIN_PAIRS_FOR_INTERVAL, Interval, welch_t_interval
from fp8study.core.errors import UserError

#: Confidence level of the intervals that are shown.
LEVEL = 0.95


@dataclass(frozen=True)
class Ratio:
    """A ratio with what is known of its error."""

    estimate: float
    """Ratio of the geometric means, which lies inside the interval."""
    interval: Interval | None
    """None where a group has fewer than `MIN_PAIRS_FOR_INTERVAL` runs."""
    counts: tuple[int, ...]
    """Runs in each group, those above the line first."""

    def interval_text(self) -> str:
        """Write the interval, or say why there is none."""
        if self.interval is not None:
            return f"{self.interval.low:.3f} to {self.interval.high:.3f}"
        fewest = min(self.counts)
        return f"no interval: {fewest} run{'' if fewest == 1 else 's'}"


def ratio_of(above: Sequence[Sequence[float]], below: Sequence[Sequence[float]]) -> Ratio | None:
    """Divide the product of the groups' means by that of others', with Welch's interval.

    Args:
        above: Groups of rates, all positive.
        below: The groups to divide by. Two above and two below make a ratio of ratios.

    Returns:
        None if a group is empty.

    Raises:
        UserError: A rate is not positive.
    """
    groups = [*above, *below]
    counts = tuple(len(group) for group in groups)
    if not all(counts):
        return None
    if any(not value > 0 for group in groups for value in group):
        raise UserError("rates: not all are positive; leave out runs without timings")
    logs = [[math.log(value) for value in group] for group in groups]
    weights = [1.0] * len(above) + [-1.0] * len(below)
    means = [sum(values) / len(values) for values in logs]
    estimate = math.exp(sum(w * mean for w, mean in zip(weights, means, strict=True)))
    if min(counts) < MIN_PAIRS_FOR_INTERVAL:
        return Ratio(estimate, None, counts)
    log = welch_t_interval(logs, weights, LEVEL)
    return Ratio(estimate, Interval(LEVEL, math.exp(log.low), math.exp(log.high)), counts)
