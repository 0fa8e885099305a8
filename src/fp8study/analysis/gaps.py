"""Two questions about the healthy loss gap: how it moves with the step, and with the batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import pandas as pd

from fp8study.analysis import stats
from fp8study.analysis.losses import loss_gap_table
from fp8study.analysis.pairing import newest_per_seed, paired_losses
from fp8study.core.studies import LOSS_MARGIN_PCT

#: Logged steps in the running mean of a loss.
SMOOTHING_STEPS = 20

_PLACE = ["machine", "study", "model", "num_gpus", "setting"]
GAP_STEP_COLUMNS = [*_PLACE, "arm", "precision", "seed", "step", "gap_pct"]
#: Their product is the effective batch.
_COUNTS = ("num_gpus", "micro_batch_size", "gradient_accumulation_steps")
WAYS_COLUMNS = [
    "machine", "study", "model", "precision", "effective_batch", "way", "other_way", "num_pairs",
    "difference_pct", "low_95", "high_95", "margin_pct", "verdict",
]  # fmt: skip
SPREAD_COLUMNS = [*_PLACE, "step", "num_seeds", "spread_pct"]


def gap_by_step(metrics: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Follow the loss gap of every healthy pair on a GPU through training.

    Args:
        metrics: From `fp8study.analysis.tables.metrics_frame`.
        runs: From `fp8study.analysis.tables.runs_frame`.

    Returns:
        The columns of `GAP_STEP_COLUMNS`: FP8 less BF16 in % of the BF16 loss, means of the last
        `SMOOTHING_STEPS` logged steps, one row per pair and step that both runs logged.
    """
    frames = [
        pd.DataFrame(
            {"step": gap.index, "gap_pct": gap.to_numpy()}
            | {name: pair[name] for name in GAP_STEP_COLUMNS[:-2]}
        )
        for pair, gap in gap_curves(metrics, runs)
    ]
    if not frames:
        return pd.DataFrame(columns=GAP_STEP_COLUMNS)
    return pd.concat(frames, ignore_index=True)[GAP_STEP_COLUMNS]


def gap_curves(metrics: pd.DataFrame, runs: pd.DataFrame) -> Iterator[tuple[pd.Series, pd.Series]]:
    """Yield every healthy pair on a GPU with its loss gap by step, see `gap_by_step`.

    The pair is a row of `fp8study.analysis.tables.paired_losses`.
    """
    losses = _smoothed(metrics)
    pairs = paired_losses(runs)
    pairs = pairs[(pairs["device"] == "cuda") & ~pairs["stale"].fillna(False).astype(bool)]
    for _, pair in pairs.iterrows():
        ours = losses.get((pair["machine"], pair["study"], pair["run_id"]))
        theirs = losses.get((pair["machine"], pair["study"], pair["run_id_bf16"]))
        if ours is None or theirs is None:
            continue
        gap = (100 * (ours - theirs) / theirs).dropna()
        if len(gap):
            yield pair, gap


def seed_spread(metrics: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return how far BF16 runs with different seeds are apart, step by step.

    Args:
        metrics: From `fp8study.analysis.tables.metrics_frame`.
        runs: From `fp8study.analysis.tables.runs_frame`.

    Returns:
        The columns of `SPREAD_COLUMNS`: ``spread_pct`` is the standard deviation over seeds of the
        smoothed BF16 loss, in % of its mean. Arms of one seed have no row.
    """
    losses = _smoothed(metrics)
    newest = newest_per_seed(runs)
    bf16 = newest[(newest["precision"] == "bf16") & (newest["status"] == "completed")]
    bf16 = bf16[(bf16["device"] == "cuda") & ~bf16["stale"].fillna(False).astype(bool)]
    frames = []
    for _, group in bf16.groupby("arm_key", sort=False):
        keys = zip(group["machine"], group["study"], group["run_id"], strict=True)
        curves = [losses[key] for key in keys if key in losses]
        if len(curves) < 2:
            continue
        table = pd.concat(curves, axis=1).dropna()
        spread = 100 * table.std(axis=1, ddof=1) / table.mean(axis=1)
        place = {name: group[name].iloc[0] for name in _PLACE} | {"num_seeds": len(curves)}
        frames.append(pd.DataFrame({"step": spread.index, "spread_pct": spread.to_numpy()} | place))
    if not frames:
        return pd.DataFrame(columns=SPREAD_COLUMNS)
    return pd.concat(frames, ignore_index=True)[SPREAD_COLUMNS]


def _smoothed(metrics: pd.DataFrame) -> dict[tuple[str, str, str], pd.Series]:
    """Return the running mean of each run's loss by step."""
    return {
        (str(machine), str(study), str(run_id)): rows.set_index("step")["loss"]
        .rolling(SMOOTHING_STEPS)
        .mean()
        .dropna()
        for (machine, study, run_id), rows in metrics.groupby(
            ["machine", "study", "run_id"], sort=False
        )
    }


def effective_batch_table(
    runs: pd.DataFrame, margins: Mapping[str, float] | None = None
) -> pd.DataFrame:
    """Return the healthy loss gap by effective batch and by the way that it was reached.

    Args:
        runs: From `fp8study.analysis.tables.runs_frame`.
        margins: As `fp8study.analysis.tables.loss_gap_table`.

    Returns:
        The columns of `tables.LOSS_GAP_COLUMNS`, and ``effective_batch`` (sequences per
        optimizer step) and ``way``, of the studies named ``effective-batch…``.
    """
    chosen = runs[runs["study"].fillna("").str.startswith("effective-batch")]
    gaps = loss_gap_table(chosen, margins)
    gaps = gaps[~gaps["stale"].fillna(False).astype(bool)]
    by_arm = chosen.drop_duplicates("arm_key").set_index("arm_key")[list(_COUNTS)].astype(float)
    sizes = by_arm.reindex(gaps["arm_key"]).reset_index(drop=True)
    gaps = gaps.reset_index(drop=True).assign(
        effective_batch=sizes.prod(axis=1), way=[_way(*row) for row in sizes.to_numpy()]
    )
    return gaps.sort_values(["machine", "model", "arm", "effective_batch", "way"], kind="stable")


def ways_table(runs: pd.DataFrame, margins: Mapping[str, float] | None = None) -> pd.DataFrame:
    """Compare the healthy gaps of every two ways to one effective batch, paired by seed.

    Args:
        runs: From `fp8study.analysis.tables.runs_frame`.
        margins: As `fp8study.analysis.tables.loss_gap_table`.

    Returns:
        The columns of `WAYS_COLUMNS`: ``difference_pct`` is the mean over seeds of the first way's
        gap less the second's, both in % of their BF16 loss. Only with three seeds or more in both.
    """
    chosen = runs[runs["study"].fillna("").str.startswith("effective-batch")]
    pairs = paired_losses(chosen)
    pairs = pairs[(pairs["device"] == "cuda") & ~pairs["stale"].fillna(False).astype(bool)]
    base = pairs["loss_last20_mean_bf16"]
    pairs = pairs.assign(
        gap_pct=100 * (pairs["loss_last20_mean"] - base) / base,
        effective_batch=pairs[list(_COUNTS)].astype(float).prod(axis=1),
        way=[_way(*row) for row in pairs[list(_COUNTS)].astype(float).to_numpy()],
    )
    rows = []
    place = ["machine", "study", "model", "precision", "effective_batch"]
    for key, group in pairs.groupby(place, sort=True):
        wide = group.pivot_table(index="seed", columns="way", values="gap_pct")
        margin = (margins or {}).get(str(key[1]), LOSS_MARGIN_PCT)
        for one, other in itertools.combinations(wide.columns, 2):
            apart = (wide[one] - wide[other]).dropna().tolist()
            if len(apart) < stats.MIN_PAIRS_FOR_INTERVAL:
                continue
            values = (one, other, len(apart), sum(apart) / len(apart))
            row = dict(zip(WAYS_COLUMNS, (*key, *values), strict=False))
            rows.append(row | {"margin_pct": margin} | stats.judged(apart, margin))
    return pd.DataFrame(rows, columns=WAYS_COLUMNS)


def _way(num_gpus: float, micro_batch: float, accumulation: float) -> str:
    ways = {"GPUs": num_gpus, "micro-batch": micro_batch, "accumulation": accumulation}
    used = [way for way, count in ways.items() if count > 1]
    return " and ".join(used) or "one sequence"
