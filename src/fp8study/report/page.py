"""What every page starts with: the records, found and read once, and what several pages use."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from fp8study.analysis.decision import decision_table, judged_losses, opened
from fp8study.analysis.floors import pooled_table
from fp8study.analysis.instruments import instruments_frame
from fp8study.analysis.leads import leads_table
from fp8study.analysis.losses import loss_gap_table
from fp8study.analysis.runs.frames import metrics_frame, runs_frame
from fp8study.analysis.runs.pairing import shorten_arms
from fp8study.analysis.speed import throughput_table
from fp8study.core.errors import UserError
from fp8study.core.files import kept, results_dir
from fp8study.core.records import StoredRun, load_runs
from fp8study.core.words import listed
from fp8study.report.words import check_names, own_first

#: Names the results folder, if it is not the one beside the report.
RESULTS_VARIABLE = "FP8STUDY_RESULTS"


@dataclass(frozen=True)
class Report:
    """Everything that a page shows is taken from here; `report_of` says how it is made."""

    runs: pd.DataFrame
    """With short names of arms."""
    metrics: pd.DataFrame
    throughput: pd.DataFrame
    loss_gaps: pd.DataFrame
    validation_gaps: pd.DataFrame
    """As ``loss_gaps``, of the validation loss."""
    pooled_gaps: pd.DataFrame
    """Of the losses on text kept out, several machines together."""
    leads: pd.DataFrame
    """FP8's lead in every setting of today."""
    decisions: pd.DataFrame
    """What to train in, by model, GPUs and batch; the reader's own machine first."""
    instruments: pd.DataFrame
    stored: Sequence[StoredRun]
    """The records themselves, for what no frame holds."""
    unreadable: tuple[str, ...]
    """One line for each record that could not be read or judged, set aside ones included, and for
    each folder whose name they contradict."""

    @property
    def document_a(self) -> pd.DataFrame:
        """Document A's arms on the one machine that holds the most of them, GPUs first."""
        runs = self.runs[self.runs["study"].fillna("").str.startswith("document-a")]
        runs = runs[~runs["speed_only"]]  # its grid of speeds is another question
        if runs.empty:
            return runs
        places = runs.groupby(["machine", "study", "model"]).agg(
            gpu=("device", lambda devices: (devices == "cuda").any()), arms=("arm_key", "nunique")
        )
        best = places.sort_values(["gpu", "arms"], ascending=False, kind="stable").index[0]
        chosen = (runs[["machine", "study", "model"]] == list(best)).all(axis=1)
        return runs[chosen]

    def with_warnings(self, table: pd.DataFrame) -> pd.DataFrame:
        """Add ``num_warned`` to a table of arms: how many of an arm's runs carry a warning."""
        warned = self.runs[self.runs["num_warnings"] > 0]
        return table.assign(
            num_warned=table["arm_key"].map(warned["arm_key"].value_counts()).fillna(0)
        )


def find_results() -> Path:
    """Return the results folder: `RESULTS_VARIABLE`, or the checkout's.

    Raises:
        UserError: There is none.
    """
    folder = Path(os.environ.get(RESULTS_VARIABLE) or results_dir())
    if not folder.is_dir():
        raise UserError(
            f"results: '{folder}' is not a folder; render from the checkout, or correct "
            f"{RESULTS_VARIABLE}"
        )
    return folder


def load_report(results: Path | None = None) -> Report:
    """Read all records and compute the tables that several pages use; once, while no file changes.

    Without a folder that holds ``local/`` and ``reference/`` it is that of `find_results`.
    """
    folder = (results or find_results()).resolve()
    files = [*folder.rglob("run*.json"), *folder.rglob("metrics.jsonl*")]
    stats = ((path, path.stat()) for path in files)
    return _load(folder, frozenset((path, stat.st_mtime_ns, stat.st_size) for path, stat in stats))


@functools.lru_cache(maxsize=1)
def _load(folder: Path, state: frozenset[tuple[Path, int, int]]) -> Report:
    """Load the report of a folder whose files are in this `state`; other processes keep theirs."""
    name = f"report-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    return kept(name, (path for path, *_ in state), lambda: _read_report(folder))


def _read_report(folder: Path) -> Report:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        report = report_of(load_runs(folder))
    told = [str(item.message) for item in caught if item.category is UserWarning]
    aside = [
        f"set aside: {path}"
        for path in sorted(folder.glob("local/*/*/run.corrupt*.json"))
        if not path.with_name("run.json").exists()  # else it was done again
    ]
    return dataclasses.replace(report, unreadable=(*told, *aside, *_apart(report.stored)))


def _apart(stored: Sequence[StoredRun]) -> list[str]:
    """Name the studies whose runs were to be judged by several margins."""
    stated: dict[str, set[float]] = defaultdict(set)
    for run in stored:
        if (margin := run.record.judgement.get("margin_pct")) is not None:
            stated[f"{run.machine_label}/{run.record.study}"].add(margin)
    return [
        f"{place}: its runs state margins of {listed(f'{m:g}' for m in sorted(margins))} %; their "
        "losses get no verdict until they agree: move those of one margin away"
        for place, margins in stated.items()
        if len(margins) > 1
    ]


def report_of(stored: Sequence[StoredRun]) -> Report:
    """Compute what several pages use from records that are read already."""
    runs = shorten_arms(runs_frame(stored))
    check_names(runs)
    leads, gaps = leads_table(runs), loss_gap_table(runs)
    return Report(
        runs=runs,
        metrics=metrics_frame(stored),
        throughput=throughput_table(runs),
        loss_gaps=gaps,
        leads=leads,
        decisions=own_first(opened(decision_table(leads, judged_losses(gaps, runs)))),
        validation_gaps=loss_gap_table(runs, "validation_loss"),
        pooled_gaps=pooled_table(stored, runs),
        instruments=instruments_frame(stored, runs),
        stored=stored,
        unreadable=(),
    )
