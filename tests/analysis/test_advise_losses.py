"""What `fp8study advise` says of losses, and what is no evidence of them."""

import pandas as pd
import pytest

from fp8study.analysis.advice.evidence import nearest_losses, read_loss_gaps
from fp8study.analysis.laws.shape import shape_of
from fp8study.core.records import read_record
from tests.analysis.test_advise import RESULTS, advice
from tests.checkout import ROOT


def test_loss_is_told_of_unseen_text_first_and_what_it_leaves_open():
    near, far = advice("llama-3.2-1b"), advice("qwen3-14b", 4)
    assert "llama-3.2-1b" in near.loss_evidence[0] and "validation loss" in near.loss_evidence[0]
    (longest,) = [line for line in far.loss_evidence if "/new-text" in line]
    (run, *_) = (RESULTS / "h200x2" / "new-text").glob("llama-3.2-1b-fp8_tensorwise-*")
    seen = read_record(run / "run.json").data["num_tokens_seen"] / 1e6
    assert f"{seen:.3g} million tokens in" in longest
    assert f"training on more than {seen:.3g} million tokens" in near.loss_uncovered
    assert any("qwen3-14b itself" in line for line in far.loss_uncovered)


def test_the_loss_of_the_very_model_is_told_at_each_of_its_learning_rates():
    first, second = advice("llama-3.1-8b").loss_evidence[:2]
    assert "rate 2e-05" in first and "equivalent" in first
    assert "rate 0.0001" in second and "undecided" in second


def test_a_run_that_changes_its_precision_is_no_evidence_of_a_loss_in_fp8() -> None:
    table = read_loss_gaps(ROOT / "results")
    changes = table["arm"].str.contains("schedule")
    assert changes.any()
    table = table.assign(num_pairs=table["num_pairs"].mask(changes, 100))
    told, without = (
        nearest_losses(rows, [], shape_of("llama-3.2-1b"), "fp8_tensorwise")
        for rows in (table, table[~changes])
    )
    assert told == without


@pytest.mark.parametrize("kind", ["schedule bf16:1 fp8", "skips nothing", "fast accumulation"])
def test_an_arm_that_no_run_has_by_itself_is_no_evidence(kind: str) -> None:
    table = read_loss_gaps(ROOT / "results")
    other = table.assign(arm=table["arm"] + f", {kind}", num_pairs=100, gap_pct=10.0)
    told, without = (
        nearest_losses(rows, [], shape_of("llama-3.1-8b"), "fp8_tensorwise")
        for rows in (pd.concat([other, table]), table)
    )
    assert told == without and not any("+10.00" in line for line in told[0])
