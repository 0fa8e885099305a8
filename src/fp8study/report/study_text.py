"""What the runs of a study say on a terminal when they have ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import pandas as pd

from fp8study.analysis.losses import loss_gap_table, says_nothing
from fp8study.analysis.matched import LEAST_POINTS, equal_time_table
from fp8study.analysis.runs.frames import metrics_frame, runs_frame
from fp8study.analysis.runs.pairing import DIVERGED, in_fp8, shorten_arms
from fp8study.core.errors import UserError
from fp8study.core.record_shape import as_columns
from fp8study.core.records import RunRecord, StoredRun, read_metrics
from fp8study.core.studies import PlannedRun
from fp8study.report.rows import losses_of
from fp8study.report.words import count, interval, number


def losses_text(done: Iterable[tuple[PlannedRun, RunRecord | None]]) -> str:
    """Say what came of a study's losses, an arm in each line; empty where it compares none.

    The same verdicts as the report's, on the page Quality.
    """
    stored = [StoredRun(record, run.run_dir, "local") for run, record in done if record]
    runs = shorten_arms(runs_frame(stored))
    if runs["speed_only"].all() or not runs["status"].isin(["completed", "diverged"]).any():
        return ""
    gaps = loss_gap_table(runs)
    judged = losses_of(gaps, loss_gap_table(runs, "validation_loss"))
    if judged.empty:
        return f"Losses: no verdict, as {_why_none(gaps, runs)}."
    title = judged["title"].iloc[0].partition(": ")[2]
    races = _races(stored, runs)
    rows = [_verdict(row, races.get(row["arm_key"], "")) for row in judged.to_dict("records")]
    silent = gaps[says_nothing(gaps)]
    left_out = [f"  no verdict on {count(len(silent), 'arm')}, as {_why_none(silent, runs)}"]
    return "\n".join([f"Losses, FP8 against BF16: {title}", *rows, *left_out * bool(len(silent))])


def _races(stored: Iterable[StoredRun], runs: pd.DataFrame) -> dict[str, str]:
    """Say by arm how much longer FP8 took to one loss on unseen text, where curves can tell."""
    scored = []
    for run in stored:
        if len(run.record.results.get("validation_losses") or ()) >= LEAST_POINTS:
            with suppress(UserError):  # what cannot be read is no reason to end here
                columns = as_columns(read_metrics(run.run_dir))
                scored.append(dataclasses.replace(run, metrics=columns))
    table = equal_time_table(scored, runs, metrics_frame(scored))
    return {row["arm_key"]: _race(row) for row in table.to_dict("records")}


def _race(row: Mapping[Hashable, Any]) -> str:
    ends = interval(-row["high_95"], -row["low_95"], "+.1f")
    facts = f"95 % CI {ends}" if ends else count(row["num_pairs"], "seed")
    return f"; time to one loss there {number(-row['saved_pct'], '+.1f')} % ({facts})"


#: What a configuration only names, by the column that tells whether it is the same.
_MAY_CHANGE = {
    "corpus_sha256": "on different texts, as the corpus",
    "num_parameters": "models of different sizes, as the model's file",
    "config_sha256": "models of different shapes, as the model's file",
}


def _why_none(gaps: pd.DataFrame, runs: pd.DataFrame) -> str:
    if gaps.empty:
        ended = runs[runs["status"].isin(["completed", "diverged"])]
        fp8 = in_fp8(ended)
        if fp8.any() and not fp8.all():
            if ended.loc[~fp8, "status"].eq("diverged").all():
                return "BF16 diverged; lower learning_rate"
            for column, what in _MAY_CHANGE.items():
                known = ended[column].fillna("")
                if not {*known[fp8]} & {*known[~fp8]}:
                    return (
                        f"FP8 and BF16 trained {what} has changed between them; move the runs of "
                        "one of them away, and do them again"
                    )
        return "no FP8 run has a BF16 one beside it"
    if says_nothing(gaps).any():
        return (
            "BF16 itself learnt little more than how often each token comes; raise learning_rate "
            "or num_steps"
        )
    return "three seeds are the least"


def _verdict(row: Mapping[Hashable, Any], race: str) -> str:
    if row["verdict"] == DIVERGED:
        return f"  {row['label']}: {row['judged']}"
    ends, seeds = f"90 % CI {row['interval']}", count(row["num_pairs"], "seed")
    gap, unseen = number(row["gap_pct"], "+.2f"), number(row["unseen_gap_pct"], "+.2f")
    said = (
        f"  {row['label']}: {row['judged']} at ±{row['margin_pct']:g} %, {gap} % ({ends}, {seeds})"
    )
    kept_out = f"; on unseen text {row['unseen_judged']}, {unseen} %"
    learnt = (
        f"; BF16 {number(row['learnt_pct'], '.1f')} % below the loss of token frequencies alone"
    )
    kept_out = (kept_out + race) * pd.notna(row["unseen_gap_pct"])
    return said + kept_out + learnt * pd.notna(row["learnt_pct"])
