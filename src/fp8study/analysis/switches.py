"""What each switch of the training path gives: speed and memory, and whether it trains the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from fp8study.analysis import stats
from fp8study.analysis.pairing import newest_per_seed, timing_is_void
from fp8study.core.config import completed
from fp8study.core.fields import FIELDS, PLAIN, RETIRED
from fp8study.core.studies import LOSS_MARGIN_PCT

SWITCH_COLUMNS = [
    "machine", "study", "model", "num_gpus", "precision", "setting", "setting_plain", "num_runs",
    "tokens_per_second_per_gpu", "tokens_per_second_per_gpu_plain", "gain_pct", "memory_peak_gib",
    "memory_change_pct", "num_pairs", "loss_gap_pct", "low_95", "high_95", "verdict",
]  # fmt: skip


#: What the report says of a switch that is true or false.
_SAID = {True: "on", False: "off"}


def switch_table(runs: pd.DataFrame, margins: Mapping[str, float] | None = None) -> pd.DataFrame:
    """Compare every arm on GPUs with the plain path's of the same precision.

    On one GPU the strategy counts as a switch too, since there is nothing to share: the plain
    path is then FSDP2, as the documents have it, where that was run and had memory enough.

    Args:
        runs: From `fp8study.analysis.tables.runs_frame`.
        margins: As `fp8study.analysis.tables.loss_gap_table`.

    Returns:
        The columns of `SWITCH_COLUMNS`; ``setting`` is what an arm has besides the plain one's.
        Speeds and memory are medians over all runs, repeats
        included; ``gain_pct`` is missing where a run was short of memory. Losses are means of the
        last 20 steps, paired by seed, and missing where a study only asks for speed; the verdict
        is of the test of equivalence, from three pairs on.
    """
    usable = runs[(runs["status"] == "completed") & (runs["device"] == "cuda")]
    usable = usable[~usable["stale"].fillna(False).astype(bool)]
    rows = []
    for _, group in usable.groupby("switch_key", sort=False):
        plain = _plain(group[group["path"] == "plain"])
        if plain["arm_key"].nunique() != 1:
            continue
        margin = (margins or {}).get(str(group["study"].iloc[0]), LOSS_MARGIN_PCT)
        others = group[group["arm_key"] != plain["arm_key"].iloc[0]]
        rows += [_row(arm, plain, margin) for _, arm in others.groupby("arm_key", sort=False)]
    table = pd.DataFrame(rows, columns=SWITCH_COLUMNS)
    return table.sort_values(["machine", "study", "model", "num_gpus", "precision"], kind="stable")


def _plain(arms: pd.DataFrame) -> pd.DataFrame:
    """Choose among the plain path's arms, which differ in their strategy alone."""
    sharded, others = arms[arms["strategy"] == "fsdp2"], arms[arms["strategy"] != "fsdp2"]
    short = sharded.empty or (timing_is_void(sharded).any() and len(others))
    return others if short else sharded


def _row(arm: pd.DataFrame, plain: pd.DataFrame, margin: float) -> dict[str, object]:
    row = {name: arm[name].iloc[0] for name in SWITCH_COLUMNS[:6]}
    speed, memory = "tokens_per_second_per_gpu", "memory_peak_gib"
    ours, theirs = arm[[speed, memory]].median(), plain[[speed, memory]].median()
    void = timing_is_void(arm).any() or timing_is_void(plain).any()
    usual = plain["setting"].iloc[0]
    own = [part for part in row["setting"].split(", ") if part not in usual.split(", ")]
    row |= {
        "setting": ", ".join(own),
        "setting_plain": usual,
        "num_runs": len(arm),
        speed: ours[speed],
        f"{speed}_plain": theirs[speed],
        "gain_pct": math.nan if void else 100 * (ours[speed] / theirs[speed] - 1),
        memory: ours[memory],
        "memory_change_pct": 100 * (ours[memory] / theirs[memory] - 1),
    }
    if arm["speed_only"].any():
        return row
    loss = "loss_last20_mean"
    losses = [newest_per_seed(part).set_index("seed")[loss] for part in (arm, plain)]
    pairs = losses[0].to_frame().join(losses[1].rename("plain"), how="inner")
    gaps = (100 * (pairs[loss] / pairs["plain"] - 1)).dropna().tolist()
    row |= {"num_pairs": len(gaps), "loss_gap_pct": sum(gaps) / len(gaps) if gaps else None}
    return row | stats.judged(gaps, margin)


def unusual_switches(config: dict[str, Any]) -> list[str]:
    """Name, in words, the switches of a recorded run that its path would have set otherwise.

    Args:
        config: From a record. A switch that came later was not set; if the path sets it today, the
            record is of an earlier form of the path.
    """
    switches = {name: (FIELDS | RETIRED)[name].words for name in PLAIN}
    others = {name: value for name, value in config.items() if name not in PLAIN}
    # Of a configuration that is refused today, nothing is known to be usual.
    usual = completed(others | dict.fromkeys(name for name in PLAIN if name in FIELDS))
    values = PLAIN | config
    unusual = {n for n in PLAIN if values[n] is not None and values[n] != usual.get(n, values[n])}
    unusual -= {name for name in PLAIN if usual.get(name) is None}
    texts = [
        switches[name].format(_SAID.get(value, str(value).replace("_", " ")))
        for name, value in config.items()
        if name in unusual
    ]
    return texts if unusual <= config.keys() else [*texts, "earlier form"]
