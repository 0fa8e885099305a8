"""What an experiment could have seen, against statsmodels and against simulation."""

import numpy as np
import pytest
from scipy import stats as scipy_stats
from statsmodels.stats.power import TTestPower

from fp8study.analysis.power import paired_t_power, smallest_detectable, smallest_margin, tost_power
from fp8study.core.errors import UserError


@pytest.mark.parametrize("num_pairs", [2, 3, 5, 20])
@pytest.mark.parametrize("difference", [0.0, 0.1, 0.4, -1.5])
def test_power_is_statsmodels(num_pairs: int, difference: float) -> None:
    expected = TTestPower().power(difference / 0.5, num_pairs, 0.05, alternative="two-sided")
    assert paired_t_power(difference, 0.5, num_pairs) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("num_pairs", [3, 5, 10])
def test_smallest_detectable_is_statsmodels(num_pairs: int) -> None:
    size = TTestPower().solve_power(nobs=num_pairs, alpha=0.05, power=0.8)
    assert smallest_detectable(0.1, num_pairs) == pytest.approx(0.1 * size, rel=1e-4)


def simulated_tost_power(margin: float, spread: float, count: int, difference: float) -> float:
    samples = np.random.default_rng(3).normal(difference, spread, (40_000, count))
    half = scipy_stats.t.ppf(0.95, count - 1) * samples.std(axis=1, ddof=1) / np.sqrt(count)
    return float(np.mean(np.abs(samples.mean(axis=1)) + half < margin))


@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize(("margin", "difference"), [(0.25, 0.0), (0.25, 0.1), (0.6, -0.3)])
def test_power_of_equivalence_is_that_of_simulated_tests(
    count: int, margin: float, difference: float
) -> None:
    expected = simulated_tost_power(margin, 0.12, count, difference)
    assert tost_power(margin, 0.12, count, difference) == pytest.approx(expected, abs=0.01)


def test_smallest_margin_has_the_power_asked_for() -> None:
    margin = smallest_margin(0.2, 5, power=0.9)
    assert tost_power(margin, 0.2, 5) == pytest.approx(0.9, abs=1e-6)
    assert tost_power(0.9 * margin, 0.2, 5) < 0.9


def test_more_pairs_see_more() -> None:
    assert smallest_detectable(1.0, 10) < smallest_detectable(1.0, 5) < smallest_detectable(1.0, 3)
    assert smallest_margin(1.0, 10) < smallest_margin(1.0, 5) < smallest_margin(1.0, 3)


def test_without_spread_everything_is_seen() -> None:
    assert smallest_detectable(0.0, 3) == smallest_margin(0.0, 3) == 0.0


@pytest.mark.parametrize(
    ("values", "name"),
    [((-0.1, 5, 0.8, 0.05), "spread"), ((0.1, 1, 0.8, 0.05), "num_pairs"),
     ((0.1, 5, 1.0, 0.05), "power"), ((0.1, 5, 0.01, 0.05), "power"),
     ((0.1, 5, 0.8, 0.0), "alpha"), ((float("nan"), 5, 0.8, 0.05), "spread")],
)  # fmt: skip
def test_what_is_out_of_range_is_refused(
    values: tuple[float, int, float, float], name: str
) -> None:
    for function in (smallest_detectable, smallest_margin):
        with pytest.raises(UserError, match=f"^{name}: "):
            function(*values)


def test_margin_of_a_test_must_be_positive() -> None:
    with pytest.raises(UserError, match=r"^margin: "):
        tost_power(0.0, 0.1, 5)


@pytest.mark.parametrize("num_pairs", [2, 78, 100, 1000])
def test_tails_that_scipy_gives_up_on_have_their_limits(num_pairs: int) -> None:
    """Far out its noncentral t is NaN, which no root finder survives."""
    found = smallest_detectable(1.0, num_pairs)
    assert paired_t_power(found, 1.0, num_pairs) == pytest.approx(0.8, abs=1e-3)
    assert paired_t_power(-found, 1.0, num_pairs) == pytest.approx(0.8, abs=1e-3)
    assert paired_t_power(100.0, 1.0, num_pairs) == pytest.approx(1.0, abs=1e-2)
