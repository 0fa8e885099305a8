"""Claim C10, of schedules that change the precision: seed by seed, against FP8 throughout."""

from __future__ import annotations

import dataclasses

import pytest

from fp8study.analysis.claims.ledger import judge_claim
from tests.analysis.test_claims import CLAIMS, NO, OPEN, SCHEDULE, YES
from tests.claim_factories import losses, tables


def test_a_schedule_is_judged_seed_by_seed_and_only_where_seeds_agree() -> None:
    """Seeds may lie apart as they like, if those in FP8 throughout do as well."""
    alike = losses(0, wobble=0.15) + losses(0, wobble=0.15, config=SCHEDULE)[1::2]
    assert ", 0 undecided" in judge_claim(CLAIMS["C10"], tables(alike)).why
    found = judge_claim(CLAIMS["C10"], tables(losses(0) + losses(0, wobble=0.15, config=SCHEDULE)))
    assert found.verdict == OPEN
    assert "1 undecided" in found.why


def test_a_schedule_of_which_a_seed_diverged_helps_nobody() -> None:
    records = losses(3) + losses(0, both=SCHEDULE)
    assert judge_claim(CLAIMS["C10"], tables(records)).verdict == YES
    records[-1] = dataclasses.replace(records[-1], status="diverged")
    found = judge_claim(CLAIMS["C10"], tables(records))
    assert found.verdict == NO, found.why


@pytest.mark.parametrize(
    ("without", "left", "wobble", "verdict"),
    [
        (0.12, 0.03, 0.0005, YES), (0.12, 0.10, 0.0005, NO), (0.12, 0.05, 0.005, OPEN),
        (0.0, -0.03, 0.0005, OPEN),
    ],
)  # fmt: skip
def test_a_small_loss_is_won_back_by_half_or_not(
    without: float, left: float, wobble: float, verdict: object
) -> None:
    """Where FP8 throughout loses for sure, if less than the margin; elsewhere nothing is won."""
    scheduled = losses(left, wobble=wobble, config=SCHEDULE)[1::2]
    records = losses(without, wobble=0.0001) + scheduled
    found = judge_claim(CLAIMS["C10"], tables(records))
    assert found.verdict == verdict, found.why


def test_schedules_are_judged_on_held_out_text_where_it_was_scored() -> None:
    records = losses(0, wobble=0.15) + losses(0, config=SCHEDULE)[1::2]
    assert ", 1 undecided" in judge_claim(CLAIMS["C10"], tables(records)).why
    for record in records:
        record.config["validation_sequences"] = 8
        record.results["validation_loss"] = 5.0 + 0.001 * record.config["seed"]
    assert ", 0 undecided" in judge_claim(CLAIMS["C10"], tables(records)).why


def test_a_run_whose_score_is_missing_is_not_judged_by_its_training_loss() -> None:
    records = losses(0) + losses(0, config=SCHEDULE)[1::2]
    for record in records:
        record.config["validation_sequences"] = 8
        record.results["validation_loss"] = 6.0
    whole = judge_claim(CLAIMS["C10"], tables(records))
    assert whole.figure is not None
    assert whole.figure.value == 0
    del records[1].results["validation_loss"]  # FP8 throughout, seed 0
    found = judge_claim(CLAIMS["C10"], tables(records))
    assert found.figure == whole.figure, found.why
    assert "(3 seeds)" in found.why


def test_a_schedule_is_held_against_what_differs_by_the_schedule_alone() -> None:
    records = losses(3) + losses(0, config=SCHEDULE)[1::2]
    alone = judge_claim(CLAIMS["C10"], tables(records))
    assert "1 of 1 schedules" in alone.why
    beside = tables(records + losses(0, config={"skip": []})[1::2])
    assert judge_claim(CLAIMS["C10"], beside).why == alone.why
