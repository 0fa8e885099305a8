"""Claim C10, of schedules that change the precision: seed by seed, against FP8 throughout."""

from __future__ import annotations

import dataclasses

import pytest

from fp8study.analysis.claims.ledger import judge_claim
from fp8study.analysis.claims.tables import Tables
from tests.analysis.test_claims import BOTH_ENDS, CLAIMS, NO, OPEN, SCHEDULE, YES
from tests.claim_factories import Frames, losses, tables


def test_a_schedule_is_judged_seed_by_seed_and_only_where_seeds_agree() -> None:
    """Seeds may lie apart as they like, if those in FP8 throughout do as well."""
    alike = losses(0, wobble=0.15) + losses(3, wobble=0.15, config=BOTH_ENDS)[1::2]
    assert judge_claim(CLAIMS["C10"], tables(alike)).verdict == NO
    found = judge_claim(CLAIMS["C10"], tables(losses(0) + losses(3, wobble=0.15, config=BOTH_ENDS)))
    assert found.verdict == OPEN
    assert "of 1 it is not known" in found.why


def test_a_schedule_of_which_a_seed_diverged_helps_nobody() -> None:
    records = losses(3) + losses(0, both=BOTH_ENDS)
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
    scheduled = losses(left, wobble=wobble, config=BOTH_ENDS)[1::2]
    records = losses(without, wobble=0.0001) + scheduled
    found = judge_claim(CLAIMS["C10"], tables(records))
    assert found.verdict == verdict, found.why


def test_schedules_are_judged_on_held_out_text_where_it_was_scored() -> None:
    records = losses(0, wobble=0.15) + losses(0, config=BOTH_ENDS)[1::2]
    assert judge_claim(CLAIMS["C10"], tables(records)).verdict == OPEN
    for record in records:
        record.config["validation_sequences"] = 8
        is_worse = bool(record.config.get("precision_schedule"))
        record.results["validation_loss"] = 5.0 + 0.001 * record.config["seed"] + 0.1 * is_worse
    assert judge_claim(CLAIMS["C10"], tables(records)).verdict == NO


def test_what_is_known_of_one_end_says_nothing_of_the_other() -> None:
    records = losses(3)
    for seed, schedule in enumerate(
        (["bf16:10", "fp8_tensorwise"], ["fp8_tensorwise:-10", "bf16"])
    ):
        assert judge_claim(CLAIMS["C10"], tables(records)).verdict == OPEN, seed
        records += losses(3, config={"precision_schedule": schedule})[1::2]
    assert judge_claim(CLAIMS["C10"], tables(records)).verdict == NO


def test_fp8_throughout_is_told_by_all_its_seeds_in_any_order() -> None:
    few = losses(3, seeds=3, config=SCHEDULE)[1::2]
    records = losses(3, seeds=5) + few + losses(3, seeds=5, config=BOTH_ENDS)[1::2]
    told = judge_claim(CLAIMS["C10"], tables(records)).why
    assert judge_claim(CLAIMS["C10"], tables(records[::-1])).why.split(";")[0] == told.split(";")[0]
    alone = losses(3, seeds=5) + losses(3, seeds=5, config=BOTH_ENDS)[1::2]
    assert judge_claim(CLAIMS["C10"], tables(alone)).why.split(";")[0] == told.split(";")[0]


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


def test_seeds_of_several_machines_are_one_arms_and_pairs_are_of_one_machine() -> None:
    scheduled = losses(0.03, seeds=3, wobble=0.0005, config=BOTH_ENDS)[1::2]
    records = losses(0.12, seeds=3, wobble=0.0001) + scheduled
    there = [record for record in records if record.config["seed"] == 2]
    for record in there:  # another loss altogether, but FP8 is as far from BF16
        record.results["loss_last20_mean"] *= 1.1
    here = [record for record in records if record not in there]
    frames = Frames(here, "a")
    frames.stored += Frames(there, "b").stored
    found = judge_claim(CLAIMS["C10"], Tables(frames, ["a", "b"]))
    assert found.verdict == YES, found.why
    assert judge_claim(CLAIMS["C10"], Tables(frames, ["a"])).verdict == OPEN  # two seeds
    for record in there:
        record.data["corpus_sha256"] = "of another text"
    apart = Frames(here, "a")
    apart.stored += Frames(there, "b").stored
    assert judge_claim(CLAIMS["C10"], Tables(apart, ["a", "b"])).verdict == OPEN
