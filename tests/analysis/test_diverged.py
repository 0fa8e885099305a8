"""A run that diverged, without a loss, takes no table down."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fp8study.analysis.attribution import factor_table
from fp8study.analysis.frames import runs_frame
from fp8study.core.records import load_runs
from fp8study.report.export import TABLES
from fp8study.report.page import report_of

RESULTS = Path(__file__).parents[2] / "results"


def test_one_more_diverged_run_leaves_every_table_of_the_committed_records() -> None:
    stored = load_runs(RESULTS)
    chosen = [run for run in stored if run.record.study == "attribution"]
    before = factor_table(runs_frame(chosen))
    lost = chosen[0]
    record = dataclasses.replace(
        lost.record,
        run_id="diverged",
        status="diverged",
        config=lost.record.config | {"seed": 99},
        results={"steps_completed": 3, "loss_last20_mean": None},
    )
    report = report_of([*stored, dataclasses.replace(lost, record=record)])
    assert all(len(make(report).columns) for make in TABLES.values())
    after = factor_table(report.runs)
    assert len(before) and set(before["effect_key"]) <= set(after["effect_key"])
    kept = after[after["effect_key"].isin(set(before["effect_key"]))].reset_index(drop=True)
    assert kept.equals(before)  # what has no loss explains no spread
