"""Statistics for a handful of paired seeds.

With three to ten seeds a bootstrap interval is far too narrow; Student's t on the paired
differences is not. And "no significant difference" is not "the same": sameness is tested
against a margin that is stated first (two one-sided tests, TOST). "No difference found" means
little unless a difference worth finding would have been found (power): normal differences of
known spread are assumed there, so that an answer from a few pairs is rough.

``differences`` hold one number per pair (seed), at least two; a ``level`` of confidence is between
0 and 1. Too few values, one that is not finite, or a number out of range raise a `UserError`.
"""

from __future__ import annotations

import bisect
import functools
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy import optimize, special, stats

from fp8study.core.errors import UserError
from fp8study.core.records import MIN_PAIRS_FOR_INTERVAL
from fp8study.core.words import number

#: Below this the outermost values do not cover 95 %.
MIN_FOR_MEDIAN_INTERVAL = 6
#: Size of a test, and how often a difference of the size in question should be found.
ALPHA, POWER = 0.05, 0.8

Verdict = Literal["equivalent", "different", "undecided"]


@dataclass(frozen=True)
class Interval:
    """A two-sided confidence interval, in the unit of the differences."""

    low: float
    high: float


def paired_t_interval(differences: Sequence[float], level: float) -> Interval:
    """Student's t interval of the mean of paired differences: Welch's of one group."""
    return welch_t_interval([differences], [1.0], level)


def welch_t_interval(
    groups: Sequence[Sequence[float]], weights: Sequence[float], level: float
) -> Interval:
    """Welch's t interval of a weighted sum of the means of independent groups.

    Over logarithms of rates, the weights 1 and −1 give the interval of a log-ratio, and 1, −1, −1
    and 1 that of a ratio of ratios. The groups may spread differently (Welch, Biometrika 34,
    1947); the degrees of freedom are Satterthwaite's (Biometrics Bulletin 2, 1946).

    Args:
        groups: The values of each group, at least two in each.
        weights: One for each group.
        level: Confidence level, between 0 and 1.
    """
    if not 0 < level < 1:
        raise UserError(f"level: {level!r} is not between 0 and 1")
    moments = [_moments(group) for group in groups]
    centre = sum(w * mean for w, (mean, _, _) in zip(weights, moments, strict=True))
    terms = [(w * error) ** 2 for w, (_, error, _) in zip(weights, moments, strict=True)]
    variance = sum(terms)
    if variance == 0:
        return Interval(centre, centre)
    # As shares of the variance: squares of tiny spreads would vanish.
    shares = [(term / variance) ** 2 / m[2] for term, m in zip(terms, moments, strict=True)]
    half = float(stats.t.ppf(0.5 + level / 2, 1 / sum(shares))) * math.sqrt(variance)
    return Interval(centre - half, centre + half)


def tost(differences: Sequence[float], margin: float) -> Verdict:
    """Say whether the mean of paired differences is smaller than a margin, or larger.

    Two one-sided tests of size `ALPHA`, which both reject exactly where the 90 % interval lies
    inside the margin: then it is ``equivalent``, and where the interval lies outside ``different``;
    else these runs do not say. The `margin` is positive, in the unit of the differences.
    """
    if not margin > 0:
        raise UserError(f"margin: {margin!r} is not positive")
    interval = paired_t_interval(differences, 1 - 2 * ALPHA)
    if -margin < interval.low and interval.high < margin:
        return "equivalent"
    return "different" if interval.low > margin or interval.high < -margin else "undecided"


def agreed(margins: Iterable[float]) -> float:
    """Return the margin that all pairs state, in percent; NaN where they state several."""
    stated = {*margins}
    return stated.pop() if len(stated) == 1 else math.nan


def judged(differences: Sequence[float], margin: float, mean: str = "mean_pct") -> dict[str, Any]:
    """Return what a table says of paired differences: their mean, under the name of `mean`.

    And ``num_pairs``, ``low_90``, ``high_90``, ``low_95`` and ``high_95``, the ends of the paired-t
    intervals, the ``verdict`` of `tost`, the ``p_value`` of the paired t test, and
    ``detectable_pct``, the `smallest_detectable` difference. With fewer than
    `MIN_PAIRS_FOR_INTERVAL` pairs intervals and tests are missing; then, and where the margin is
    NaN (none is agreed on), the verdict is ``undecided``.
    """
    middle = statistics.fmean(differences) if differences else math.nan
    row: dict[str, Any] = {"num_pairs": len(differences), mean: middle}
    if len(differences) < MIN_PAIRS_FOR_INTERVAL:
        missing = ("low_90", "high_90", "low_95", "high_95", "p_value", "detectable_pct")
        return row | dict.fromkeys(missing, math.nan) | {"verdict": "undecided"}
    narrow, wide = (paired_t_interval(differences, level) for level in (0.90, 0.95))
    return row | {
        "low_90": narrow.low,
        "high_90": narrow.high,
        "low_95": wide.low,
        "high_95": wide.high,
        "p_value": paired_t_p_value(differences),
        "detectable_pct": smallest_detectable(statistics.stdev(differences), len(differences)),
        "verdict": "undecided" if math.isnan(margin) else tost(differences, margin),
    }


def interval_text(low: float, high: float) -> str:
    """Write an interval of signed per cents so that no line break falls into it."""
    return f"{number(low, '+.2f')} to {number(high, '+.2f')}".replace(" ", "\u00a0")


def paired_t_p_value(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of Student's paired t test of no difference."""
    mean, error, freedom = _moments(differences)
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return float(2 * stats.t.sf(abs(mean) / error, freedom))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust a family of p-values so that one false alarm in the whole family is as rare as asked.

    Holm's step-down method (Scandinavian Journal of Statistics 6, 1979): valid however the tests
    depend on one another, and they do here, since they share their BF16 runs.

    Returns the adjusted p-values in the order given.
    """
    values = np.asarray(p_values, dtype=float)
    if not ((values >= 0) & (values <= 1)).all():
        raise UserError("p_values: not all are between 0 and 1; leave out tests without a result")
    order = np.argsort(values, kind="stable")
    stepped = np.maximum.accumulate(values[order] * np.arange(values.size, 0, -1))
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(stepped, 1.0)
    return [float(p) for p in adjusted]


def adjusted(table: pd.DataFrame, family: list[str]) -> pd.Series:
    """Return the ``p_value`` of a table's rows by `holm`, rows alike in `family` together."""
    known = table[table["p_value"].notna()]
    return known.groupby(family)["p_value"].transform(lambda family: holm(family.tolist()))


def _moments(differences: Sequence[float]) -> tuple[float, float, int]:
    """Return the mean, its standard error and the degrees of freedom."""
    values = np.asarray(differences, dtype=float)
    if values.size < 2:
        raise UserError(f"differences: {values.size} is too few; an interval needs two or more")
    if not np.isfinite(values).all():
        raise UserError("differences: not all are finite; leave out runs without a loss")
    error = float(values.std(ddof=1)) / math.sqrt(values.size)
    return float(values.mean()), error, values.size - 1


def pairs_to_decide(spread: float, margin: float) -> int:
    """Return how many pairs `tost` needs to call two equal arms equivalent with a power of `POWER`.

    At least `MIN_PAIRS_FOR_INTERVAL`. The sample size of Chow, Shao and Wang (Sample Size
    Calculations in Clinical Research, section 3.2) with Student's quantiles.

    Args:
        spread: Standard deviation of the paired differences, at least zero.
        margin: Positive, in the same unit.
    """
    if not (0 <= spread < math.inf and margin > 0):
        raise UserError(f"spread, margin: {spread!r} and {margin!r} are no spread and margin")

    def decides(pairs: int) -> bool:
        quantiles = stats.t.ppf([1 - ALPHA, (1 + POWER) / 2], pairs - 1)
        return float(quantiles.sum()) * spread / math.sqrt(pairs) <= margin

    candidates = range(MIN_PAIRS_FOR_INTERVAL, sys.maxsize)
    return candidates[bisect.bisect_left(candidates, True, key=decides)]


def smallest_detectable(spread: float, num_pairs: int) -> float:
    """Return the smallest true difference that the paired t test finds with a power of `POWER`.

    The `spread` is the standard deviation of the paired differences, in the same unit.
    """
    if not 0 <= spread < math.inf:
        raise UserError(f"spread: {spread!r} is not finite, or below 0")
    if num_pairs < 2:
        raise UserError(f"num_pairs: {num_pairs} is too few; a spread needs two or more")
    return spread * _detectable_shift(num_pairs - 1) / math.sqrt(num_pairs)


@functools.cache
def _detectable_shift(freedom: int) -> float:
    """Return `smallest_detectable` over the standard error of the mean of the differences."""
    critical = stats.t.ppf(1 - ALPHA / 2, freedom)
    near = special.nctdtrinc(freedom, 1 - POWER, critical)  # without the lower tail

    def lacking(shift: float) -> float:
        tails = stats.nct.sf(critical, freedom, shift), stats.nct.cdf(-critical, freedom, shift)
        return POWER - float(np.nansum(tails))  # of a tail with next to nothing scipy gives NaN

    return float(optimize.brentq(lacking, 0.9 * near, 1.1 * near, xtol=1e-10))
