"""What an experiment could have seen, against statsmodels and against simulation."""

import numpy as np
import pytest
from statsmodels.stats.power import TTestPower

from fp8study.analysis.stats import (
    pairs_to_decide,
    smallest_detectable,
    tost,
)


@pytest.mark.parametrize("num_pairs", [2, 3, 5, 10, 78, 100, 1000])
def test_smallest_detectable_is_statsmodels(num_pairs: int) -> None:
    size = TTestPower().solve_power(nobs=num_pairs, alpha=0.05, power=0.8)
    assert smallest_detectable(0.1, num_pairs) == pytest.approx(0.1 * size, rel=1e-4)


def test_without_spread_everything_is_seen() -> None:
    assert smallest_detectable(0.0, 3) == 0.0


@pytest.mark.parametrize("spread", [0.12, 0.25, 0.5])
def test_so_many_pairs_decide_four_times_in_five(spread: float) -> None:
    random = np.random.default_rng(0)

    def share(pairs: int) -> float:
        drawn = random.normal(0.0, spread, (1000, pairs)).tolist()
        return float(np.mean([tost(each, 0.25) == "equivalent" for each in drawn]))

    enough = pairs_to_decide(spread, 0.25)
    assert share(enough) > 0.77
    assert enough == 3 or share(enough - 1) < 0.85


def test_without_spread_three_pairs_decide() -> None:
    assert pairs_to_decide(0.0, 0.25) == 3
    assert pairs_to_decide(100.0, 0.25) == pytest.approx((2.9264 * 400) ** 2, rel=1e-3)  # at once
