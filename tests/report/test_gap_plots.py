"""The figures of loss gaps: what they draw, what they leave out, and what they say of nothing."""

from pathlib import Path

import pandas as pd
import pytest

from fp8study.report import gap_plots, rows
from fp8study.report.page import load_report
from tests.factories import make_record, store
from tests.study_factories import make_attribution


def test_every_judged_arm_has_a_row_with_its_verdict_and_margin(tmp_path: Path) -> None:
    make_attribution(tmp_path)
    report = load_report(tmp_path)
    judged = rows.judged(report.loss_gaps)
    assert len(judged) and not judged["stale"].any()
    (axis,) = gap_plots.forest_figure(report.loss_gaps, report.validation_gaps, "").axes
    assert len(axis.get_yticks()) == len(judged)
    said = [text.get_text() for text in axis.texts]
    for verdict, number in judged["verdict"].value_counts().items():
        assert sum(str(verdict) in text and "nats" in text for text in said) == number
    assert any(text.startswith("attribution on ") for text in said)
    assert len(axis.collections) == len(judged)  # a band a row


def test_what_most_studies_share_is_said_once(tmp_path: Path) -> None:
    for study, length in (("a", 4096), ("b", 4096), ("c", 2048)):
        for seed in range(3):
            for precision in ("bf16", "fp8_rowwise"):
                loss = {"loss_last20_mean": 8 + seed / 9 + (precision != "bf16") / (900 + seed)}
                run = make_record(precision=precision, seed=seed, study=study, results=loss,
                                  sequence_length=length)  # fmt: skip
                store(tmp_path, "local", run)
    report = load_report(tmp_path)
    gaps = report.loss_gaps
    said = gap_plots.forest_settings(gaps)
    assert "llama-3.2-1b, 1 GPU, " in said and "4096 tokens" in said and "2048" not in said
    (axis,) = gap_plots.forest_figure(gaps, gaps, "").axes
    titles = [text.get_text() for text in axis.texts if " on " in text.get_text()]
    assert titles == ["a on your machine", "b on your machine", "c on your machine: 2048 tokens"]
    assert rows.losses(report)["title"].unique().tolist() == titles
    assert gap_plots.forest_settings(gaps[:0]) == ""


def test_what_has_no_interval_is_not_drawn(tmp_path: Path) -> None:
    for precision in ("bf16", "fp8_rowwise"):
        store(tmp_path, "local", make_record(precision=precision))
    report = load_report(tmp_path)
    assert rows.judged(report.loss_gaps).empty
    figure = gap_plots.forest_figure(report.loss_gaps, report.validation_gaps, "nothing yet")
    assert figure.texts[0].get_text() == "nothing yet"
    assert not list(gap_plots.study_curves(report))


def test_only_studies_whose_losses_are_judged_have_curves(tmp_path: Path) -> None:
    make_attribution(tmp_path / "failure")
    assert not list(gap_plots.study_curves(load_report(tmp_path / "failure")))
    steps = [9.0 - step / 50 for step in range(40)]
    for seed in range(3):
        for precision in ("bf16", "fp8_rowwise"):
            end = {"loss_last20_mean": 8.41 + seed / 100 + (precision != "bf16") / 1000}
            run = make_record(precision=precision, seed=seed, study="parity", results=end)
            store(tmp_path / "own", "local", run, steps)
    ((rows, figure, losses),) = gap_plots.study_curves(load_report(tmp_path / "own"))
    assert rows["study"].tolist() == ["parity"]
    assert [axis.get_ylabel() for axis in figure.axes] == [
        "training loss, nats", "gap to BF16, %",
    ]  # fmt: skip
    assert pd.Series([len(axis.lines) for axis in figure.axes]).ge(2).all()
    assert losses["arm"].tolist() == ["BF16", "FP8 rowwise"]
    assert losses["run_ids"].str.split().map(len).tolist() == [3, 3]
    assert losses["step_1"].tolist() == pytest.approx([9.01, 9.011])
    assert losses["step_40"].lt(losses["step_1"]).all()


def test_curves_of_fp8_are_beside_bf16_where_fp8_alone_has_a_switch(tmp_path: Path) -> None:
    for seed in range(3):
        for precision in ("bf16", "fp8_tensorwise"):
            end = {"loss_last20_mean": 8.3 + seed / 100 + (precision != "bf16") / 1000}
            own = {"weight_cast": "each_update"} if precision != "bf16" else {}
            run = make_record(
                precision=precision, seed=seed, study="own", results=end, strategy="none",
                config=own,
            )  # fmt: skip
            store(tmp_path, "local", run, [9.0 - step / 50 + seed / 100 for step in range(40)])
    ((_, figure, losses),) = gap_plots.study_curves(load_report(tmp_path))
    assert [axis.get_ylabel() for axis in figure.axes] == [
        "training loss, nats", "gap to BF16, %",
    ]  # fmt: skip
    assert losses["arm"].tolist() == ["BF16", "FP8 tensorwise, weights cast each update"]
