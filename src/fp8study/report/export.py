"""The report's tables as CSV files, for those who would rather compute with them than read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from fp8study.analysis import instruments, scale
from fp8study.analysis.attribution import effect_table
from fp8study.analysis.claims.ledger import claims_table, judge
from fp8study.analysis.floors import ladder_table, scatter_table, validation_curve
from fp8study.analysis.losses import (
    effective_batch_table,
    formats_table,
    pass_table,
    ways_table,
)
from fp8study.analysis.matched import equal_time_table, matched_loss_table
from fp8study.analysis.noise import tables as noise
from fp8study.analysis.peers import peer_table
from fp8study.analysis.runs.frames import cost_table
from fp8study.analysis.speed import document_a_table, switch_table
from fp8study.core.errors import UserError
from fp8study.core.files import writing
from fp8study.core.records import StoredRun, load_runs
from fp8study.report.page import Report, report_of
from fp8study.report.predictions import cells
from fp8study.report.rows import rungs

#: Keys that tell rows apart inside the program and nothing to a reader.
_KEYS = ["arm_key", "effect_key", "pair_key", "partner_key", "fp8_part"]

TABLES: dict[str, Callable[[Report], pd.DataFrame]] = {
    "throughput": lambda report: report.throughput,
    "leads": lambda report: report.leads,
    "decisions": lambda report: report.decisions,
    "costs": lambda report: cost_table(report.runs),
    "loss-gaps": lambda report: report.loss_gaps,
    "validation-gaps": lambda report: report.validation_gaps,
    "passes": lambda report: pass_table(report.metrics, report.runs),
    "document-a": lambda report: document_a_table(report.document_a),
    "corner-arms": lambda report: document_a_table(report.runs, "corner-arms"),
    "effects": lambda report: effect_table(report.runs),
    "effective-batch": lambda report: effective_batch_table(report.runs),
    "effective-batch-ways": lambda report: ways_table(report.runs),
    "formats": lambda report: formats_table(report.runs),
    "equal-time": lambda report: equal_time_table(report.stored, report.runs, report.metrics),
    "matched-loss": lambda report: matched_loss_table(report.metrics, report.runs),
    "noise-ladder": lambda report: ladder_table(report.runs),
    "noise-rungs": lambda report: rungs(ladder_table(report.runs)),
    "pooled-gaps": lambda report: report.pooled_gaps,
    "scatter": lambda report: scatter_table(report.metrics, report.runs),
    "validation-curve": lambda report: validation_curve(report.stored, report.runs),
    "noise-scale": lambda report: noise.over_runs(noise.scale_table, report.stored),
    "noise-crossing": lambda report: noise.over_runs(noise.crossing_table, report.stored),
    "noise-budget": lambda report: noise.over_runs(noise.budget_table, report.stored),
    "utilisation": lambda report: instruments.utilisation_table(report.instruments),
    "kernels": lambda report: instruments.kernels_table(report.instruments),
    "memory": lambda report: instruments.memory_split_table(report.instruments),
    "energy": lambda report: instruments.energy_table(report.instruments),
    "communication": lambda report: instruments.communication_table(report.instruments),
    "break-even": lambda report: instruments.break_even_table(report.instruments),
    "switches": lambda report: switch_table(report.runs),
    "peers": lambda report: peer_table(report.stored),
    "claims": lambda report: claims_table(judge(report)).drop(columns="is_first"),
    "at-scale-check": lambda report: scale.check_table(cells(report.stored)),
    "slow-links": lambda report: scale.links_table(cells(report.stored)),
}


def tables_of(stored: list[StoredRun]) -> dict[str, pd.DataFrame]:
    """Compute every table of `TABLES` that has rows from these records alone."""
    report = report_of(stored)
    found = {name: make(report) for name, make in TABLES.items()}
    return {name: t.drop(columns=_KEYS, errors="ignore") for name, t in found.items() if len(t)}


def write_tables_of(results: Path, folder: Path, machine: str | None) -> list[Path]:
    """Write the tables of a folder of results, or of one of its machines; return the files.

    Raises:
        UserError: It has no such machine, or a file cannot be written.
    """
    stored = load_runs(results)
    names = sorted({run.machine_label for run in stored})
    if machine is not None and machine not in names:
        raise UserError(
            f"--machine: no record of '{machine}'; name one of {', '.join(names) or '(none yet)'}"
        )
    return write_tables([run for run in stored if machine in (None, run.machine_label)], folder)


def write_tables(stored: list[StoredRun], folder: Path) -> list[Path]:
    """Write the tables as CSV files, numbers to six significant digits; return their paths.

    The folder is made if missing; its tables of the same names are replaced, or go if they would
    have no rows.

    Raises:
        UserError: There is no record, or a file cannot be written.
    """
    if not stored:
        raise UserError("tables: there are no records to make them from; make reproduce first")
    tables = {folder / f"{name}.csv": table for name, table in tables_of(stored).items()}
    with writing("--tables", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path, table in tables.items():
            table.to_csv(path, index=False, float_format="%.6g")
        for stale in {folder / f"{name}.csv" for name in TABLES} - {*tables}:
            stale.unlink(missing_ok=True)
    return [*tables]
