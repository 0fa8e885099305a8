import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import ttost_paired

from fp8study.analysis.stats import (
    holm,
    paired_t_interval,
    paired_t_p_value,
    pairs_to_decide,
    smallest_detectable,
    tost,
    welch_t_interval,
)
from fp8study.core.errors import UserError


def differences(mean: float, spread: float, count: int) -> list[float]:
    return np.random.default_rng(7).normal(mean, spread, count).tolist()


@pytest.mark.parametrize("count", [2, 3, 10])
def test_interval_and_p_value_are_scipys(count: int) -> None:
    values = differences(0.3, 1.0, count)
    expected = scipy_stats.ttest_1samp(values, 0)
    assert paired_t_p_value(values) == pytest.approx(expected.pvalue)
    for level in (0.9, 0.95):
        interval, ends = paired_t_interval(values, level), expected.confidence_interval(level)
        assert (interval.low, interval.high) == pytest.approx((ends.low, ends.high))


def test_p_value_of_differences_that_are_all_alike() -> None:
    assert paired_t_p_value([0.0, 0.0]) == 1.0
    assert paired_t_p_value([0.1, 0.1]) == 0.0


def test_tost_is_statsmodels() -> None:
    found = []
    for mean in np.linspace(-0.5, 0.5, 101):
        values = np.array(differences(mean, 0.2, 6))
        p_value = ttost_paired(values, np.zeros(6), -0.25, 0.25)[0]
        found.append(p_value < 0.05)
        assert (tost(values.tolist(), 0.25) == "equivalent") == found[-1]
    assert 5 < sum(found) < 50


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
    assert tost(values, 0.25) == verdict


@pytest.mark.parametrize(
    ("refuse", "wrong", "name"),
    [
        *((lambda v: tost([1.0, 2.0], v), v, "margin") for v in (0.0, -1.0, math.nan)),
        (lambda v: paired_t_interval([1.0, 2.0], v), 95, "level"),
        *((holm, v, "p_values") for v in ([0.1, math.nan], [-0.1], [1.1])),
        *((lambda v: smallest_detectable(*v), v, "spread") for v in ((-0.1, 5), (math.nan, 5))),
        (lambda v: smallest_detectable(*v), (0.1, 1), "num_pairs"),
        *((lambda v: pairs_to_decide(*v), v, "spread, margin")
          for v in ((-0.1, 0.25), (math.nan, 0.25), (0.1, 0.0))),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_refused_by_name(
    refuse: Callable[[Any], object], wrong: object, name: str
) -> None:
    with pytest.raises(UserError, match=f"^{name}: "):
        refuse(wrong)


@pytest.mark.parametrize("values", [[], [1.0], [1.0, math.nan], [1.0, math.inf]])
def test_too_few_values_and_no_numbers_are_refused(values: list[float]) -> None:
    with pytest.raises(UserError, match="differences"):
        paired_t_interval(values, 0.9)


#: Three standard errors of a share of 5 % among this many simulated experiments.
RUNS = 3000
ALLOWANCE = 3 * (0.05 * 0.95 / RUNS) ** 0.5


@pytest.mark.parametrize(
    "p_values",
    [[0.01, 0.04, 0.03, 0.005], [0.5, 0.5], [1.0, 0.0, 0.2], [0.02], [], [0.013, 0.012, 0.011]],
)
def test_holm_is_statsmodels(p_values: list[float]) -> None:
    expected = multipletests(p_values, method="holm")[1].tolist() if p_values else []
    assert holm(p_values) == pytest.approx(expected)


def test_welch_interval_is_scipys() -> None:
    one, other = differences(1.0, 1.0, 4), [3.0, 5.0, 4.5, 2.0, 9.0]
    expected = scipy_stats.ttest_ind(one, other, equal_var=False).confidence_interval(0.9)
    interval = welch_t_interval([one, other], [1, -1], 0.9)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize("spreads", [(1, 1), (1, 5), (1, 1, 1, 1), (1, 3, 1, 3)])
def test_welch_interval_covers_at_least_about_95_pct(spreads: tuple[float, ...]) -> None:
    """Three runs a group, equal spreads or not: Welch's method may err by a point or two."""
    rng = np.random.default_rng(5)
    weights = [1.0, -1.0] if len(spreads) == 2 else [1.0, -1.0, -1.0, 1.0]
    missed = 0
    for _ in range(RUNS):
        groups = [rng.normal(2.0, spread, 3).tolist() for spread in spreads]
        interval = welch_t_interval(groups, weights, 0.95)
        missed += not interval.low <= 0.0 <= interval.high
    assert 0.015 < missed / RUNS < 0.05 + ALLOWANCE + 0.01


def test_welch_interval_at_its_ends() -> None:
    equal = welch_t_interval([[2.0, 2.0], [1.0, 1.0]], [1, -1], 0.95)
    assert (equal.low, equal.high) == (1.0, 1.0)
    # Half of the groups without spread: the others' degrees of freedom are left.
    half = welch_t_interval([[1.0, 1.0, 1.0], [1e-9, 2e-9, 3e-9]], [1, -1], 0.95)
    assert half.high - half.low == pytest.approx(2 * 4.302653 * 1e-9 / 3**0.5, rel=1e-4)
    with pytest.raises(UserError):
        welch_t_interval([[1.0], [1.0, 2.0]], [1, -1], 0.9)
