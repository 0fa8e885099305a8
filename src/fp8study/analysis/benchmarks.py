"""Every committed measurement of speed, memory, start-up and energy, as tables.

Each row is an arm on a machine, with the median and the range over its seeds and repeats. CPU
runs are left out: their timings say nothing. So are arms that train part of their model.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from fp8study.analysis.frames import runs_frame
from fp8study.analysis.pairing import ordered, shorten_arms, timing_is_void
from fp8study.core.records import StoredRun


@dataclass(frozen=True)
class Theme:
    """Some measures that answer one question."""

    title: str
    measures: dict[str, tuple[str, str]]
    """Column of `runs_frame` → its heading, with the unit, and how a value is written."""
    is_timing: bool
    """Whether the allocator can void it."""


THEMES = (
    Theme(
        "Throughput",
        {"tokens_per_second_per_gpu": ("tokens/s per GPU", "{:,.0f}"),
         "tflops_per_gpu": ("TFLOP/s per GPU", "{:.0f}")},
        is_timing=True,
    ),
    Theme("Peak memory", {"memory_peak_gib": ("GiB per GPU", "{:.1f}")}, is_timing=False),
    Theme(
        "Start-up",
        {"startup_seconds": ("s before the first step", "{:.1f}"),
         "first_step_seconds": ("s first step", "{:.1f}"),
         "warm_up_seconds": ("s until the steps are steady", "{:.1f}")},
        is_timing=False,
    ),
    Theme("Energy", {"energy_joule_per_token": ("J per token", "{:.4f}")}, is_timing=True),
)  # fmt: skip

VOID = "void: memory nearly full"
_IDENTITY = ["machine", "study", "model", "num_gpus", "arm", "setting", "precision", "stale"]


def measured_runs(stored: list[StoredRun]) -> pd.DataFrame:
    """Return the rows of the runs that a benchmark may count.

    Args:
        stored: From `fp8study.core.records.load_runs`.

    Returns:
        Rows of `runs_frame` of completed runs that had their GPUs for themselves and trained all
        of their model, on GPUs, outside ``results/local``.
    """
    runs = shorten_arms(runs_frame(stored))
    mine = (runs["machine"] != "local") & (runs["status"] == "completed")
    whole = ~runs["stale"].fillna(False).astype(bool) & ~runs["planted"].fillna(False).astype(bool)
    alone = runs["runs_per_gpu"].fillna(1) == 1
    return runs[mine & whole & alone & (runs["device"] == "cuda")]


def theme_table(runs: pd.DataFrame, theme: Theme) -> pd.DataFrame:
    """Give one row to each arm that has a measure of a theme.

    Args:
        runs: From `measured_runs`, of one machine.
        theme: Of `THEMES`.

    Returns:
        study, model, GPUs, setting, precision, runs, and a text for each measure: the median,
        and behind it the range where there are several runs. Void timings are not in them.
    """
    names = list(theme.measures)
    there = runs[runs[names].notna().any(axis=1)]
    full = timing_is_void(there) if theme.is_timing else pd.Series(False, index=there.index)
    rows = []
    for key, group in there.groupby("arm_key", sort=False):
        kept = group[~full[group.index]]
        row = {name: group[name].iloc[0] for name in _IDENTITY} | {"arm_key": key}
        row["num_runs"] = len(kept) or len(group)
        for name, (heading, form) in theme.measures.items():
            row[heading] = _median_and_range(kept[name].dropna(), form) if len(kept) else VOID
        rows.append(row)
    headings = [heading for heading, _ in theme.measures.values()]
    columns = [*_IDENTITY, "arm_key", "num_runs", *headings]
    table = ordered(pd.DataFrame(rows, columns=columns))
    shown = {"study": "study", "model": "model", "num_gpus": "GPUs", "setting": "setting",
             "arm": "precision", "num_runs": "runs"}  # fmt: skip
    return table[[*shown, *headings]].rename(columns=shown)


def _median_and_range(values: pd.Series, form: str) -> str:
    if values.empty:
        return ""
    middle, low, high = (form.format(v) for v in (values.median(), values.min(), values.max()))
    return middle if len(values) == 1 else f"{middle} ({low} to {high})"
