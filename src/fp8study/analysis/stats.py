"""Statistics for a handful of paired seeds.

With three to ten seeds a bootstrap interval is far too narrow; Student's t on the paired
differences is not. And "no significant difference" is not "the same": sameness is tested
against a margin that is stated first (two one-sided tests, TOST). What such an experiment could
have seen is in `fp8study.analysis.power`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from fp8study.core.errors import UserError

#: From here on an interval is given; below, the spread is not known well enough to be useful.
MIN_PAIRS_FOR_INTERVAL = 3
#: From here on a bootstrap interval covers about as often as it says.
MIN_VALUES_FOR_BOOTSTRAP = 16

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

    Raises:
        UserError: Too few values, one that is not finite, or a wrong level.
    """
    if not 0 < level < 1:
        raise UserError(f"level: {level!r} is not between 0 and 1")
    moments = [_moments(group) for group in groups]
    centre = sum(w * mean for w, (mean, _, _) in zip(weights, moments, strict=True))
    terms = [(w * error) ** 2 for w, (_, error, _) in zip(weights, moments, strict=True)]
    variance = sum(terms)
    if variance == 0:
        return Interval(level, centre, centre)
    # As shares of the variance: squares of tiny spreads would vanish.
    shares = [(term / variance) ** 2 / m[2] for term, m in zip(terms, moments, strict=True)]
    half = float(stats.t.ppf(0.5 + level / 2, 1 / sum(shares))) * math.sqrt(variance)
    return Interval(level, centre - half, centre + half)


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


def judged(differences: Sequence[float], margin: float) -> dict[str, float | Verdict]:
    """Return what a table says of paired differences beside their mean.

    Args:
        differences: One difference per pair (seed).
        margin: As `tost`.

    Returns:
        ``low_95`` and ``high_95``, the ends of the paired-t interval, and the ``verdict`` of
        `tost`; with fewer than `MIN_PAIRS_FOR_INTERVAL` pairs NaN and ``undecided``.
    """
    if len(differences) < MIN_PAIRS_FOR_INTERVAL:
        return {"low_95": math.nan, "high_95": math.nan, "verdict": "undecided"}
    interval = paired_t_interval(differences, 0.95)
    verdict = tost(differences, margin).verdict
    return {"low_95": interval.low, "high_95": interval.high, "verdict": verdict}


def paired_t_p_value(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of Student's paired t test of no difference.

    Args:
        differences: One difference per pair (seed), at least two.

    Raises:
        UserError: As `paired_t_interval`.
    """
    mean, error, freedom = _moments(differences)
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return float(2 * stats.t.sf(abs(mean) / error, freedom))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust a family of p-values so that one false alarm in the whole family is as rare as asked.

    Holm's step-down method (Scandinavian Journal of Statistics 6, 1979): valid however the tests
    depend on one another, and they do here, since they share their BF16 runs.

    Args:
        p_values: The family, between 0 and 1.

    Returns:
        The adjusted p-values, in the order given.

    Raises:
        UserError: One is not a probability.
    """
    values = np.asarray(p_values, dtype=float)
    if not ((values >= 0) & (values <= 1)).all():
        raise UserError("p_values: not all are between 0 and 1; leave out tests without a result")
    order = np.argsort(values, kind="stable")
    stepped = np.maximum.accumulate(values[order] * np.arange(values.size, 0, -1))
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(stepped, 1.0)
    return [float(p) for p in adjusted]


def bootstrap_interval(
    values: Sequence[float], level: float, method: Literal["percentile", "BCa"] = "BCa"
) -> Interval:
    """Bootstrap interval of a mean, for many values of unknown distribution.

    Args:
        values: At least `MIN_VALUES_FOR_BOOTSTRAP`: with fewer it is far too narrow.
        level: Confidence level, between 0 and 1.
        method: Plain percentiles, or bias-corrected and accelerated (Efron, Journal of the
            American Statistical Association 82, 1987).

    Raises:
        UserError: Too few values, one that is not finite, or a wrong level.
    """
    if len(values) < MIN_VALUES_FOR_BOOTSTRAP:
        raise UserError(
            f"values: {len(values)} are too few for a bootstrap; give "
            f"{MIN_VALUES_FOR_BOOTSTRAP} or more, or use paired_t_interval"
        )
    mean, error, _ = _moments(values)
    if not 0 < level < 1:
        raise UserError(f"level: {level!r} is not between 0 and 1")
    if error == 0:
        return Interval(level, mean, mean)
    drawn = stats.bootstrap(
        (np.asarray(values, dtype=float),),
        np.mean,
        confidence_level=level,
        method=method,
        random_state=np.random.default_rng(0),  # the same interval at every rendering
    ).confidence_interval
    return Interval(level, float(drawn.low), float(drawn.high))


@dataclass(frozen=True)
class OneWay:
    """The spread of values taken apart by one factor (one-way analysis of variance)."""

    between_pct: float
    """Share of the sum of squares that lies between the groups, %."""
    spread_within: float
    """Standard deviation within groups, pooled, in the unit of the values."""
    p_value: float
    """Of the F test that all groups have one mean."""


def one_way(groups: Sequence[Sequence[float]]) -> OneWay:
    """Take the spread of values apart: between the levels of one factor, and within them.

    Args:
        groups: The values at each level; two levels or more, more values than levels.

    Raises:
        UserError: Fewer, or a value that is not finite.
    """
    arrays = [np.asarray(group, dtype=float) for group in groups]
    count = sum(array.size for array in arrays)
    if len(arrays) < 2 or min(a.size for a in arrays) < 1 or count <= len(arrays):
        raise UserError(
            f"groups: {count} values in {len(arrays)} groups are too few; give two groups or "
            "more, and more values than groups"
        )
    everything = np.concatenate(arrays)
    if not np.isfinite(everything).all():
        raise UserError("groups: not all values are finite; leave out runs without a loss")
    within = float(sum(((a - a.mean()) ** 2).sum() for a in arrays))
    between = float(sum(a.size * (a.mean() - everything.mean()) ** 2 for a in arrays))
    freedoms = len(arrays) - 1, count - len(arrays)
    if within + between == 0:
        return OneWay(0.0, 0.0, 1.0)
    ratio = math.inf if within == 0 else (between / freedoms[0]) / (within / freedoms[1])
    return OneWay(
        between_pct=100 * between / (within + between),
        spread_within=math.sqrt(within / freedoms[1]),
        p_value=float(stats.f.sf(ratio, *freedoms)),
    )


def _moments(differences: Sequence[float]) -> tuple[float, float, int]:
    """Return the mean, its standard error and the degrees of freedom."""
    values = np.asarray(differences, dtype=float)
    if values.size < 2:
        raise UserError(f"differences: {values.size} is too few; an interval needs two or more")
    if not np.isfinite(values).all():
        raise UserError("differences: not all are finite; leave out runs without a loss")
    error = float(values.std(ddof=1)) / math.sqrt(values.size)
    return float(values.mean()), error, values.size - 1


#: Below this the outermost values do not cover 95 %.
MIN_FOR_MEDIAN_INTERVAL = 6


def median_interval(values: Sequence[float], level: float) -> Interval:
    """Return an interval of the median from order statistics, whatever the distribution.

    The narrowest symmetric pair of ranks whose binomial coverage reaches `level` (Conover,
    Practical Nonparametric Statistics, section 3.2): a few wild values do not move it.

    Args:
        values: Independent values.
        level: Least coverage, between 0 and 1.

    Raises:
        UserError: Too few values for the level.
    """
    ordered = sorted(values)
    rank = int(stats.binom.ppf((1 - level) / 2, len(ordered), 0.5))
    if len(ordered) == 0 or rank < 1:
        raise UserError(f"values: {len(ordered)} are too few for a {100 * level:.0f} % interval")
    return Interval(level, ordered[rank - 1], ordered[-rank])
