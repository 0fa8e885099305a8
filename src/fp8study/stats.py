"""Statistics for a handful of paired seeds.

With three to ten seeds a bootstrap interval is far too narrow; Student's t on the paired
differences is not. And "no significant difference" is not "the same": sameness is tested
against a margin that is stated first (two one-sided tests, TOST).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from fp8study.errors import UserError

#: From here on an interval is given; below, the spread is not known well enough to be useful.
MIN_PAIRS_FOR_INTERVAL = 3

Verdict = Literal["equivalent", "different", "undecided"]


@dataclass(frozen=True)
class Interval:
    """A two-sided confidence interval, in the unit of the differences."""

    level: float
    low: float
    high: float


@dataclass(frozen=True)
class Equivalence:
    """The outcome of two one-sided tests."""

    verdict: Verdict
    """``equivalent``: the difference is smaller than the margin; ``different``: it is larger;
    ``undecided``: these runs do not say."""
    p_value: float
    """Of the equivalence test: the larger of the two one-sided p-values."""
    margin: float
    """The margin asked for, in the unit of the differences."""
    interval: Interval
    """The 1 − 2α interval, which lies inside the margin exactly if the verdict is
    ``equivalent``."""


def paired_t_interval(differences: Sequence[float], level: float) -> Interval:
    """Student's t interval of the mean of paired differences.

    Args:
        differences: One difference per pair (seed), at least two.
        level: Confidence level, between 0 and 1.

    Raises:
        UserError: Fewer than two differences, one that is not finite, or a wrong level.
    """
    mean, error, freedom = _moments(differences)
    if not 0 < level < 1:
        raise UserError(f"level: {level!r} is not between 0 and 1")
    half = float(stats.t.ppf(0.5 + level / 2, freedom)) * error
    return Interval(level, mean - half, mean + half)


def tost(differences: Sequence[float], margin: float, alpha: float = 0.05) -> Equivalence:
    """Test whether the mean of paired differences is smaller than a margin, or larger.

    Args:
        differences: One difference per pair (seed), at least two.
        margin: The largest difference that counts as none; positive, in the same unit.
        alpha: Size of each one-sided test.

    Returns:
        ``equivalent`` if the 1 − 2α interval lies inside ±margin, ``different`` if it lies
        wholly outside, else ``undecided``.

    Raises:
        UserError: As `paired_t_interval`, or a margin that is not positive.
    """
    if not margin > 0:
        raise UserError(f"margin: {margin!r} is not positive")
    interval = paired_t_interval(differences, 1 - 2 * alpha)
    mean, error, freedom = _moments(differences)
    if error > 0:
        p_value = float(stats.t.sf((margin - abs(mean)) / error, freedom))
    else:
        p_value = 0.0 if abs(mean) < margin else 1.0
    verdict: Verdict = "undecided"
    if p_value < alpha:
        verdict = "equivalent"
    elif interval.low > margin or interval.high < -margin:
        verdict = "different"
    return Equivalence(verdict, p_value, margin, interval)


def _moments(differences: Sequence[float]) -> tuple[float, float, int]:
    """Return the mean, its standard error and the degrees of freedom."""
    values = np.asarray(differences, dtype=float)
    if values.size < 2:
        raise UserError(f"differences: {values.size} is too few; an interval needs two or more")
    if not np.isfinite(values).all():
        raise UserError("differences: not all are finite; leave out runs without a loss")
    error = float(values.std(ddof=1)) / math.sqrt(values.size)
    return float(values.mean()), error, values.size - 1
