"""When FP8's longer warm-up has paid for itself."""

from __future__ import annotations

import math

import pandas as pd

from fp8study.analysis.instruments import ARM, context, numbers
from fp8study.analysis.pairing import ordered


def cache_state(hits: float, misses: float) -> str:
    """Say in what state a run found torch's compile cache."""
    if math.isnan(hits) or hits + misses == 0:
        return "not compiled"
    return "cold" if hits == 0 else "warm" if misses == 0 else "partly warm"


def break_even_table(frame: pd.DataFrame) -> pd.DataFrame:
    """After how many steps FP8's longer warm-up has paid for itself, by state of the cache.

    Warm-up is everything up to the timed window beyond what the same steps usually take: start-up,
    compilation, slow first steps. ``break_even_steps`` is the difference of two arms' warm-ups
    over the difference of their steps; 0 where FP8 also starts sooner, infinite where its step is
    no shorter. Arms whose allocator was in distress are left out.
    """
    columns = [*ARM, "cache", "num_runs", "warm_up_seconds", "warm_up_seconds_bf16",
               "step_time_ms", "step_time_ms_bf16", "break_even_steps"]  # fmt: skip
    calm = frame[
        (frame["device"] == "cuda")
        & ~frame["stale"].fillna(False).astype(bool)
        & (numbers(frame, "memory.num_alloc_retries").fillna(0) == 0)
        & (numbers(frame, "memory.num_device_allocs").fillna(0) == 0)
        & frame["warm_up_seconds"].notna()
    ]
    if calm.empty:
        return pd.DataFrame(columns=columns)
    states = [
        cache_state(float(hits), float(misses))
        for hits, misses in zip(
            calm["compile_cache_hits"], calm["compile_cache_misses"], strict=True
        )
    ]
    calm = calm.assign(cache=states, _context=context(calm))
    keys = ["_context", "arm", "cache"]
    groups = calm.groupby(keys, sort=False)
    table = groups[[name for name in ARM if name != "arm"]].first()
    table["num_runs"] = groups.size()
    table["warm_up_seconds"] = groups["warm_up_seconds"].median()
    # A step is as long with a cold cache as with a warm one.
    steps = calm.groupby(["_context", "arm"])["step_time_ms_median"].median()
    table = table.reset_index()
    table["step_time_ms"] = [
        steps[key] for key in zip(table["_context"], table["arm"], strict=True)
    ]
    keys = ["_context", "cache"]
    bf16 = table[table["precision"] == "bf16"].set_index(keys)
    bf16 = bf16[["warm_up_seconds", "step_time_ms"]].add_suffix("_bf16")
    pairs = table[table["precision"] != "bf16"].join(bf16, on=keys, how="inner")
    later = (pairs["warm_up_seconds"] - pairs["warm_up_seconds_bf16"]).clip(lower=0)
    gained_s = (pairs["step_time_ms_bf16"] - pairs["step_time_ms"]) / 1000
    pairs["break_even_steps"] = (later / gained_s).where(gained_s > 0, math.inf)
    return ordered(pairs[columns])
