"""The estimators against simulated gradients whose covariance and errors are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fp8study.analysis.noise import moments as noise
from fp8study.core.errors import UserError

N, DIMENSION = 16, 120
#: Spreads over four decades, as in a network, and a true gradient of norm 3.
DEVIATIONS = np.geomspace(1.0, 0.01, DIMENSION)
TRACE = float((DEVIATIONS**2).sum())
TRUE_GRADIENT = np.full(DIMENSION, 3 / math.sqrt(DIMENSION))
NOISE_SCALE = TRACE / 9


@pytest.fixture
def draw() -> np.random.Generator:
    return np.random.default_rng(1)


def gradients(draw: np.random.Generator, count: int = N) -> noise.Array:
    return TRUE_GRADIENT + DEVIATIONS * draw.standard_normal((count, DIMENSION))


def inner(rows: noise.Array) -> noise.Array:
    return rows @ rows.T


def test_moments_are_unbiased(draw: np.random.Generator) -> None:
    found = [noise.moments(inner(gradients(draw))) for _ in range(600)]
    squares = np.array([m.mean_square for m in found])
    traces = np.array([m.trace for m in found])
    for values, truth in ((squares, 9.0), (traces, TRACE)):
        assert abs(values.mean() - truth) < 3.5 * values.std() / math.sqrt(len(values))
        assert values.std() < 0.5 * truth  # or the line above would say nothing


def test_a_diagonal_that_passed_for_pairs_would_be_noticed(draw: np.random.Generator) -> None:
    """The naive |mean of g|² is too large by tr(S)/N."""
    naive = np.mean([inner(gradients(draw)).mean() for _ in range(600)])
    assert naive == pytest.approx(9 + TRACE / N, rel=0.02)
    assert TRACE / N > 0.06 * 9


def test_the_noise_scale_and_its_interval_cover_about_as_often_as_they_say(
    draw: np.random.Generator,
) -> None:
    found = [noise.noise_scale(inner(gradients(draw))) for _ in range(400)]
    covered = np.mean([e.low <= NOISE_SCALE <= e.high for e in found])
    assert 0.90 < covered < 0.985
    assert np.median([e.value for e in found]) == pytest.approx(NOISE_SCALE, rel=0.05)


def test_the_noise_scale_is_unbounded_where_there_is_no_gradient(draw: np.random.Generator) -> None:
    estimates = []
    for _ in range(200):
        estimates.append(noise.noise_scale(inner(gradients(draw) - TRUE_GRADIENT)))
    assert np.mean([math.isinf(e.high) for e in estimates]) > 0.9


def planted(draw: np.random.Generator) -> tuple[noise.Array, noise.Array]:
    """Return gradients and errors: a systematic part of norm 0.2, a random one of trace 0.25."""
    systematic = np.zeros(DIMENSION)
    systematic[7] = 0.2
    random = 0.5 / math.sqrt(DIMENSION) * draw.standard_normal((N, DIMENSION))
    return gradients(draw), systematic + random


def test_planted_errors_are_taken_apart(draw: np.random.Generator) -> None:
    found = [noise.moments(inner(planted(draw)[1])) for _ in range(400)]
    assert np.mean([m.mean_square for m in found]) == pytest.approx(0.04, rel=0.05)
    assert np.mean([m.trace for m in found]) == pytest.approx(0.25, rel=0.02)
    assert noise.Moments(0.04, 0.25).at_batch(5) == pytest.approx(0.04 + 0.05)


def test_the_crossing_and_its_interval_cover_about_as_often_as_they_say(
    draw: np.random.Generator,
) -> None:
    truth = (TRACE - 0.25) / 0.04
    found = [noise.crossing_batch(*map(inner, planted(draw))) for _ in range(400)]
    covered = np.mean([e.low <= truth <= e.high for e in found])
    assert 0.90 < covered < 0.985
    assert np.median([e.value for e in found]) == pytest.approx(truth, rel=0.1)
    assert truth > 200


def test_systematic_share_covers(draw: np.random.Generator) -> None:
    truth = 0.04 / 0.29
    found = [noise.systematic_share(inner(planted(draw)[1])) for _ in range(300)]
    assert 0.88 < np.mean([e.low <= truth <= e.high for e in found]) < 0.99


@pytest.mark.parametrize("batch", [1, 2, 4, 8])
def test_the_formula_is_the_mean_over_all_subsets(batch: int) -> None:
    """So an error at an effective batch up to N is measured, not fitted."""
    import itertools

    rows = planted(np.random.default_rng(5))[1][:8]
    squares = [
        float(np.square(rows[list(chosen)].mean(0)).sum())
        for chosen in itertools.combinations(range(8), batch)
    ]
    assert noise.moments(inner(rows)).at_batch(batch) == pytest.approx(np.mean(squares))


def test_the_ratio_of_the_errors_at_a_batch() -> None:
    gradient, error = planted(np.random.default_rng(2))
    ratios = [noise.error_ratio(inner(gradient), inner(error), b).value for b in (1, 4, 1000)]
    truth = [math.sqrt((0.04 + 0.25 / b) / (TRACE / b)) for b in (1, 4, 1000)]
    assert ratios == pytest.approx(truth, rel=0.15)
    assert ratios[0] < ratios[1] < 1 < ratios[2]


def test_an_error_larger_than_the_noise_has_crossed_already() -> None:
    gradient, error = planted(np.random.default_rng(3))
    found = noise.crossing_batch(inner(gradient), inner(100 * error))
    assert (found.value, found.high) == (0, 0)


def test_a_crossing_that_may_be_anywhere_is_not_said_to_be_at_nothing(
    draw: np.random.Generator,
) -> None:
    """The random error is as large as the noise: every second estimate has crossed by chance."""
    found = []
    for _ in range(100):
        errors = 0.1 * TRUE_GRADIENT + DEVIATIONS * draw.standard_normal((N, DIMENSION))
        found.append(noise.crossing_batch(inner(gradients(draw)), inner(errors)))
    assert 30 < sum(each.value == 0 for each in found) < 70
    assert sum(each.high == 0 for each in found) < 10


def test_an_error_without_a_systematic_part_never_crosses() -> None:
    gradient = gradients(np.random.default_rng(4))
    error = np.zeros_like(gradient)
    error[np.arange(N), np.arange(N)] = 0.1  # orthogonal: the mean of all pairs is exactly zero
    found = noise.crossing_batch(inner(gradient), inner(error))
    assert found.value == math.inf == found.high


def test_variance_falls_with_the_batch_unless_neighbours_agree(draw: np.random.Generator) -> None:
    outside = 0
    for _ in range(60):
        found = noise.inverse_law([inner(gradients(draw))], [4])
        outside += not found.low <= found.value <= found.high
    assert outside <= 9  # 3 expected
    rows = np.repeat(gradients(draw, N // 2), 2, axis=0)  # each sequence twice in a row
    alike = noise.inverse_law([inner(rows)], [2])
    assert alike.value > alike.high > 1
    assert alike.value == pytest.approx(2, rel=0.15)


def test_one_run_is_one_test_of_the_inverse_law(draw: np.random.Generator) -> None:
    """Points that share their sequences must not narrow the band as independent ones would."""
    gram = inner(gradients(draw))
    once, thrice = noise.inverse_law([gram], [2, 4]), noise.inverse_law([gram] * 3, [2, 4])
    assert (thrice.value, thrice.low, thrice.high) == pytest.approx(
        (once.value, once.low, once.high)
    )
    parts = [noise.inverse_law([gram], [b]).value for b in (2, 4)]
    assert once.value == pytest.approx(np.mean(parts))


def test_runs_in_random_order_leave_the_band_as_often_as_they_should(
    draw: np.random.Generator,
) -> None:
    outside = 0
    for _ in range(100):
        rows = gradients(draw)
        found = noise.inverse_law([inner(rows), inner(rows * DEVIATIONS)], [2, 4])
        outside += not found.low <= found.value <= found.high
    assert 1 <= outside <= 12  # 5 expected


def test_relative_error_cosine_and_sqnr_of_a_known_pair() -> None:
    reference, error = np.array([3.0, 4.0]), np.array([-4.0, 3.0]) / 10
    sums = (error @ error, reference @ reference, error @ reference)
    assert noise.relative_error(*sums[:2]) == pytest.approx(0.1)
    assert noise.cosine(*sums) == pytest.approx(1 / math.sqrt(1.01))
    assert noise.sqnr_db(0.1) == pytest.approx(20)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (np.ones((4, 3)), r"gram: shape \(4, 3\)"),
        (np.ones((3, 3)), "N of 4 or more"),
        ([[None] * 4] * 4, "not all are finite"),
    ],
)
def test_what_is_no_gram_matrix_is_refused(rows: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        noise.gram_matrix(rows)


def test_impossible_questions_are_refused() -> None:
    gram = inner(gradients(np.random.default_rng(0)))
    with pytest.raises(UserError, match=r"^batch: 9 makes no two groups of 16"):
        noise.inverse_law([gram], [9])
    with pytest.raises(UserError, match=r"^batch: 0 is not positive"):
        noise.error_ratio(gram, gram, 0)
    with pytest.raises(UserError, match=r"^gram: sizes \[16, 8\] differ"):
        noise.crossing_batch(gram, gram[:8, :8])
