"""What is said of training losses and of those on unseen text."""

from pathlib import Path

import pandas as pd
import pytest

from fp8study.analysis.claims.stability import stable_rates
from fp8study.analysis.floors import RANDOM, TRAINED
from fp8study.analysis.losses import formats_table
from fp8study.analysis.matched import equal_time_table, matched_loss_table
from fp8study.report import loss_sentences, rows
from fp8study.report import page as pages
from tests.analysis.test_decision import store_losses
from tests.analysis.test_losses import frame, store_formats
from tests.analysis.test_matched import grown, races
from tests.claim_factories import sweep, tables
from tests.factories import make_record, store


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
    is_worse = "1" if unseen_gap > 0 else "none"
    opening = loss_sentences.answer(report)
    told = f"FP8 is worse in {is_worse} of 1 decided comparison, at a margin of 0.25 % (0 more"
    assert told in opening
    said = loss_sentences.notes(report)
    assert ("after 5.0 passes; this one is equivalent in 1 (+0.0" in said) == is_said
    assert ("read its text 5.0 times over" in said) == (epochs > 1)
    trained, unseen = rows.verdicts(report).to_dict("records")
    assert (trained["where"], unseen["where"]) == (
        "training, your machine (NVIDIA H200)",
        "unseen text, your machine (NVIDIA H200)",
    )
    assert unseen["equivalent"][0] == ("1" if unseen_gap == 0.0 else "0")
    assert unseen["different"][0] == ("0" if unseen_gap == 0.0 else "1")
    assert ("FP8 better in 1" in unseen["different"]) == (unseen_gap < 0)


def test_what_has_too_few_seeds_is_counted_apart_from_what_is_undecided(tmp_path: Path) -> None:
    for seed in range(3):
        for precision in ("bf16", "fp8_rowwise", "fp8_tensorwise"):
            if precision == "fp8_tensorwise" and seed > 1:
                continue
            record = make_record(
                precision=precision, seed=seed, validation_sequences=8,
                results={"loss_last20_mean": 2.0 + seed, "validation_loss": 3.0 + seed},
            )  # fmt: skip
            store(tmp_path, "local", record)
    told = loss_sentences.answer(pages.load_report(tmp_path))
    assert "of 1 decided comparison" in told
    assert "(0 more undecided, 1 with too few seeds to say)" in told


def test_what_bf16_did_not_learn_either_is_named_as_left_out(tmp_path: Path) -> None:
    said = []
    for name, gap in {"alike": 0.0, "worse": 0.5}.items():
        store_losses(tmp_path / name, gap, data={"unigram_loss": 4.0})
        said.append(loss_sentences.notes(pages.load_report(tmp_path / name)))
    assert "**Left out: 1 comparison of training losses**, none different (losses)." in said[0]
    assert "Left out" not in said[1]


def test_the_time_that_fp8_saves_is_told_with_its_sign() -> None:
    def told(*ends: list[float], step_ms: float) -> str:
        frames = races(*ends, step_ms=step_ms)
        table = equal_time_table(frames.stored, frames.runs, frames.metrics)
        return loss_sentences.equal_time(table)

    faster = told([6, 5, 4, 3], [6, 5, 4, 3.1], [6, 5, 4, 3.2], step_ms=80.0)
    assert "FP8 tensorwise saves 17" in faster and "95 % CI 1" in faster and "n = 3" in faster
    slower = told([6, 5, 4, 3], step_ms=110.0)
    assert "saves \u221210.0 % of BF16's time, so it takes longer" in slower
    assert "CI" not in slower


def test_how_the_gap_grows_with_the_batch_is_told_at_one_loss() -> None:
    frames = grown(slope=0.05)
    table = matched_loss_table(frames.metrics, frames.runs)
    told = loss_sentences.matched(table)
    assert "+0.00 % at 1 sequence, +0.10 % at 4 sequences, +0.20 % at 16 sequences" in told
    assert "+0.050 points with each doubling (95 % CI +0.050 to +0.050, n = 3)" in told
    none = pd.DataFrame()
    further = loss_sentences.further(none, table, none, none)
    assert f"**Batches at one loss.** {told}" in further
    line = (
        "time to the same loss (`STUDY=equal-time`), optimizer states and FP16 (`STUDY=optimizer-st"
    )
    assert f"No records yet: {line}" in further


def test_narrower_states_are_told_with_their_memory_and_what_diverged(tmp_path: Path) -> None:
    gaps = {("bf16", "fp32"): 0.0, ("bf16", "bf16"): 0.1, ("fp16", "fp32"): None}
    store_formats(tmp_path, gaps)
    table = formats_table(frame(tmp_path))
    told = loss_sentences.formats(table)
    assert "BF16 with BF16 states +0.10 % of the loss (95 % CI" in told
    assert "equivalent at ±0.25 %, peak memory" in told
    assert "FP16 with FP32 states diverged in 1 seed" in told


def test_the_highest_stable_rate_is_told_with_its_seeds_and_where_nothing_was_lost() -> None:
    rates = stable_rates(tables(sweep(1, 1e-2)()))
    told = loss_sentences.stable(rates)
    assert "lama-3.2-1b, 2 seeds at each rate: FP32 master weights, warm-up 20" in told
    assert "BF16 0.01 or more, FP8 tensorwise 0.001" in told
    assert loss_sentences.stable(rates[:0]) == ""


def test_the_table_of_verdicts_names_machines_as_they_are(tmp_path: Path) -> None:
    """A page's table takes no Markdown, whose backslashes would show."""
    for precision, loss in (("bf16", 5.0), ("fp8_tensorwise", 5.01)):
        record = make_record(precision=precision, results={"loss_last20_mean": loss})
        store(tmp_path, "reference/my_box", record)
    (row,) = rows.verdicts(pages.load_report(tmp_path)).to_dict("records")
    assert row["where"] == "training, my_box"


def test_the_table_of_scatter_writes_rates_and_how_many_runs_rose() -> None:
    row = {"learning_rate": 5e-5, "num_risen": 0, "num_runs": 6, "starts_from": RANDOM}
    risen, trained = {"learning_rate": 2.5e-4, "num_risen": 2}, {"starts_from": TRAINED}
    shown = rows.scatter(pd.DataFrame([row, row | risen, row | risen | trained]))
    assert shown["rate"].tolist() == ["5e\u20115", "2.5e\u20114", "2.5e\u20114"]
    assert shown["risen"].tolist() == ["0 of 6", "2 of 6", "–"]
