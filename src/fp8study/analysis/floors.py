"""How far apart runs end that compute the same: the floor that a precision is held against.

A cost of FP8 means little below the spread of the seeds, and nothing below that of the same run
done again, or of other kernels that are as exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import pandas as pd

from fp8study.analysis import stats
from fp8study.analysis.pairing import PRECISION_LABELS, newest_per_seed, paired_losses
from fp8study.core.records import StoredRun

AGAIN = "the same run again"
KERNELS = "other kernels"
SEED = "another seed"
FAULT = "stale optimizer"

LADDER_COLUMNS = ["machine", "study", "model", "rung", "precision", "difference_pct"]
_PLACE = ["machine", "study", "model", "num_gpus", "setting", "arm", "precision"]
CURVE_COLUMNS = [
    *_PLACE, "rung", "step", "num_pairs", "gap_pct", "low_95", "high_95", "margin_pct", "verdict",
]  # fmt: skip


def _usable(runs: pd.DataFrame, stale: bool = False) -> pd.DataFrame:
    """Return the completed runs on GPUs whose losses are asked about, stale ones if asked for."""
    done = (runs["status"] == "completed") & runs["loss_last20_mean"].notna()
    asked = (runs["device"] == "cuda") & ~runs["speed_only"]
    return runs[done & asked & (stale | ~runs["stale"])]


def reruns(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the repeats of a seed, each with the first one's run_id and loss (``…_base``)."""
    healthy = _usable(runs)
    first = newest_per_seed(healthy)
    return _joined(healthy[~healthy.index.isin(first.index)], first, ["arm_key", "pair_key"])


def kernel_pairs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return BF16 runs by other kernels than the BF16 run of the seed that FP8 is compared with.

    Each with that one's run_id and loss (``…_base``): they differ in attention or compilation
    alone.
    """
    newest = newest_per_seed(_usable(runs))
    bf16, fp8 = newest[newest["precision"] == "bf16"], newest[newest["precision"] != "bf16"]
    is_base = bf16["pair_key"].isin(set(fp8["pair_key"]))
    return _joined(bf16[~is_base], bf16[is_base], ["kernel_key"])


def _joined(runs: pd.DataFrame, base: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    theirs = base.drop_duplicates(keys).set_index(keys)[["run_id", "loss_last20_mean"]]
    return runs.join(theirs.add_suffix("_base"), on=keys, how="inner")


def ladder_table(runs: pd.DataFrame) -> pd.DataFrame:
    """List the differences in final loss of every two runs that one thing tells apart.

    Args:
        runs: Rows of `runs_frame`; runs on a CPU are left out, and so are studies of speed alone,
            whose few steps end anywhere.

    Returns:
        The columns of `LADDER_COLUMNS`, one row per pair: ``rung`` is `AGAIN`, `KERNELS`, `SEED`
        (both of BF16 arms), a precision (against BF16, same seed) or `FAULT` (stale FP8 against
        BF16), and ``difference_pct`` the absolute difference in % of the loss. Only machines,
        studies and models with two runs of one arm, whose noise is known.
    """
    healthy = _usable(runs)
    newest = newest_per_seed(healthy)
    rows = [*_apart(healthy, ["arm_key", "pair_key"], AGAIN)]
    rows += _apart(newest[newest["precision"] == "bf16"], ["arm_key"], SEED)
    noisy = {(row["machine"], row["study"], row["model"]) for row in rows}
    for _, pair in kernel_pairs(runs).iterrows():
        rows.append(_against(pair, KERNELS, pair["loss_last20_mean_base"]))
    for _, pair in paired_losses(_usable(runs, stale=True)).iterrows():
        rung = FAULT if pair["stale"] else PRECISION_LABELS.get(pair["precision"], "other")
        rows.append(_against(pair, rung, pair["loss_last20_mean_bf16"]))
    kept = [row for row in rows if (row["machine"], row["study"], row["model"]) in noisy]
    return pd.DataFrame(kept, columns=LADDER_COLUMNS)


def _apart(runs: pd.DataFrame, keys: list[str], rung: str) -> Iterator[dict[str, object]]:
    """Compare every two runs of a group with each other."""
    for _, group in runs.groupby(keys, sort=False):
        mean = group["loss_last20_mean"].mean()
        for one, other in itertools.combinations(group["loss_last20_mean"], 2):
            yield _row(group.iloc[0], rung, 100 * abs(one - other) / mean)


def _against(run: pd.Series, rung: str, base: float) -> dict[str, object]:
    return _row(run, rung, 100 * abs(run["loss_last20_mean"] - base) / base)


def _row(run: pd.Series, rung: str, difference_pct: float) -> dict[str, object]:
    identity = {name: run[name] for name in ("machine", "study", "model", "precision")}
    return identity | {"rung": rung, "difference_pct": float(difference_pct)}


def validation_curve(stored_runs: Iterable[StoredRun], runs: pd.DataFrame) -> pd.DataFrame:
    """Follow the gap on text that no run trained on, for FP8 and for what should make none.

    Args:
        stored_runs: Records; those with ``validation_losses`` count.
        runs: `runs_frame` of them.

    Returns:
        The columns of `CURVE_COLUMNS`, one row per arm, ``rung`` and scored ``step``: the gap's
        mean over seeds, in % of the other run's loss, with the 95 % interval and the verdict of
        `stats.judged`. The ``rung`` says against what: a precision against BF16, `KERNELS` (BF16
        against BF16), or `AGAIN` (the arm against its own first run).
    """
    curves = {
        (run.machine_label, run.record.study, run.record.run_id): {
            int(point["step"]): float(point["loss"])
            for point in run.record.results.get("validation_losses", [])
            if point.get("loss") is not None
        }
        for run in stored_runs
    }
    against_bf16 = paired_losses(_usable(runs)).rename(columns={"run_id_bf16": "run_id_base"})
    labels = against_bf16["precision"].map(PRECISION_LABELS)
    pairs = pd.concat(
        [
            against_bf16.assign(rung=labels),
            kernel_pairs(runs).assign(rung=KERNELS),
            reruns(runs).assign(rung=AGAIN),
        ]
    )
    rows: list[dict[str, object]] = []
    for _, group in pairs.groupby(["arm_key", "rung"], sort=False):
        gaps: dict[int, list[float]] = {}
        for _, pair in group.iterrows():
            ours, theirs = (
                curves.get((pair["machine"], pair["study"], pair[name]), {})
                for name in ("run_id", "run_id_base")
            )
            for step in ours.keys() & theirs.keys():
                gaps.setdefault(step, []).append(100 * (ours[step] / theirs[step] - 1))
        first = group.iloc[0]
        for step, pct in sorted(gaps.items()):
            row = {name: first[name] for name in [*_PLACE, "rung", "margin_pct"]}
            row |= {"step": step, "num_pairs": len(pct), "gap_pct": sum(pct) / len(pct)}
            rows.append(row | stats.judged(pct, float(first["margin_pct"])))
    return pd.DataFrame(rows, columns=CURVE_COLUMNS)
