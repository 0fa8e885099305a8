"""How much of a study's time its GPUs spent training, and how much around it."""

from __future__ import annotations

import pandas as pd

OCCUPANCY_COLUMNS = [
    "machine", "study", "num_runs", "num_gpus", "wall_minutes", "in_steps_pct", "of_held_pct",
]  # fmt: skip
#: What a run does before it takes its GPUs.
_BEFORE = [f"startup_{part}_seconds" for part in ("launch", "imports", "gpu_wait")]


def occupancy_table(runs: pd.DataFrame, metrics: pd.DataFrame) -> pd.DataFrame:
    """Return the share of each study's GPU time that went into training steps.

    Args:
        runs: From `tables.runs_frame`. Runs on a CPU are left out, and studies with runs
            that shared a GPU, whose steps overlap.
        metrics: From `fp8study.analysis.tables.metrics_frame`.

    Returns:
        The columns of `OCCUPANCY_COLUMNS`, one row per machine and study. The wall time is that
        during which at least one run was going on, so that the time between two calls does not
        count. GPU time is the wall time times the GPUs of the machine; ``of_held_pct`` is over the
        time that the runs held their GPUs, from the claim to the end, and missing where a record
        does not know when that was. Steps count with their logged times, less the compilation in
        the first.
    """
    gpu = runs[(runs["device"] == "cuda") & runs["num_gpus_on_machine"].notna()]
    logged = metrics.groupby(["machine", "study", "run_id"])["step_time_ms"].sum() / 1000
    rows = []
    for (machine, study), group in gpu.groupby(["machine", "study"], sort=False):
        if (group["runs_per_gpu"].fillna(1) > 1).any():
            continue
        keys = pd.MultiIndex.from_frame(group[["machine", "study", "run_id"]])
        seconds = logged.reindex(keys).fillna(0).to_numpy() - group["compile_seconds"].fillna(0)
        num_gpus = int(group["num_gpus_on_machine"].max())
        wall = _covered_seconds(group["started_at"], group["ended_at"])
        if not wall:
            continue
        counts = group["num_gpus"].astype(float)
        used = float((seconds * counts).sum())
        held = float((_held_seconds(group) * counts).sum(skipna=False))
        shares = (100 * used / (wall * num_gpus), 100 * used / held)
        row = (machine, study, len(group), num_gpus, wall / 60, *shares)
        rows.append(dict(zip(OCCUPANCY_COLUMNS, row, strict=True)))
    return pd.DataFrame(rows, columns=OCCUPANCY_COLUMNS)


def _held_seconds(runs: pd.DataFrame) -> pd.Series:
    lasted = pd.to_datetime(runs["ended_at"]) - pd.to_datetime(runs["started_at"])
    return lasted.dt.total_seconds() - runs[_BEFORE].sum(axis=1, skipna=False)


def _covered_seconds(starts: pd.Series, ends: pd.Series) -> float:
    """Return how long at least one of the intervals was going on."""
    spans = sorted(zip(pd.to_datetime(starts), pd.to_datetime(ends), strict=True))
    covered, until = 0.0, spans[0][0]
    for start, end in spans:
        covered += max(0.0, (end - max(start, until)).total_seconds())
        until = max(until, end)
    return covered
