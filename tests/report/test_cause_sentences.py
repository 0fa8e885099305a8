"""What is said of document A's failure follows the losses."""

from pathlib import Path

import pandas as pd
import pytest

from fp8study.analysis.attribution import WHOLE_GAP
from fp8study.analysis.speed import document_a_table
from fp8study.report import cause_sentences
from fp8study.report import page as pages
from tests.factories import make_record, store
from tests.study_factories import store_trained


@pytest.mark.parametrize(
    ("healthy_end", "words"),
    [
        (5.41, "the stale optimizer made the failure"),
        (7.0, "made most of the failure"),
        (9.9, "does not explain it"),
    ],
)
def test_document_a_sentence_follows_the_losses(
    healthy_end: float, words: str, tmp_path: Path
) -> None:
    common = {"study": "document-a", "num_steps": 200}
    fp8 = {"precision": "fp8_tensorwise"}
    store_trained(tmp_path, "local", 5.4, **common)
    store_trained(tmp_path, "local", healthy_end, **common, **fp8)
    stale = make_record(
        optimizer_binding="before_conversion", results={"loss_last20_mean": 10.0}, **common, **fp8
    )
    stale.model["parameters_outside_optimizer_pct"] = 78.4
    store(tmp_path, "local", stale)
    arms = document_a_table(pages.load_report(tmp_path).document_a)
    text = cause_sentences.document_a(arms)
    assert words in text
    assert "78.4 %" in text


@pytest.mark.parametrize(
    ("ends", "words"), [([23.6, 24.0], "does not fix it"), ([23.6, 0.1], "fixes it in 1 of 2")]
)
def test_whether_a_larger_batch_mends_a_stale_optimizer_is_told(
    ends: list[float], words: str
) -> None:
    settings = ["batch 4, compiled", "batch 1, 4 accumulation steps, compiled", "batch 1, compiled"]
    table = pd.DataFrame({
        "part": WHOLE_GAP, "setting": settings, "mean_pct": [*ends, 52.0], "model": "tiny-llama",
        "num_pairs": 3,
    })  # fmt: skip
    text = cause_sentences.larger_batches(table)
    assert f"a larger batch {words}" in text and "52.0" not in text
    assert "batch 4: +23.6 % from BF16 (n = 3)" in text
    assert f"4 accumulation steps: +{ends[1]:.1f} %" in text
    assert "STUDY=stale-batch" in cause_sentences.larger_batches(table[2:])
