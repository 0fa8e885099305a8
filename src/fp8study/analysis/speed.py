"""Speed and memory of every arm, and FP8's lead over BF16."""

from __future__ import annotations

import pandas as pd

from fp8study.analysis.pairing import (
    ALLOCATOR_EVENTS,
    ARM,
    newest_per_seed,
    ordered,
    pairs_of,
    timing_is_void,
)
from fp8study.core.records import RESULTS
from fp8study.core.startup import PARTS

#: The note of a run that came near the limit; its speed is compared with nothing.
MEMORY_FULL = "memory nearly full"

_MEASURED = [
    "tokens_per_second_per_gpu",
    "tflops_per_gpu",
    "mfu_bf16_peak_pct",
    "bf16_peak_tflops",
    "step_time_ms_median",
    "memory_peak_gib",
    "startup_seconds",
    *(f"startup_{part}_seconds" for part in PARTS),
    "first_step_seconds",
    "compile_seconds",
]

THROUGHPUT_COLUMNS = [
    *ARM,
    "num_runs",
    *_MEASURED,
    "speedup_pct",
    "memory_change_pct",
    "note",
]


def throughput_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Speed and memory by arm: the median over seeds, of each the median over its repeats.

    Args:
        runs: From `fp8study.analysis.tables.runs_frame`.

    Returns:
        The columns of `THROUGHPUT_COLUMNS`. ``num_runs`` counts repeats too. ``speedup_pct`` is
        the median over pairs of how much more tokens per second the arm makes than BF16 with
        everything else equal, %; it is missing without a partner, on CPUs, and where either run
        nearly filled the GPU's memory. ``mfu_bf16_peak_pct`` is over the dense BF16 peak for every
        precision. ``note`` names what limits the comparison.
    """
    timed = _medians_of_repeats(runs)
    if timed.empty:
        return pd.DataFrame(columns=THROUGHPUT_COLUMNS)
    groups = timed.groupby("arm_key", sort=False)
    table = groups[[name for name in ARM if name != "arm_key"]].first()
    table["num_runs"] = groups["num_repeats"].sum()
    table[_MEASURED] = groups[_MEASURED].median()
    pairs = pairs_of(timed, "tokens_per_second_per_gpu")
    pairs = pairs[pairs["device"] != "cpu"]
    speed = pairs["tokens_per_second_per_gpu"] / pairs["tokens_per_second_per_gpu_bf16"]
    memory = pairs["memory_peak_gib"] / pairs["memory_peak_gib_bf16"]
    full = timing_is_void(pairs) | timing_is_void(pairs, "_bf16")
    pairs = pairs.assign(
        # A run that waits for the allocator makes its partner look fast.
        speedup_pct=(100 * (speed - 1)).where(~full),
        memory_change_pct=100 * (memory - 1),
    )
    by_arm = pairs.groupby("arm_key")
    table["speedup_pct"] = by_arm["speedup_pct"].median()
    table["memory_change_pct"] = by_arm["memory_change_pct"].median()
    strained = set(pairs.loc[full, "arm_key"]) | set(timed.loc[timing_is_void(timed), "arm_key"])
    paired = set(pairs["arm_key"])
    table["note"] = [
        _speed_note(row, key in strained, key in paired) for key, row in table.iterrows()
    ]
    return ordered(table.reset_index()[THROUGHPUT_COLUMNS])


def _medians_of_repeats(runs: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each seed of an arm with timings.

    What was measured is the median over the seed's repeats, of each the newest result;
    ``num_repeats`` is their number, and the allocator's events are the most of any.
    """
    seed, events = ["arm_key", "pair_key"], list(ALLOCATOR_EVENTS)
    results = runs[runs["status"].isin(RESULTS)].fillna({"repeat": 0})
    newest = results.sort_values("ended_at", kind="stable").drop_duplicates(
        [*seed, "repeat"], keep="last"
    )
    is_timed = newest["tokens_per_second_per_gpu"].notna() & (newest["status"] == "completed")
    each = newest[is_timed]
    repeats = each.groupby(seed, sort=False)
    measured = repeats[_MEASURED].median().join(repeats[events].max())
    measured["num_repeats"] = repeats.size()
    first = newest_per_seed(each)
    kept = first.drop(columns=[*_MEASURED, *events])
    return kept.merge(measured.reset_index(), on=seed, how="left", validate="one_to_one")


def _speed_note(row: pd.Series, full: bool, paired: bool) -> str:
    if row["device"] == "cpu":
        return "CPU, FP8 emulated"
    notes = []
    if row["stale"]:
        notes.append("does less work per step")
    if full:
        notes.append(MEMORY_FULL)
    if row["precision"] != "bf16" and not paired:
        notes.append("no BF16 partner")
    return "; ".join(notes)
