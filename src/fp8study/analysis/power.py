"""What an experiment of n pairs could have seen.

"No difference found" means little unless a difference worth finding would have been found. All
functions assume normal paired differences of known spread; a spread that was itself estimated from
a few pairs makes their answers rough.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy import integrate, optimize, stats

from fp8study.core.errors import UserError

#: How often a difference of the size in question should be found.
POWER = 0.8


def paired_t_power(difference: float, spread: float, num_pairs: int, alpha: float = 0.05) -> float:
    """Return how often a two-sided paired t test finds a true difference.

    Args:
        difference: The true mean difference.
        spread: Standard deviation of the paired differences, positive, in the same unit.
        num_pairs: Two or more.
        alpha: Size of the test.

    Raises:
        UserError: A spread, count or size out of range.
    """
    _check(spread, num_pairs, alpha)
    freedom = num_pairs - 1
    shift = abs(difference) / spread * math.sqrt(num_pairs)
    critical = stats.t.ppf(1 - alpha / 2, freedom)
    above = float(stats.nct.sf(critical, freedom, shift))
    below = float(stats.nct.cdf(-critical, freedom, shift))
    # scipy gives NaN for tails too far out for it: nearly all lies above, nothing below.
    return (1.0 if math.isnan(above) else above) + (0.0 if math.isnan(below) else below)


def smallest_detectable(
    spread: float, num_pairs: int, power: float = POWER, alpha: float = 0.05
) -> float:
    """Return the smallest true difference that the paired t test finds with the given power.

    Args:
        spread: As `paired_t_power`; zero gives zero.
        num_pairs: Two or more.
        power: Between `alpha` and 1.
        alpha: Size of the test.

    Raises:
        UserError: As `paired_t_power`, or a power out of range.
    """
    if spread == 0:
        return 0.0
    _check(spread, num_pairs, alpha)
    _check_power(power, alpha)
    return spread * _solve(lambda d: paired_t_power(d, 1.0, num_pairs, alpha) - power)


def tost_power(
    margin: float, spread: float, num_pairs: int, difference: float = 0.0, alpha: float = 0.05
) -> float:
    """Return how often `fp8study.analysis.stats.tost` says ``equivalent``.

    Exact: the mean and the standard deviation of a normal sample are independent, so the chance
    that the interval fits inside the margin is integrated over the latter's distribution.

    Args:
        margin: Largest difference that counts as none, positive.
        spread: As `paired_t_power`.
        num_pairs: Two or more.
        difference: The true mean difference.
        alpha: Size of each one-sided test.

    Raises:
        UserError: As `paired_t_power`, or a margin that is not positive.
    """
    _check(spread, num_pairs, alpha)
    if not margin > 0:
        raise UserError(f"margin: {margin!r} is not positive")
    freedom, root = num_pairs - 1, math.sqrt(num_pairs)
    reach = float(stats.t.ppf(1 - alpha, freedom)) / root  # half the interval, per deviation

    def fits(deviation: float) -> float:
        room = (margin - reach * deviation * spread) / spread * root
        shift = difference / spread * root
        inside = stats.norm.cdf(room - shift) - stats.norm.cdf(-room - shift)
        scale = math.sqrt(freedom)
        return float(inside * scale * stats.chi.pdf(deviation * scale, freedom))

    widest = margin / (reach * spread)
    # Beyond, a sample deviation has no probability worth adding.
    limit = min(widest, float(stats.chi.isf(1e-12, freedom)) / math.sqrt(freedom))
    return float(integrate.quad(fits, 0.0, limit, limit=200)[0])


def smallest_margin(
    spread: float, num_pairs: int, power: float = POWER, alpha: float = 0.05
) -> float:
    """Return the smallest margin at which equal arms are shown to be equivalent with a power.

    Args:
        spread: As `paired_t_power`; zero gives zero.
        num_pairs: Two or more.
        power: Between `alpha` and 1.
        alpha: Size of each one-sided test.

    Raises:
        UserError: As `smallest_detectable`.
    """
    if spread == 0:
        return 0.0
    _check(spread, num_pairs, alpha)
    _check_power(power, alpha)
    return spread * _solve(lambda m: tost_power(m, 1.0, num_pairs, alpha=alpha) - power)


def _solve(shortfall: Callable[[float], float]) -> float:
    """Return where a growing function of a positive number crosses zero."""
    high = 1.0
    while shortfall(high) < 0:
        high *= 2
    return float(optimize.brentq(shortfall, 1e-9, high, xtol=1e-9))


def _check(spread: float, num_pairs: int, alpha: float) -> None:
    if not 0 < spread < math.inf:
        raise UserError(f"spread: {spread!r} is not positive and finite")
    if num_pairs < 2:
        raise UserError(f"num_pairs: {num_pairs} is too few; a spread needs two or more")
    if not 0 < alpha < 0.5:
        raise UserError(f"alpha: {alpha!r} is outside (0, 0.5); try 0.05")


def _check_power(power: float, alpha: float) -> None:
    if not alpha < power < 1:
        raise UserError(f"power: {power!r} is not between alpha and 1; try {POWER}")
