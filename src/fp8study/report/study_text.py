"""What the runs of a study say on a terminal when they have ended."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import pandas as pd

from fp8study.analysis.losses import loss_gap_table, says_nothing
from fp8study.analysis.runs.frames import runs_frame
from fp8study.analysis.runs.pairing import DIVERGED, shorten_arms
from fp8study.core.records import RunRecord, StoredRun
from fp8study.core.studies import PlannedRun
from fp8study.report.rows import losses_of
from fp8study.report.words import count, number


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
        return f"Losses: no verdict, as {_why_none(gaps)}."
    title = judged["title"].iloc[0].partition(": ")[2]
    rows = map(_verdict, judged.to_dict("records"))
    silent = gaps[says_nothing(gaps)]
    left_out = [f"  no verdict on {count(len(silent), 'arm')}, as {_why_none(silent)}"]
    return "\n".join([f"Losses, FP8 against BF16: {title}", *rows, *left_out * bool(len(silent))])


def _why_none(gaps: pd.DataFrame) -> str:
    if gaps.empty:
        return "no FP8 run has a BF16 one beside it"
    if says_nothing(gaps).any():
        return (
            "BF16 itself learnt little more than how often each token comes; raise learning_rate "
            "or num_steps"
        )
    return "three seeds are the least"


def _verdict(row: Mapping[Hashable, Any]) -> str:
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
    return said + kept_out * pd.notna(row["unseen_gap_pct"]) + learnt * pd.notna(row["learnt_pct"])
