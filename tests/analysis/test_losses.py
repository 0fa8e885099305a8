"""Loss gaps: pairs, intervals, verdicts, and what a divergence does to them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pandas as pd
import pytest

from fp8study.analysis import stats
from fp8study.analysis.losses import (
    effective_batch_table,
    formats_table,
    gap_curves,
    loss_gap_table,
    pass_table,
    seed_spread,
    ways_table,
)
from fp8study.analysis.runs.frames import metrics_frame
from fp8study.analysis.runs.pairing import pairs_of
from fp8study.analysis.speed import document_a_table, throughput_table
from fp8study.analysis.stats import smallest_detectable
from fp8study.core.records import load_runs, read_record, write_record
from fp8study.report import cause_sentences, loss_sentences
from fp8study.report.page import load_report
from fp8study.report.rows import verdict_row
from tests.factories import loss_curve, make_record, store
from tests.study_factories import make_effective_batch
from tests.table_factories import fp8_row, frame, store_losses, store_pair, store_repeat


def test_one_pair_has_no_interval(tmp_path: Path) -> None:
    store_pair(tmp_path, {"results": {"loss_last20_mean": 5.61}})
    row = loss_gap_table(frame(tmp_path)).iloc[0]
    assert row["gap"] == pytest.approx(0.11)
    assert row["gap_pct"] == pytest.approx(2.0)
    assert row[["gap_pct_low_90", "gap_pct_high_95"]].isna().all()
    assert row["verdict"] == "undecided"


@pytest.mark.parametrize(
    ("gaps", "verdict"),
    [((0.001, 0.002, 0.0), "equivalent"), ((0.5, 0.51, 0.49), "different")],
)
def test_three_pairs_have_an_interval_and_a_verdict(
    gaps: tuple[float, ...], verdict: str, tmp_path: Path
) -> None:
    fp8 = [5.0 + seed + gap for seed, gap in enumerate(gaps)]
    store_losses(tmp_path, {"bf16": [5.0, 6.0, 7.0], "fp8_rowwise": fp8})
    row = loss_gap_table(frame(tmp_path)).iloc[0]
    assert row["num_pairs"] == 3
    assert row["verdict"] == verdict
    assert row["gap_pct_low_95"] < row["gap_pct_low_90"] < row["gap_pct"]


def test_the_validation_loss_is_compared_where_it_was_measured(tmp_path: Path) -> None:
    for seed, (trained, unseen) in enumerate(((2.0, 3.0), (2.1, 3.1), (2.2, None))):
        for precision, worse in (("bf16", 1.0), ("fp8_rowwise", 1.1)):
            results = {"loss_last20_mean": trained * worse, "validation_loss": unseen}
            record = make_record(
                precision=precision, seed=seed, results=results, validation_sequences=8
            )
            store(tmp_path, "local", record)
    runs = frame(tmp_path)
    row = loss_gap_table(runs, loss="validation_loss").iloc[0]
    assert (row["num_pairs"], row["num_lost"], row["gap_pct"]) == (2, 1, 0.0)
    assert row["loss"] == row["loss_bf16"] == pytest.approx(3.05)
    assert loss_gap_table(runs).iloc[0]["gap_pct"] == pytest.approx(10.0)


def test_repeats_of_a_seed_count_once_and_the_newest_counts(tmp_path: Path) -> None:
    for minute, (bf16, fp8) in enumerate(((5.0, 9.0), (6.0, 9.0), (4.0, 5.0))):
        store_repeat(tmp_path, "bf16", minute, bf16)
        store_repeat(tmp_path, "fp8_rowwise", minute, fp8)
    runs = frame(tmp_path)
    row = loss_gap_table(runs).iloc[0]
    assert (row["num_pairs"], row["num_lost"]) == (1, 0)
    assert (row["loss_bf16"], row["loss"]) == (4.0, 5.0)
    assert row[["gap_pct_low_90", "gap_pct_high_95"]].isna().all()
    for table in (throughput_table(runs), document_a_table(runs)):
        assert table["num_runs"].tolist() == [1, 1]
        assert table["tokens_per_second_per_gpu"].tolist() == [4.0, 5.0]
        assert fp8_row(table)["speedup_pct"] == pytest.approx(25)


def test_newer_divergence_is_not_hidden_by_an_older_success(tmp_path: Path) -> None:
    store_pair(tmp_path, {})
    again = {"run_id": "again", "ended_at": "2000-01-02T00:00:00+00:00"}
    store(tmp_path, "local", make_record(precision="fp8_tensorwise", status="failed", **again))
    assert loss_gap_table(frame(tmp_path))["num_pairs"].tolist() == [1]
    again["run_id"] = "and-again"
    store(tmp_path, "local", make_record(precision="fp8_tensorwise", status="diverged", **again))
    row = loss_gap_table(frame(tmp_path)).iloc[0]
    assert (row["num_pairs"], row["num_diverged"], row["verdict"]) == (0, 1, "diverged")


@pytest.mark.parametrize("survivors", [3, 0])
def test_survivors_of_a_divergence_are_never_equivalent(survivors: int, tmp_path: Path) -> None:
    left = [5.001 + 0.001 * seed for seed in range(survivors)]
    bf16 = [5.0] * (survivors + 2)
    store_losses(tmp_path, {"bf16": bf16, "fp8_rowwise": [*left, None, None]})
    (row,) = loss_gap_table(frame(tmp_path)).to_dict("records")
    assert (row["num_pairs"], row["num_diverged"], row["verdict"]) == (survivors, 2, "diverged")
    assert row["judged"] == f"diverged in 2 of {survivors + 2} seeds"
    text = loss_sentences.notes(load_report(tmp_path))
    assert "In 1 comparison FP8 diverged in a seed in which BF16 did not" in text
    told = verdict_row(loss_gap_table(frame(tmp_path)))
    assert (told["num_judged"], told["equivalent"], told["num_few"]) == (0, "0", 0)
    assert "nan" not in text


def test_p_values_are_adjusted_over_the_healthy_arms_of_a_study(tmp_path: Path) -> None:
    costs = {"fp8_tensorwise": 0.010, "fp8_rowwise": 0.004}
    losses = {
        precision: [5.0 + seed + cost * (1 + 0.3 * (-1) ** seed) for seed in range(4)]
        for precision, cost in ({"bf16": 0.0} | costs).items()
    }
    store_losses(tmp_path, losses)
    table = loss_gap_table(frame(tmp_path))
    assert table["p_holm"].tolist() == pytest.approx(stats.holm(table["p_value"].tolist()))
    gaps = 100 * costs["fp8_rowwise"] * pd.Series([1.3 / 5, 0.7 / 6, 1.3 / 7, 0.7 / 8])
    row = table[table["precision"] == "fp8_rowwise"].iloc[0]
    assert row["p_value"] == pytest.approx(stats.paired_t_p_value(gaps.tolist()), rel=1e-6)
    assert row["detectable_pct"] == pytest.approx(smallest_detectable(gaps.std(), 4), rel=1e-6)


def test_the_first_repeat_is_the_one_that_pairs(tmp_path: Path) -> None:
    """Whichever ends last: the order in which a pipeline finishes says nothing."""
    for repeat, hour, loss in ((0, 1, 5.0), (1, 2, 6.0), (0, 0, 9.0)):
        ended = f"2000-01-01T0{hour}:00:00+00:00"
        results = {"loss_last20_mean": loss}
        record = make_record(run_id=f"bf16-{hour}", ended_at=ended, results=results)
        record.config["repeat"] = repeat
        store(tmp_path, "local", record)
    record = make_record(precision="fp8_rowwise", results={"loss_last20_mean": 5.5})
    store(tmp_path, "local", record)
    (row,) = loss_gap_table(frame(tmp_path)).to_dict("records")
    assert row["loss_bf16"] == 5.0


def test_verdicts_from_failure_studies_alone_are_said_so(tmp_path: Path) -> None:
    losses = {"bf16": [5.0] * 3, "fp8_rowwise": [5.001, 5.0011, 5.0012]}
    words = "All are from studies of document A's failure"
    store_losses(tmp_path, losses, study="attribution")
    assert words in loss_sentences.notes(load_report(tmp_path))
    store_losses(tmp_path, losses, study="loss-parity")
    assert words not in loss_sentences.notes(load_report(tmp_path))


def test_seeds_of_two_versions_of_torchao_are_two_arms(tmp_path: Path) -> None:
    for seed in range(4):
        for precision, loss in (("bf16", 5.0), ("fp8_rowwise", 5.001)):
            versions = {"torch": "2.11.0", "torchao": "0.17.0" if seed < 2 else "0.18.0"}
            results = {"loss_last20_mean": loss}
            record = make_record(precision=precision, seed=seed, versions=versions, results=results)
            store(tmp_path, "local", record)
    assert loss_gap_table(frame(tmp_path))["num_pairs"].tolist() == [2, 2]
    assert throughput_table(frame(tmp_path))["num_runs"].tolist() == [4, 2, 2]


def test_a_divergence_that_bf16_shares_is_none_of_fp8s(tmp_path: Path) -> None:
    store_pair(tmp_path, {})
    for precision in ("bf16", "fp8_tensorwise"):
        store(tmp_path, "local", make_record(precision=precision, seed=1, status="diverged"))
    row = loss_gap_table(frame(tmp_path)).iloc[0]
    assert (row["num_pairs"], row["num_lost"], row["num_diverged"]) == (1, 1, 0)


def test_a_batch_at_which_fp8_diverges_is_a_failure(tmp_path: Path) -> None:
    make_effective_batch(tmp_path, seeds=1)
    lost = {"status": "diverged", "results": {"loss_last20_mean": None}}
    for precision, end in (("bf16", {}), ("fp8_tensorwise", lost)):
        record = make_record(study="effective-batch", seed=7, precision=precision, **end)
        store(tmp_path, "reference/h200x8", record)
    runs = frame(tmp_path)
    text = cause_sentences.effective_batch(effective_batch_table(runs), ways_table(runs))
    assert "In 1 comparison FP8 diverged" in text
    assert "FP8 fails to learn in 1 setting." in text
    assert "nan" not in text


def test_the_margin_is_the_one_that_the_study_states(tmp_path: Path) -> None:
    store_losses(tmp_path, {"bf16": [100.0] * 3, "fp8_rowwise": [100.9, 101.0, 101.1]})
    narrow = loss_gap_table(frame(tmp_path)).iloc[0]
    for path in tmp_path.rglob("run.json"):
        record = dataclasses.replace(read_record(path), judgement={"margin_pct": 2.0})
        write_record(record, path.parent)
    wide = loss_gap_table(frame(tmp_path)).iloc[0]
    assert (narrow["margin_pct"], narrow["verdict"]) == (0.25, "different")
    assert (wide["margin_pct"], wide["verdict"]) == (2.0, "equivalent")
    assert wide["gap_pct_high_90"] == narrow["gap_pct_high_90"]


def test_runs_that_state_several_margins_get_no_verdict(tmp_path: Path) -> None:
    for seed in range(3):
        for precision in ("bf16", "fp8_rowwise"):
            judgement = {"margin_pct": 0.25 if seed else 2.0, "speed_only": False}
            record = make_record(seed=seed, precision=precision, judgement=judgement)
            store(tmp_path, "local", record)
    row = loss_gap_table(frame(tmp_path)).iloc[0]
    assert (row["verdict"], row["judged"]) == ("undecided", "none: its runs state several margins")
    assert row["gap_pct_low_95"] <= row["gap_pct"]  # the numbers stay
    report = load_report(tmp_path)
    (line,) = report.unreadable
    assert "local/quick: its runs state margins of 0.25 and 2 %" in line
    assert verdict_row(report.loss_gaps)["num_judged"] == 0


def test_older_runs_are_judged_as_the_others_of_their_study(tmp_path: Path) -> None:
    store(tmp_path, "local", make_record(seed=0))
    judgement = {"margin_pct": 2.0, "speed_only": False}
    store(tmp_path, "local", make_record(seed=1, judgement=judgement))
    store(tmp_path, "local", make_record(study="alone"))
    assert frame(tmp_path).groupby("study")["margin_pct"].unique().map(list).to_dict() == {
        "alone": [0.25], "quick": [2.0],
    }  # fmt: skip


@pytest.mark.parametrize("speed_only", [True, False])
def test_no_table_of_losses_follows_a_study_of_speed(speed_only: bool, tmp_path: Path) -> None:
    judgement = {"margin_pct": 0.25, "speed_only": speed_only}
    for seed in range(3):
        for precision in ("bf16", "fp8_rowwise"):
            data = {"num_train_tokens": 50 * 4096}  # so that 120 steps are passes
            record = make_record(
                seed=seed, precision=precision, judgement=judgement, data=data,
                results={"steps_completed": 120},
            )  # fmt: skip
            store(tmp_path, "local", record, loss_curve(120, 5.0 + seed))
    runs, metrics = frame(tmp_path), metrics_frame(load_runs(tmp_path))
    tables = [table(metrics, runs) for table in (gap_curves, seed_spread, pass_table)]
    assert [table.empty for table in (*tables, loss_gap_table(runs))] == [speed_only] * 4


def test_a_bf16_run_with_untrained_weights_is_nobodys_partner(tmp_path: Path) -> None:
    for precision in ("bf16", "fp8_tensorwise"):
        record = make_record(78.4, precision=precision, untrained=["model.layers.*"])
        store(tmp_path, "local", record)
    assert pairs_of(frame(tmp_path), "loss_last20_mean").empty


def store_formats(folder: Path, gaps: dict[tuple[str, str | None], float | None]) -> None:
    """Store three seeds of each precision and optimizer state; None: the last seed diverges."""
    for (precision, state), gap in gaps.items():
        for seed in range(3):
            is_lost = gap is None and seed == 2
            loss = (5 + seed) * (1 + (gap or 0) / 100)
            record = make_record(
                precision=precision, seed=seed, study="optimizer-states",
                run_id=f"{precision}-{state}-{seed}", status="diverged" if is_lost else "completed",
                results={"loss_last20_mean": None if is_lost else loss,
                         "memory_peak_gib": 20.0 if state is None else 15.0},
            )  # fmt: skip
            record.config.update({"optimizer_state": state} if state else {})
            store(folder, "local", record)


def test_formats_are_held_against_bf16_with_the_usual_states(tmp_path: Path) -> None:
    gaps = {("bf16", None): 0.0, ("bf16", "bf16"): 0.1, ("bf16", "fp8"): 2.0, ("fp16", None): 0.05,
            ("fp8_tensorwise", None): 0.2, ("fp8_tensorwise", "fp8"): None}  # fmt: skip
    store_formats(tmp_path, gaps)
    store_losses(tmp_path, {"bf16": [5.0] * 3, "fp8_rowwise": [5.0] * 3}, study="usual")
    table = formats_table(frame(tmp_path)).set_index(["precision", "optimizer_state"])
    assert set(table["study"]) == {"optimizer-states"}
    assert len(table) == 5
    assert table.loc[("bf16", "fp8"), "gap_pct"] == pytest.approx(2)
    assert table.loc[("bf16", "fp8"), "verdict"] == "different"
    assert table.loc[("fp16", "fp32"), "verdict"] == "equivalent"
    assert table.loc[("fp8_tensorwise", "fp32"), "gap_pct"] == pytest.approx(0.2)
    assert table.loc[("bf16", "bf16"), "memory_change_pct"] == pytest.approx(-25)
    lost = table.loc[("fp8_tensorwise", "fp8")]
    assert (lost["verdict"], lost["num_diverged"], lost["num_pairs"]) == ("diverged", 1, 2)
    assert len(table.loc[("bf16", "bf16"), "run_ids"].split()) == 6


def test_usual_formats_alone_make_no_table(tmp_path: Path) -> None:
    store_losses(tmp_path, {"bf16": [5.0] * 3, "fp8_rowwise": [5.0] * 3})
    assert formats_table(frame(tmp_path)).empty
