import math

import numpy as np
import pytest

from fp8study.analysis.arms import LEVEL, ratio_of
from fp8study.core.errors import UserError


def test_ratio_is_that_of_geometric_means_and_lies_inside_its_interval() -> None:
    ratio = ratio_of([[110.0, 121.0, 133.1]], [[100.0, 110.0, 121.0]])
    assert ratio is not None
    assert ratio.interval is not None
    assert ratio.estimate == pytest.approx(1.1)
    # On a log scale the interval is symmetric.
    ends = ratio.interval.low, ratio.interval.high
    assert math.sqrt(ends[0] * ends[1]) == pytest.approx(1.1)
    assert ratio.interval_text() == f"{ends[0]:.3f} to {ends[1]:.3f}"


def test_the_other_way_round_is_the_reciprocal() -> None:
    a, b = [90.0, 100.0, 104.0], [130.0, 131.0, 140.0]
    there, back = ratio_of([a], [b]), ratio_of([b], [a])
    assert there is not None
    assert back is not None
    assert there.interval is not None
    assert back.interval is not None
    assert there.estimate == pytest.approx(1 / back.estimate)
    assert there.interval.low == pytest.approx(1 / back.interval.high)


@pytest.mark.parametrize(("count", "words"), [(1, "no interval: 1 run"), (2, "2 runs")])
def test_with_fewer_than_three_runs_there_is_no_interval(count: int, words: str) -> None:
    ratio = ratio_of([[120.0] * count], [[100.0, 100.0, 100.0]])
    assert ratio is not None
    assert ratio.interval is None
    assert ratio.estimate == pytest.approx(1.2)
    assert words in ratio.interval_text()


def test_an_empty_group_gives_no_ratio_and_a_rate_of_zero_is_refused() -> None:
    assert ratio_of([[1.0]], [[]]) is None
    with pytest.raises(UserError, match="positive"):
        ratio_of([[1.0]], [[0.0]])


@pytest.mark.parametrize("num_groups", [1, 2])
def test_interval_covers_the_ratio_of_simulated_runs(num_groups: int) -> None:
    """Three runs a group with 2 % of spread, as log-normal as timings are."""
    rng = np.random.default_rng(3)
    truth, tries = 1.3**num_groups, 2000
    missed = 0
    for _ in range(tries):
        above = [(130 * np.exp(rng.normal(0, 0.02, 3))).tolist() for _ in range(num_groups)]
        below = [(100 * np.exp(rng.normal(0, 0.02, 3))).tolist() for _ in range(num_groups)]
        ratio = ratio_of(above, below)
        assert ratio is not None
        assert ratio.interval is not None
        missed += not ratio.interval.low <= truth <= ratio.interval.high
    # Welch's method errs on the safe side where spreads are equal.
    assert 1 - LEVEL - 0.03 < missed / tries < 1 - LEVEL + 0.015
