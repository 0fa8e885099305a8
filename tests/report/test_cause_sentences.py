"""What is said of document A's failure follows the losses."""

from pathlib import Path

import pytest

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
    text = cause_sentences.document_a(pages.load_report(tmp_path))
    assert words in text
    assert "78.4 %" in text
