"""FP8 against BF16 at something else than the same step: at the same loss, in time and by batch.

At a step FP8 has done less work by the clock, and a small batch has seen less text. What a user
saves is time to a loss; and whether the gap depends on the batch can only be told at one loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fp8study.analysis import stats
from fp8study.analysis.floors import scored_points
from fp8study.analysis.losses import COUNTS, asked_on_gpus, gap_curves
from fp8study.analysis.runs.frames import PLACE
from fp8study.analysis.runs.pairing import healthy, paired_losses, together
from fp8study.core.records import StoredRun

#: A curve of fewer points on held-out text says too little of when a loss was reached.
LEAST_POINTS = 8
#: Studies whose names begin so change the batch, and keep the learning rate.
BATCH_GROWTH = "batch-growth"

_PLACE = ["machine", "study", "model", "num_gpus"]
_INTERVAL = ["low_95", "high_95"]
EQUAL_TIME_COLUMNS = [
    *_PLACE, "setting", "arm", "precision", "num_pairs", "loss", "seconds_bf16", "seconds",
    "saved_pct", *_INTERVAL, "run_ids", "arm_key",
]  # fmt: skip
MATCHED_COLUMNS = [
    *_PLACE, "arm", "precision", "effective_batch", "loss", "step", "num_pairs", "gap_pct",
    *_INTERVAL, "slope_points", "slope_low_95", "slope_high_95", "run_ids",
]  # fmt: skip


def equal_time_table(
    stored_runs: Iterable[StoredRun], runs: pd.DataFrame, metrics: pd.DataFrame
) -> pd.DataFrame:
    """Return what share of BF16's time to a loss on held-out text each FP8 arm saves.

    The columns of `EQUAL_TIME_COLUMNS`, of pairs on GPUs of their own that scored held-out text at
    `LEAST_POINTS` points or more. The loss of a pair, nats per token, is the higher of its
    runs' last ones, which both reach; between scored points losses are taken to fall straight.
    ``seconds`` is the median step times the steps until then: neither start-up, nor compilation,
    nor the scoring. ``saved_pct`` is the mean over seeds of 100 × (1 − FP8's / BF16's), with
    Student's interval; below zero FP8 takes longer.
    """
    stored = list(stored_runs)
    asked = asked_on_gpus(runs)
    asked = asked[~asked["timing_void"] & (asked["runs_per_gpu"].fillna(1) == 1)]
    seconds = metrics.groupby(PLACE)["step_time_ms"].median() / 1000
    points = scored_points(stored).sort_values("step")
    curves = {place: curve for place, curve in points.groupby(PLACE) if len(curve) >= LEAST_POINTS}
    found = []
    for _, pair in paired_losses(healthy(asked)).iterrows():
        ids = (pair["run_id"], pair["run_id_bf16"])
        places = [(pair["machine"], pair["study"], run_id) for run_id in ids]
        if not all(place in curves and place in seconds.index for place in places):
            continue
        ours, theirs = (curves[place] for place in places)
        loss = max(float(curve["scored"].iloc[-1]) for curve in (ours, theirs))
        took, usual = (
            steps_to(curve["step"].tolist(), curve["scored"].tolist(), loss) * seconds[place]
            for place, curve in zip(places, (ours, theirs), strict=True)
        )
        if not math.isfinite(took / usual):
            continue
        times = {"loss": loss, "seconds": took, "seconds_bf16": usual}
        found.append(pair.to_dict() | times | {"saved_pct": 100 * (1 - took / usual)})
    rows = []
    for _, group in pd.DataFrame(found).groupby("arm_key", sort=False) if found else ():
        row: dict[str, Any] = {name: group[name].iloc[0] for name in EQUAL_TIME_COLUMNS[:7]}
        row |= {name: group[name].mean() for name in ("loss", "seconds", "seconds_bf16")}
        row |= stats.judged(group["saved_pct"].tolist(), math.nan, "saved_pct")
        row |= {"run_ids": together(group["run_ids"]), "arm_key": group["arm_key"].iloc[0]}
        rows.append(row)
    return pd.DataFrame(rows, columns=EQUAL_TIME_COLUMNS)


def steps_to(steps: Sequence[float], losses: Sequence[float], loss: float) -> float:
    """Return after how many steps a curve first came down to a loss; NaN if it never did."""
    place = next((n for n, value in enumerate(losses) if value <= loss), None)
    if place is None:
        return math.nan
    if place == 0:
        return float(steps[0])
    fallen = (losses[place - 1] - loss) / (losses[place - 1] - losses[place])
    return steps[place - 1] + fallen * (steps[place] - steps[place - 1])


def matched_loss_table(metrics: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return FP8's gap by effective batch where BF16 has come down to one and the same loss.

    The columns of `MATCHED_COLUMNS`, one row per arm and batch: the gap of the smoothed training
    losses, % of BF16's, at the first step at which BF16's is as low as the highest of all batches'
    and seeds' last ones (``loss``, nats per token); ``step`` is the median. ``slope_points`` is by
    how much the gap grows with each doubling of the batch: a line through each seed's batches, and
    the mean of the lines, with Student's interval over seeds.
    """
    asked = runs[runs["study"].str.startswith(BATCH_GROWTH)]
    curves = gap_curves(metrics, asked)
    curves = curves.assign(effective_batch=curves[COUNTS].astype(float).prod(axis=1))
    rows = []
    for key, arm in curves.groupby([*_PLACE, "arm", "precision"], sort=False):
        last = arm.sort_values("step").groupby("run_id")["smooth_bf16"].last()
        loss = float(last.max())
        there = arm[arm["smooth_bf16"] <= loss].sort_values("step").groupby("run_id").first()
        slopes = [
            float(np.polyfit(np.log2(seed["effective_batch"]), seed["gap_pct"], 1)[0])
            for _, seed in there.groupby("seed")
            if seed["effective_batch"].nunique() > 1
        ]
        slope = stats.judged(slopes, math.nan, "slope_points")
        grows = {f"slope_{name}": slope[name] for name in _INTERVAL}
        grows["slope_points"] = slope["slope_points"]
        for batch, group in there.groupby("effective_batch"):
            row: dict[str, Any] = dict(zip(MATCHED_COLUMNS, key, strict=False))
            row |= {"effective_batch": batch, "loss": loss, "step": group["step"].median()}
            row |= stats.judged(group["gap_pct"].tolist(), math.nan, "gap_pct") | grows
            rows.append(row | {"run_ids": together(group["run_ids"])})
    return pd.DataFrame(rows, columns=MATCHED_COLUMNS)
