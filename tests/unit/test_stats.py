import numpy as np
import pytest
from scipy import stats as scipy_stats
from statsmodels.stats.weightstats import ttost_paired

from fp8study.errors import UserError
from fp8study.stats import paired_t_interval, tost


def differences(mean: float, spread: float, count: int) -> list[float]:
    return np.random.default_rng(7).normal(mean, spread, count).tolist()


@pytest.mark.parametrize("count", [2, 3, 10])
@pytest.mark.parametrize("level", [0.9, 0.95])
def test_interval_is_scipys(count: int, level: float) -> None:
    values = differences(0.3, 1.0, count)
    expected = scipy_stats.ttest_1samp(values, 0).confidence_interval(level)
    interval = paired_t_interval(values, level)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))


def test_interval_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        interval = paired_t_interval(rng.normal(1.0, 2.0, 3).tolist(), 0.9)
        hits += interval.low <= 1.0 <= interval.high
    assert 0.88 < hits / 2000 < 0.92


@pytest.mark.parametrize("mean", [-0.4, 0.0, 0.02, 0.5])
def test_tost_has_statsmodels_p_value(mean: float) -> None:
    values = np.array(differences(mean, 0.2, 6))
    expected = ttost_paired(values, np.zeros(6), -0.25, 0.25)[0]
    assert tost(values.tolist(), 0.25).p_value == pytest.approx(expected)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([0.01, 0.02, 0.00], "equivalent"),
        ([1.01, 1.02, 1.00], "different"),
        ([-1.01, -1.02, -1.00], "different"),
        ([0.1, 0.4, -0.2], "undecided"),
        # Clearly not zero, yet not clearly past the margin.
        ([0.24, 0.25, 0.26], "undecided"),
        ([0.1, 0.1, 0.1], "equivalent"),
        ([0.3, 0.3, 0.3], "different"),
    ],
)
def test_verdict(values: list[float], verdict: str) -> None:
    outcome = tost(values, 0.25)
    assert outcome.verdict == verdict
    inside = outcome.interval.low > -0.25 and outcome.interval.high < 0.25
    assert inside == (verdict == "equivalent")


@pytest.mark.parametrize("values", [[], [1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_too_little_or_broken_data_is_refused(values: list[float]) -> None:
    with pytest.raises(UserError, match="differences"):
        paired_t_interval(values, 0.9)


@pytest.mark.parametrize("margin", [0.0, -1.0, float("nan")])
def test_margin_must_be_positive(margin: float) -> None:
    with pytest.raises(UserError, match="margin"):
        tost([1.0, 2.0], margin)


def test_level_must_be_a_probability() -> None:
    with pytest.raises(UserError, match="level"):
        paired_t_interval([1.0, 2.0], 95)
