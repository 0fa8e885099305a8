"""How far FP8's losses are from BF16's, paired by seed, and what may be concluded."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Literal

import pandas as pd

from fp8study.analysis import stats
from fp8study.analysis.pairing import ARM, DIVERGED, diverged_alone, ordered, pairs_of
from fp8study.analysis.power import smallest_detectable
from fp8study.core.studies import LOSS_MARGIN_PCT

LOSS_GAP_COLUMNS = [
    *ARM,
    "num_pairs",
    "num_lost",
    "pairs",
    "epochs",
    "num_diverged",
    "loss_bf16",
    "loss",
    "gap",
    "gap_pct",
    "gap_pct_low_90",
    "gap_pct_high_90",
    "gap_pct_low_95",
    "gap_pct_high_95",
    "interval",
    "p_value",
    "p_holm",
    "detectable_pct",
    "margin_pct",
    "judged",
    "verdict",
]


def loss_gap_table(
    runs: pd.DataFrame,
    margins: Mapping[str, float] | None = None,
    loss: Literal["loss_last20_mean", "validation_loss"] = "loss_last20_mean",
) -> pd.DataFrame:
    """Compare the final loss of every arm with BF16, paired by seed.

    Args:
        runs: From `fp8study.analysis.tables.runs_frame`.
        margins: Study → the margin that its file states, % of the BF16 loss; `LOSS_MARGIN_PCT`
            for the others.
        loss: On what was trained on, the mean over the last 20 steps, or on what was not.

    Returns:
        The columns of `LOSS_GAP_COLUMNS`. Losses are in nats per token; ``gap`` is FP8 − BF16,
        ``gap_pct`` the mean of the gaps relative to BF16, ``epochs`` how often the corpus was
        seen at most.
        ``num_pairs`` counts seeds with a pair, ``num_lost`` the arm's seeds without one (failed,
        diverged, no partner), and ``num_diverged`` those of them that diverged where BF16 did
        not; ``pairs`` says the first two in words. With three pairs or more, the 90 and 95 %
        paired-t intervals and the verdict of the equivalence test at ``margin_pct``; with fewer,
        ``interval`` says so. ``p_value`` is of the paired t test of no difference, ``p_holm``
        adjusted over the arms of a study that are not stale; ``detectable_pct`` is the smallest
        true difference that the test finds four times in five. An arm that diverged alone is
        called `DIVERGED` instead, however close its other seeds are, and has a row even if no seed
        is left. ``judged`` is the verdict, with the seeds that diverged.
    """
    runs = runs[~runs["speed_only"]]
    if loss == "validation_loss":
        runs = runs[runs["validation_sequences"].fillna(0) > 0]
    pairs, gone = pairs_of(runs, loss), diverged_alone(runs)
    if pairs.empty and gone.empty:
        return pd.DataFrame(columns=LOSS_GAP_COLUMNS)
    # What failed early does not know yet what it was to train on.
    unknown = runs["corpus_sha256"].isna() | runs["num_parameters"].isna()
    rows = []
    for key in dict.fromkeys([*pairs["arm_key"], *gone["arm_key"]]):
        group, lone = pairs[pairs["arm_key"] == key], gone[gone["arm_key"] == key]
        first = (group if len(group) else lone).iloc[0]
        gap = group[loss] - group[f"{loss}_bf16"]
        gap_pct = 100 * gap / group[f"{loss}_bf16"]
        asked = first["asked_key"]
        started = runs[(runs["arm_key"] == key) | (unknown & (runs["asked_key"] == asked))]
        row = {name: first[name] for name in ARM}
        margin = (margins or {}).get(row["study"], LOSS_MARGIN_PCT)
        row |= {
            "margin_pct": margin,
            "num_pairs": len(group),
            "num_lost": len(set(started["seed"].dropna()) - set(group["seed"])),
            "num_diverged": len(lone),
            "epochs": group["epochs"].max(),
            "loss_bf16": group[f"{loss}_bf16"].mean(),
            "loss": group[loss].mean(),
            "gap": gap.mean(),
            "gap_pct": gap_pct.mean(),
        }
        lost = row["num_lost"]
        row["pairs"] = f"{len(group)} of {len(group) + lost}" if lost else str(len(group))
        row |= _intervals(gap_pct.tolist(), margin)
        judged = row["verdict"]
        if len(lone):
            row["verdict"] = DIVERGED
            judged = f"diverged in {len(lone)} of {len(group) + len(lone)} seeds"
        rows.append(row | {"judged": judged})
    table = pd.DataFrame(rows, columns=LOSS_GAP_COLUMNS)
    return ordered(table.assign(p_holm=_adjusted(table)))


def _adjusted(table: pd.DataFrame) -> pd.Series:
    """Adjust the p-values over the healthy arms that one study asks about in one place."""
    healthy = table[table["p_value"].notna() & ~table["stale"].fillna(False).astype(bool)]
    families = [
        pd.Series(stats.holm(family["p_value"].tolist()), index=family.index)
        for _, family in healthy.groupby(["machine", "study", "model"])
    ]
    adjusted = pd.concat(families) if families else pd.Series(dtype=float)
    return adjusted.reindex(table.index)


def _intervals(gap_pct: list[float], margin: float) -> dict[str, object]:
    if len(gap_pct) < stats.MIN_PAIRS_FOR_INTERVAL:
        count = {0: "no pair", 1: "one pair"}.get(len(gap_pct), f"{len(gap_pct)} pairs")
        return {"interval": f"{count}: no interval", "verdict": "undecided"}
    outcome = stats.tost(gap_pct, margin)
    wide = stats.paired_t_interval(gap_pct, 0.95)
    narrow = outcome.interval
    return {
        "gap_pct_low_90": narrow.low,
        "gap_pct_high_90": narrow.high,
        "gap_pct_low_95": wide.low,
        "gap_pct_high_95": wide.high,
        "interval": f"{_interval_text(narrow)}; {_interval_text(wide)}",
        "p_value": stats.paired_t_p_value(gap_pct),
        "detectable_pct": smallest_detectable(statistics.stdev(gap_pct), len(gap_pct)),
        "verdict": outcome.verdict,
    }


def _interval_text(interval: stats.Interval) -> str:
    """Write an interval so that no line break falls into it."""
    low, high = (f"{end:+.2f}".replace("-", "\u2212") for end in (interval.low, interval.high))
    return f"{100 * interval.level:.0f} %: {low} to {high}".replace(" ", "\u00a0")
