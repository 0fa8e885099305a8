"""Claim C14: the highest learning rate that trains, and what a sweep of rates is told to show."""

import pytest

from fp8study.analysis.claims.finding import Verdict
from fp8study.analysis.claims.ledger import all_claims, judge_claim
from fp8study.analysis.losses import comparisons
from fp8study.report.rows import verdict_row
from tests.claim_factories import Frames, pair, rising, sweep, tables, with_warm_up

(CLAIM,) = (claim for claim in all_claims() if claim.id == "C14")


def test_the_edge_of_stability_is_told_by_precision_masters_and_warm_up() -> None:
    masters = {"master_dtype": "bf16"}
    records = with_warm_up(1e-3, 1e-2)() + sweep(1e-3, 1e-4, **masters)()
    found = judge_claim(CLAIM, tables(records))
    assert "FP32 master weights, warm-up 20: BF16 0.001, FP8 tensorwise 0.0001" in found.why
    assert "FP32 master weights, warm-up 100: BF16 0.001, FP8 tensorwise 0.001" in found.why
    assert "BF16 master weights, warm-up 20: BF16 0.0001, FP8 tensorwise none" in found.why
    assert "raises it in 1 of 1 arms" in found.why
    assert "raise either precision's in 2 of 2" in found.why
    assert found.figure is not None
    assert (found.figure.low, found.figure.high) == pytest.approx((0, 100))
    assert len(found.runs) == len(records)


def test_a_sweep_of_one_seed_does_not_make_another_undecided() -> None:
    records = sweep(1e-2, 1e-3)() + sweep(1e-2, 1e-2, seed=5, sequence_length=512)()
    found = judge_claim(CLAIM, tables(records))
    assert (found.verdict, "2 seeds at each rate" in found.why) == (Verdict.REPRODUCED, True)


def test_a_warm_up_or_masters_of_one_seed_decide_nothing_beside_two() -> None:
    alone = {"seed": 0, "warm_up": 100}, {"seed": 0, "master_dtype": "bf16"}
    records = sweep(1e-2, 1e-3)() + [run for how in alone for run in sweep(1e-2, 1e-3, **how)()]
    found = judge_claim(CLAIM, tables(records))
    assert found.verdict == Verdict.REPRODUCED
    assert "in 0 of 0 arms" in found.why and "in 0 of 0 (" in found.why
    assert (
        "(FP32 master weights, warm-up 20: BF16 0.001, FP8 tensorwise 0.0001; 2 seeds" in found.why
    )


def test_one_lost_seed_is_enough_for_a_rate_to_be_unstable() -> None:
    records = sweep(1, 1, seed=0)() + sweep(1, 1e-2, seed=1)()
    found = judge_claim(CLAIM, tables(records))
    assert found.verdict == Verdict.REPRODUCED
    assert "BF16 0.01 or more, FP8 tensorwise 0.001; 2 seeds at each rate" in found.why


def test_arms_are_compared_by_the_seeds_and_rates_that_both_were_run_at() -> None:
    """A third seed of one arm, or a rate that the other was not run at, makes no edge lower."""
    records = sweep(1e-2, 1e-2)() + rising("fp8_tensorwise", 1e-3, seed=2)
    found = judge_claim(CLAIM, tables(records))
    assert (found.verdict, "in 0 of 1 settings" in found.why) == (Verdict.CONTRADICTED, True)
    assert "2 seeds at each rate" in found.why
    lost_by_one_alone = sweep(1, 1)() + rising("fp8_tensorwise", 1e-3, seed=2)
    assert judge_claim(CLAIM, tables(lost_by_one_alone)).verdict == Verdict.UNDECIDED
    highest = [run for run in sweep(1e-2, 1e-2)() if run.config["learning_rate"] == 1e-2]
    lower = [run for run in sweep(1, 1)() if run.config["learning_rate"] < 1e-2]
    only_bf16 = lower + [run for run in highest if run.config["precision"] == "bf16"]
    assert judge_claim(CLAIM, tables(only_bf16)).verdict == Verdict.UNDECIDED


def test_a_sweep_of_few_seeds_is_no_comparison_of_losses() -> None:
    """Not even where FP8 alone diverged, which is what a sweep is made to find."""
    gaps = Frames(sweep(1, 1e-2)()).loss_gaps
    assert (len(gaps), verdict_row(gaps)["num_judged"], verdict_row(gaps)["num_few"]) == (3, 0, 0)
    assert "diverged" in set(gaps["verdict"])
    assert tables(sweep(1, 1e-2)()).gaps.empty
    assert verdict_row(Frames(pair()).loss_gaps)["num_few"] == 1
    seeds = [run for seed in range(3) for run in sweep(1, 1, seed=seed)()]
    assert len(comparisons(Frames(seeds).loss_gaps)) == 3  # of these each can be judged


def test_an_edge_that_is_as_often_higher_in_fp8_shows_no_lower_one() -> None:
    masters = {"master_dtype": "bf16"}
    records = sweep(1e-2, 1e-3)() + sweep(1e-3, 1e-2, **masters)()
    found = judge_claim(CLAIM, tables(records))
    assert "below BF16's in 1 of 2 settings and above it in 1 of 2" in found.why
    assert found.verdict == Verdict.PARTLY
