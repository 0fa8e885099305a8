"""A run that diverged, without a loss, takes no table down."""

from __future__ import annotations

import dataclasses

from fp8study.analysis.attribution import effect_table
from fp8study.analysis.runs.frames import runs_frame
from fp8study.report.export import TABLES
from fp8study.report.page import report_of
from tests.checkout import committed_runs


def test_one_more_diverged_run_leaves_every_table_of_a_committed_study() -> None:
    chosen = [run for run in committed_runs() if run.record.study == "attribution"]
    before = effect_table(runs_frame(chosen))
    lost = chosen[0]
    record = dataclasses.replace(
        lost.record, run_id="diverged", status="diverged",
        config=lost.record.config | {"seed": 99},
        results={"steps_completed": 3, "loss_last20_mean": None},
    )  # fmt: skip
    report = report_of([*chosen, dataclasses.replace(lost, record=record)])
    for make in TABLES.values():
        make(report)  # nothing is raised
    after = effect_table(report.runs)
    assert len(before)
    # What has no loss is in no number.
    assert after.drop(columns="verdict").equals(before.drop(columns="verdict"))
