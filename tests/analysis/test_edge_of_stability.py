"""Claim C14: the highest learning rate that trains, and what a sweep of rates is told to show."""

import pytest

from fp8study.analysis.claims.finding import Verdict
from fp8study.analysis.claims.ledger import all_claims, judge_claim
from tests.claim_factories import sweep, tables, with_warm_up

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


def test_one_lost_seed_is_enough_for_a_rate_to_be_unstable() -> None:
    records = sweep(1, 1, seed=0)() + sweep(1, 1e-2, seed=1)()
    found = judge_claim(CLAIM, tables(records))
    assert found.verdict == Verdict.REPRODUCED
    assert "BF16 0.01 or more, FP8 tensorwise 0.001; 2 seeds at each rate" in found.why
