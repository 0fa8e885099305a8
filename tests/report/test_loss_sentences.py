"""What is said of training losses and of those on unseen text."""

from pathlib import Path

import pytest

from fp8study.report import (
    loss_sentences,
)
from fp8study.report import page as pages
from tests.factories import (
    make_record,
    store,
)


@pytest.mark.parametrize(
    ("unseen_gap", "epochs", "is_said"),
    [(0.0, 5.0, True), (0.1, 5.0, False), (-0.1, 5.0, False), (0.0, 0.5, False)],
)
def test_a_training_loss_alone_is_called_so_on_repeated_text(
    unseen_gap: float, epochs: float, is_said: bool, tmp_path: Path
) -> None:
    for seed in range(3):
        for precision in ("bf16", "fp8_rowwise"):
            worse = precision != "bf16"
            losses = {
                "loss_last20_mean": 2.0 + seed + (0.1 + seed / 1000) * worse,
                "validation_loss": 3.0 + seed + (unseen_gap + seed / 1000) * worse,
            }
            record = make_record(
                precision=precision, seed=seed, results=losses, data={"epochs": epochs},
                validation_sequences=8,
            )  # fmt: skip
            store(tmp_path, "local", record)
    report = pages.load_report(tmp_path)
    said = loss_sentences.validation(report)
    assert ("FP8 is behind only on text that it has seen" in said) == is_said
    assert ("1 equivalent" in said) == (unseen_gap == 0.0)
    assert ("1 different" in said) == (unseen_gap != 0.0)
    assert ("(FP8 is better in 1)" in said) == (unseen_gap < 0)
    on_training = loss_sentences.training(report)
    assert ("read its text 5.0 times over" in on_training) == (epochs > 1)
