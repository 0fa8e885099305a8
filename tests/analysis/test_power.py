"""What an experiment could have seen, against statsmodels and against simulation."""

import numpy as np
import pytest
from statsmodels.stats.power import TTestPower

from fp8study.analysis.stats import (
    judged,
    paired_t_power,
    pairs_to_decide,
    smallest_detectable,
)
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


def test_without_spread_everything_is_seen() -> None:
    assert smallest_detectable(0.0, 3) == 0.0


@pytest.mark.parametrize(
    ("values", "name"),
    [((-0.1, 5), "spread"), ((0.1, 1), "num_pairs"), ((float("nan"), 5), "spread")],
)
def test_what_is_out_of_range_is_refused(values: tuple[float, int], name: str) -> None:
    with pytest.raises(UserError, match=f"^{name}: "):
        smallest_detectable(*values)


@pytest.mark.parametrize("num_pairs", [2, 78, 100, 1000])
def test_tails_that_scipy_gives_up_on_have_their_limits(num_pairs: int) -> None:
    """Far out its noncentral t is NaN, which no root finder survives."""
    found = smallest_detectable(1.0, num_pairs)
    assert paired_t_power(found, 1.0, num_pairs) == pytest.approx(0.8, abs=1e-3)
    assert paired_t_power(-found, 1.0, num_pairs) == pytest.approx(0.8, abs=1e-3)
    assert paired_t_power(100.0, 1.0, num_pairs) == pytest.approx(1.0, abs=1e-2)


@pytest.mark.parametrize("spread", [0.12, 0.25, 0.5])
def test_so_many_pairs_decide_four_times_in_five(spread: float) -> None:
    random = np.random.default_rng(0)

    def share(pairs: int) -> float:
        drawn = random.normal(0.0, spread, (1000, pairs)).tolist()
        return float(np.mean([judged(each, 0.25)["verdict"] == "equivalent" for each in drawn]))

    enough = pairs_to_decide(spread, 0.25)
    assert share(enough) > 0.77
    assert enough == 3 or share(enough - 1) < 0.85


def test_without_spread_three_pairs_decide_and_nonsense_is_refused() -> None:
    assert pairs_to_decide(0.0, 0.25) == 3
    assert pairs_to_decide(100.0, 0.25) == pytest.approx((2.9264 * 400) ** 2, rel=1e-3)  # at once
    for spread, margin in ((-0.1, 0.25), (float("nan"), 0.25), (0.1, 0.0)):
        with pytest.raises(UserError, match=r"^spread, margin: "):
            pairs_to_decide(spread, margin)
