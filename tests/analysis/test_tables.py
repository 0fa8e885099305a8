"""What all tables of the report have in common, and the smaller ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fp8study.analysis.losses import loss_gap_table
from fp8study.analysis.peers import published_table
from fp8study.analysis.runs.frames import (
    data_table,
    failures_table,
    metrics_frame,
    provenance_table,
    runs_frame,
)
from fp8study.analysis.speed import document_a_table, throughput_table
from fp8study.core.config import make_config
from fp8study.core.records import load_runs
from fp8study.measure.flops import count_flops
from fp8study.report import plots, speed_rows
from tests.checkout import committed_runs
from tests.factories import make_record, store
from tests.study_factories import make_broken, make_document_a, make_results
from tests.table_factories import frame, store_pair

STALE = "stale optimizer (78.4 % of parameters not trained)"
ARM_TABLES = [throughput_table, loss_gap_table, document_a_table]
ALL_TABLES = [*ARM_TABLES, provenance_table, failures_table, data_table]


@pytest.mark.parametrize("table", ALL_TABLES)
def test_no_runs_give_an_empty_table(table: Any) -> None:
    assert table(runs_frame([])).empty


@pytest.mark.parametrize("table", ALL_TABLES)
def test_failures_alone_do_not_break_a_table(table: Any, tmp_path: Path) -> None:
    make_broken(tmp_path)
    assert "speedup_pct" not in table(frame(tmp_path)).dropna(axis="columns", how="all")


@pytest.mark.parametrize("table", ARM_TABLES)
def test_every_table_names_the_stale_optimizer(table: Any, tmp_path: Path) -> None:
    make_document_a(tmp_path)
    rows = table(frame(tmp_path))
    assert rows["stale"].sum() == 1
    (arm,) = rows.loc[rows["stale"].astype(bool), "arm"]
    assert arm == f"FP8 tensorwise, {STALE}"
    assert not rows.loc[~rows["stale"].astype(bool), "arm"].str.contains("stale").any()


def test_every_figure_names_the_stale_optimizer(tmp_path: Path) -> None:
    make_document_a(tmp_path)
    runs, metrics = frame(tmp_path), metrics_frame(load_runs(tmp_path))
    document_a = plots.document_a_figure(metrics, runs, "")
    words = [text.get_text() for text in document_a.legends[0].get_texts()]
    assert sum(STALE in " ".join(word.split()) for word in words) == 1
    assert len(words) == 6  # five arms and the uniform guess


def test_document_a_arms(tmp_path: Path) -> None:
    make_document_a(tmp_path)
    grid = {"study": "document-a-grid", "judgement": {"question": "How fast?", "speed_only": True}}
    store_pair(tmp_path, grid, grid)
    table = document_a_table(frame(tmp_path))
    assert len(table) == 5
    outside = table["parameters_outside_optimizer_pct"]
    assert outside.tolist() == [0, 0, 78.4, 0, 0]
    assert table.loc[table["stale"].astype(bool), "loss_last20_mean"].item() > 9


@pytest.mark.parametrize("saw_its_data", [True, False])
def test_lost_runs_are_counted(saw_its_data: bool, tmp_path: Path) -> None:
    store_pair(tmp_path, {})
    lost = make_record(precision="fp8_tensorwise", seed=1, status="failed")
    if not saw_its_data:
        lost.data.clear()
        lost.model.clear()
    store(tmp_path, "local", lost)
    row = loss_gap_table(frame(tmp_path)).iloc[0]
    assert (row["num_pairs"], row["num_lost"]) == (1, 1)


def test_reference_records_pair() -> None:
    runs = runs_frame(run for run in committed_runs() if run.machine_label == "h200x4")
    gaps = loss_gap_table(runs)
    sizes = runs["study"].value_counts()
    assert (sizes["quick"], sizes["document-a"], sizes["attribution"]) == (12, 15, 50)
    assert (sizes["instruments"], sizes["corner-arms"], sizes["precision-noise"]) == (12, 16, 4)
    assert set(gaps.loc[gaps["study"] == "attribution", "num_pairs"]) == {5}
    assert gaps.loc[gaps["study"] == "quick", "num_pairs"].tolist() == [1] * 6
    assert gaps.loc[gaps["study"] == "document-a", "num_pairs"].tolist() == [3] * 3
    assert document_a_table(runs)["num_runs"].tolist() == [3] * 5


def test_document_a_figure_takes_the_final_loss_from_the_record(tmp_path: Path) -> None:
    """With log_every > 1 the last 20 logged rows reach further back than 20 steps."""
    for precision, loss in (("bf16", 5.25), ("fp8_tensorwise", None)):
        record = make_record(
            study="document-a", precision=precision, results={"loss_last20_mean": loss},
            status="completed" if loss else "diverged",
        )  # fmt: skip
        store(tmp_path, "local", record, [9.0, 8.0, 7.0])
    figure = plots.document_a_figure(metrics_frame(load_runs(tmp_path)), frame(tmp_path), "")
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "BF16, FP32 master weights: 5.25" in words
    assert "FP8 tensorwise, FP32 master weights: diverged" in words


def test_failures_and_provenance_account_for_every_run(tmp_path: Path) -> None:
    runs = frame(make_results(tmp_path))
    failures = failures_table(runs)
    ends = ["diverged", "failed", "failed", "interrupted", "out_of_memory"]
    assert sorted(failures["status"]) == ends
    assert provenance_table(runs)["num_runs"].sum() == len(runs)


def test_uncommitted_changes_are_named(tmp_path: Path) -> None:
    store(tmp_path, "local", make_record(git={"dirty": True}))
    (commit,) = provenance_table(frame(tmp_path))["commit"]
    assert commit == "0123456789 + uncommitted changes"


def test_the_documents_are_restated_with_our_count() -> None:
    table = pd.read_csv(Path(__file__).parents[2] / "report" / "documents.csv")
    of_a = table[table["document"].str.startswith("A")]
    for length in (2048, 4096, 8192):
        config = make_config({"model": "llama-3.1-8b", "sequence_length": length})
        counted = count_flops(config.resolved())
        row = of_a[of_a["setting"].str.contains(f" {length} tokens")].iloc[0]
        assert row["gflop"] == pytest.approx(counted.total / 1e9, abs=1e-3)
        assert row["gflop_stated"] == pytest.approx(counted.document_a / 1e9, abs=1e-3)
    restated = speed_rows.restated(table)
    compiled = restated[restated["setting"].str.contains("compiled")].set_index("precision")
    assert compiled.loc["BF16", "mfu_pct"] == pytest.approx(45.5, abs=0.1)
    assert compiled.loc["FP8 tensorwise", "lead_pct"] == pytest.approx(24.2, abs=0.1)


def test_published_leads_are_computed(tmp_path: Path) -> None:
    path = tmp_path / "published.csv"
    path.write_text("source,setting,gpus,bf16,fp8_tensorwise,fp8_rowwise\ns,x,1,100,125,\n")
    (row,) = published_table(path).to_dict("records")
    assert row["fp8_tensorwise_pct"] == pytest.approx(25)
    assert pd.isna(row["fp8_rowwise_pct"])
