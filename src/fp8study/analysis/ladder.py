"""The noise ladder: how far apart two runs end, by what tells them apart.

A cost of FP8 means little below the rung of the seed, and nothing below that of the same run done
again.
"""

from __future__ import annotations

import itertools

import pandas as pd

from fp8study.analysis.frames import PRECISION_LABELS
from fp8study.analysis.pairing import newest_per_seed, paired_losses

AGAIN = "the same run again"
SEED = "another seed"
FAULT = "stale optimizer"

LADDER_COLUMNS = ["machine", "study", "model", "rung", "precision", "difference_pct"]


def ladder_table(runs: pd.DataFrame) -> pd.DataFrame:
    """List the differences in final loss of every two runs that one thing tells apart.

    Args:
        runs: From `tables.runs_frame`; runs on a CPU are left out, and so are studies
            of speed alone, whose few steps end anywhere.

    Returns:
        The columns of `LADDER_COLUMNS`, one row per pair: ``rung`` is `AGAIN`, `SEED` (BF16 arms),
        a precision (against BF16, same seed) or `FAULT` (stale FP8 against BF16), and
        ``difference_pct`` the absolute difference in % of the loss, zero for equal losses. Only
        machines, studies and models with two runs of one arm, whose noise is known.
    """
    usable = runs[(runs["status"] == "completed") & runs["loss_last20_mean"].notna()]
    usable = usable[(usable["device"] == "cuda") & ~usable["speed_only"]]
    healthy = usable[~usable["stale"].fillna(False).astype(bool)]
    newest = newest_per_seed(healthy)
    rows = [*_apart(healthy, ["arm_key", "pair_key"], AGAIN)]
    rows += _apart(newest[newest["precision"] == "bf16"], ["arm_key"], SEED)
    noisy = {(row["machine"], row["study"], row["model"]) for row in rows}
    for _, pair in paired_losses(usable).iterrows():
        rung = FAULT if pair["stale"] else PRECISION_LABELS.get(pair["precision"], "other")
        base = pair["loss_last20_mean_bf16"]
        rows.append(_row(pair, rung, 100 * abs(pair["loss_last20_mean"] - base) / base))
    kept = [row for row in rows if (row["machine"], row["study"], row["model"]) in noisy]
    return pd.DataFrame(kept, columns=LADDER_COLUMNS)


def _apart(runs: pd.DataFrame, keys: list[str], rung: str) -> list[dict[str, object]]:
    """Compare every two runs of a group with each other."""
    rows = []
    for _, group in runs.groupby(keys, sort=False):
        mean = group["loss_last20_mean"].mean()
        for one, other in itertools.combinations(group["loss_last20_mean"], 2):
            rows.append(_row(group.iloc[0], rung, 100 * abs(one - other) / mean))
    return rows


def _row(run: pd.Series, rung: str, difference_pct: float) -> dict[str, object]:
    identity = {name: run[name] for name in ("machine", "study", "model", "precision")}
    return identity | {"rung": rung, "difference_pct": float(difference_pct)}
