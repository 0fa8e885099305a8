"""What the instruments saw: utilisation, kernels, memory, energy, communication, warm-up.

Each takes the frame of `instruments_frame`, one row per run, and gives one row per arm: medians
over the arm's runs, of energy over its seeds. What no run measured is missing, never zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pandas as pd

from fp8study.analysis.runs.frames import PLACE, place_of
from fp8study.analysis.runs.pairing import (
    ARM,
    healthy,
    in_fp8,
    medians_by,
    medians_of_repeats,
    medians_of_seeds,
    ordered,
    pairs_of,
    together,
)
from fp8study.core.audit_rules import problems, without_hidden_products
from fp8study.core.recipes import ARITHMETICS
from fp8study.core.records import StoredRun

_ARM = [*ARM, "partner_key"]

#: Kinds of kernels in the order in which they are shown; see `fp8study.measure.trace.kind_of`.
KINDS = ("gemm_fp8", "gemm_bf16", "attention", "fused", "loss", "optimizer", "copy",
         "communication", "other")  # fmt: skip


def instruments_frame(stored_runs: Iterable[StoredRun], runs: pd.DataFrame) -> pd.DataFrame:
    """One row per completed run that carries instruments; `runs` is `runs_frame` of them.

    The columns of `runs`, and those of ``instruments`` and ``audit`` with their path as a name:
    ``memory.peak_gib``, ``step.by_kind_ms.attention``, ``audit.stalled_pct`` …
    """
    rows = [
        _row(run)
        for run in stored_runs
        # Runs that are not timed know their start-up only.
        if run.record.instruments.keys() - {"startup"} and run.record.status == "completed"
    ]
    flat = pd.json_normalize(rows) if rows else pd.DataFrame(columns=PLACE)
    return runs.merge(flat, on=PLACE, how="inner", validate="one_to_one").copy()  # in one piece


def _row(run: StoredRun) -> dict[str, Any]:
    record = run.record
    audit = without_hidden_products(record.audit, record.config)
    step = without_hidden_products(record.instruments.get("step", {}), record.config)
    return {
        **place_of(run),
        "audit": audit,
        "audit.problems": "; ".join(problems(audit)) if audit else None,
        **record.instruments,
        "step": step,
    }


def of_the_instruments(frame: pd.DataFrame) -> pd.DataFrame:
    """Keep the study that was made for these tables where it was run, else all that there is."""
    own = frame[(frame["study"] == "instruments") & (frame["device"] == "cuda")]
    return own if len(own) else frame


def numbers(frame: pd.DataFrame, name: str) -> pd.Series:
    """Return a column as numbers, all missing where no run has it."""
    if name not in frame:
        return pd.Series(math.nan, index=frame.index)
    return pd.to_numeric(frame[name], errors="coerce")


def _by_arm(frame: pd.DataFrame, columns: dict[str, str]) -> pd.DataFrame:
    """Return medians by arm on GPUs of columns under new names, in the report's order."""
    chosen = frame[frame["device"] == "cuda"]
    values = pd.DataFrame({new: numbers(chosen, old) for new, old in columns.items()})
    values = values[values.notna().any(axis=1)]
    table = pd.concat([chosen.loc[values.index, [*_ARM, "run_ids"]], values], axis=1)
    if table.empty:
        return pd.DataFrame(columns=[*_ARM, "num_runs", "run_ids", *columns])
    return ordered(medians_by(table, ["arm_key"], list(columns), _ARM).reset_index())


def beside_bf16(table: pd.DataFrame, base: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Add columns of each row's partner, a healthy BF16 arm in `base`, as ``…_bf16``."""
    bf16 = healthy(base[base["precision"] == "bf16"])
    theirs = bf16.drop_duplicates("partner_key").set_index("partner_key")[columns]
    return table.join(theirs.add_suffix("_bf16"), on="partner_key")


def utilisation_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Useful arithmetic against three denominators: two of a datasheet, one measured."""
    names = ("tflops_per_gpu", "bf16_peak_tflops", "mfu_bf16_peak_pct", "mixed_peak_tflops",
             "mfu_mixed_peak_pct", "achievable_tflops", "mfu_achievable_pct")  # fmt: skip
    columns = dict(zip(names, names, strict=True))
    return _by_arm(frame, columns | {"achievable_tflops": "ceilings.run_tflops"})


def ceilings_table(frame: pd.DataFrame) -> pd.DataFrame:
    """GEMM peaks by model: medians over all runs that measured them, and the spread."""
    names = [*(f"{arithmetic}_tflops" for arithmetic in ARITHMETICS), "copy_tb_per_s"]
    keys = ["machine", "gpu_name", "model", "num_tokens"]
    columns = [*keys, "num_runs", *names, "spread_pct", "run_ids"]
    values = {name: numbers(frame, f"ceilings.{name}") for name in ["num_tokens", *names]}
    table = frame[[*keys[:3], "run_ids"]].assign(**values)
    table = table[table["bf16_tflops"].notna()]
    if table.empty:
        return pd.DataFrame(columns=columns)
    result = medians_by(table, keys, names, keys).sort_index()
    bf16 = table.groupby(keys)["bf16_tflops"]
    result["spread_pct"] = 100 * (bf16.max() - bf16.min()) / bf16.median()
    return result.reset_index()[columns]


def _items(runs: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return one row per mapping of the lists in a column, under the index of its run."""
    lists = runs[column] if column in runs else pd.Series(dtype=object)
    items = lists[lists.map(lambda value: isinstance(value, list))].explode().dropna()
    return pd.DataFrame(items.tolist(), index=items.index)


def gemm_pct(frame: pd.DataFrame) -> pd.Series:
    """Return by arm how fast its GEMMs ran inside the profiled step, % of their GEMM peak."""
    gemms = _items(frame[frame["device"] == "cuda"], "step.gemm")
    if "time_ms" not in gemms:
        return pd.Series(dtype=float)
    sums = gemms[["tflop", "time_ms"]].groupby(level=0).sum()
    runs = frame.loc[sums.index[sums["time_ms"] > 0]]
    rates = 1000 * sums["tflop"] / sums["time_ms"]
    pct = 100 * rates[runs.index] / numbers(runs, "ceilings.run_tflops")
    return pct.groupby(runs["arm_key"]).median()


def kernels_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Where one profiled step's kernel time went, ms, and how much of the products was FP8.

    ``step_time_ms_median`` is the timed window's step and ``profiled_ms`` the profiled one, which
    the profiler may have slowed down: kernels' times hold, waiting does not. So
    ``not_computing_ms`` is the timed step less the time in which the profiled one computed:
    idle, or waiting for communication.
    """
    kinds = {kind: f"step.by_kind_ms.{kind}" for kind in KINDS}
    others = {
        "step_time_ms_median": "step_time_ms_median",
        "profiled_ms": "step.step_ms",
        "exposed_communication_ms": "step.exposed_communication_ms",
        "idle_ms": "step.idle_ms",
        "fp8_gemm_time_pct": "step.fp8_gemm_time_pct",
        "fp8_gemm_flops_pct": "step.fp8_gemm_flops_pct",
        "fp8_expected_pct": "audit.fp8_gemm_flops_pct_expected",
    }
    table = _by_arm(frame[numbers(frame, "step.step_ms").notna()], kinds | others)
    waiting = table["exposed_communication_ms"] + table["idle_ms"]
    computing = table["profiled_ms"] - waiting
    table["not_computing_ms"] = (table["step_time_ms_median"] - computing).clip(lower=0)
    return table


def memory_split_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Memory of the fullest rank, GiB: what it is for, its peaks, and the allocator's distress.

    ``working_gib`` is all but weights and optimizer states at the steady peak: activations, work
    space, and those gradients that are there by then. In a short step the peak comes at the loss,
    before there are any, so ``gradients_gib``, which is their size after the backward pass, is no
    part of it.
    """
    names = ("parameters_gib", "optimizer_gib", "gradients_gib",
             "first_step_allocated_gib", "steady_allocated_gib", "steady_reserved_gib",
             "num_alloc_retries", "num_device_allocs")  # fmt: skip
    columns = {name: f"memory.{name}" for name in names}
    table = _by_arm(frame[numbers(frame, "memory.steady_allocated_gib").notna()], columns)
    kept = table["parameters_gib"] + table["optimizer_gib"]
    return table.assign(working_gib=table["steady_allocated_gib"] - kept)


def energy_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Energy per token, power and clocks over the timed window, by arm.

    Medians over seeds, of each the median over its repeats. ``change_pct`` is the median over
    seeds of how much more a healthy FP8 arm takes per token than its BF16 partner, %, as in
    `fp8study.analysis.speed.throughput_table`; missing where either timing may be the allocator's.
    """
    columns = {
        "joule_per_token": "energy.joule_per_token",
        "watts_mean": "energy.watts_mean",
        "clock_sm_mhz_median": "energy.clock_sm_mhz_median",
        "clock_sm_mhz_min": "energy.clock_sm_mhz_min",
        "power_cap_pct": "energy.throttled_pct.power_cap",
    }
    chosen = frame[frame["device"] == "cuda"]
    values = {new: numbers(chosen, old) for new, old in columns.items()}
    sampled = values["clock_sm_mhz_median"].notna()  # else nobody looked for a cap
    values["power_cap_pct"] = values["power_cap_pct"].fillna(0.0).where(sampled)
    seeds = medians_of_repeats(chosen.assign(**values), [*columns])
    pairs = pairs_of(seeds, "joule_per_token")
    pairs = healthy(pairs[~(pairs["timing_void"] | pairs["timing_void_bf16"])])
    table = medians_of_seeds(seeds, pairs, [*columns], _ARM)
    change = 100 * (pairs["joule_per_token"] / pairs["joule_per_token_bf16"] - 1)
    table["change_pct"] = change.groupby(pairs["arm_key"]).median()
    return ordered(table.reset_index())


def communication_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Bytes of one step's collectives on one rank, GiB, by collective and dtype.

    ``all_gather_gib`` and ``reduce_scatter_gib`` are sums over dtypes, ``…_dtypes`` name them
    with their share; ``all_gather_change_pct`` is against BF16. Where an arm has several nodes,
    ``inside_gib`` and ``between_gib`` part the sum of all. Of an arm the last run counts.
    """
    moved = _items(frame, "step.communication")
    runs = frame.loc[moved.index.unique(), [*_ARM, "run_ids"]].drop_duplicates(
        "arm_key", keep="last"
    )
    if runs.empty:
        names = ["all_gather_gib", "all_gather_dtypes", "all_gather_change_pct",
                 "reduce_scatter_gib", "reduce_scatter_dtypes"]  # fmt: skip
        return pd.DataFrame(columns=[*_ARM, "run_ids", *names])
    for collective in ("all_gather", "reduce_scatter", "all_reduce"):
        parts = moved[moved["collective"] == collective].groupby(level=0)
        runs[f"{collective}_gib"] = parts["gib"].sum()
        dtypes = {run: _by_dtype(part) for run, part in parts}
        runs[f"{collective}_dtypes"] = pd.Series(dtypes, dtype=object)
    if "reach" in moved:  # NaN where a run has one node
        sums = moved.groupby([moved.index, "reach"])["gib"].sum().unstack(fill_value=0)
        for reach in ("inside", "between"):
            runs[f"{reach}_gib"] = sums.get(reach, 0.0 * sums.sum(axis=1))
    both = beside_bf16(runs, runs, ["all_gather_gib", "run_ids"])
    change = 100 * (both["all_gather_gib"] / both.pop("all_gather_gib_bf16") - 1)
    compared = in_fp8(both) & ~both["stale"].astype(bool)  # a stale run does less work
    both["all_gather_change_pct"] = change.where(compared)
    theirs = both.pop("run_ids_bf16").where(both["all_gather_change_pct"].notna())
    both["run_ids"] = [together(ids) for ids in zip(both["run_ids"], theirs, strict=True)]
    return ordered(both)


def _by_dtype(parts: pd.DataFrame) -> str:
    names = parts["dtype"].map(short_dtypes)
    if len(names) == 1:
        return str(names.iloc[0])
    return ", ".join(f"{n} {gib:.2g}" for n, gib in zip(names, parts["gib"], strict=True))


def short_dtypes(text: str) -> str:
    """Return dtypes under the names that papers use."""
    for torchs, short in (("float8_e4m3fn", "E4M3"), ("float8_e5m2", "E5M2"),
                          ("bfloat16", "BF16"), ("float32", "FP32")):  # fmt: skip
        text = text.replace(torchs, short)
    return text


def overhead_pairs(frame: pd.DataFrame) -> list[float]:
    """Return what each pair of blocks, with and without instruments, differed by, %."""
    blocks = [f"overhead.{kind}_ms" for kind in ("measured", "plain")]
    if not {*blocks} <= {*frame}:
        return []
    runs = frame.loc[frame["device"] == "cuda", blocks].dropna().to_numpy()
    pairs = (pair for measured, plain in runs for pair in zip(measured, plain, strict=True))
    return [100 * (measured / plain - 1) for measured, plain in pairs]


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
    columns = [*_ARM, "cache", "num_runs", "warm_up_seconds", "warm_up_seconds_bf16",
               "step_time_ms", "step_time_ms_bf16", "break_even_steps",
               "run_ids"]  # fmt: skip
    timed = (frame["device"] == "cuda") & frame["warm_up_seconds"].notna()
    calm = healthy(frame[timed & ~frame["timing_void"]])
    if calm.empty:
        return pd.DataFrame(columns=columns)
    counts = calm[["compile_cache_hits", "compile_cache_misses"]].astype(float).to_numpy()
    states = [cache_state(*counted) for counted in counts]
    calm = calm.assign(cache=states)
    table = medians_by(calm, ["arm_key", "cache"], ["warm_up_seconds"], _ARM)
    # A step is as long with a cold cache as with a warm one.
    arms = calm.groupby("arm_key")
    steps = arms["step_time_ms_median"].median().rename("step_time_ms")
    table = table.drop(columns="run_ids").reset_index().join(steps, on="arm_key")
    table = table.join(arms["run_ids"].agg(together), on="arm_key")
    keys = ["partner_key", "cache"]
    bf16 = table[table["precision"] == "bf16"].drop_duplicates(keys).set_index(keys)
    bf16 = bf16[["warm_up_seconds", "step_time_ms", "run_ids"]].add_suffix("_bf16")
    pairs = table[in_fp8(table)].join(bf16, on=keys, how="inner")
    pairs["run_ids"] += " " + pairs["run_ids_bf16"]
    later = (pairs["warm_up_seconds"] - pairs["warm_up_seconds_bf16"]).clip(lower=0)
    gained_s = (pairs["step_time_ms_bf16"] - pairs["step_time_ms"]) / 1000
    pairs["break_even_steps"] = (later / gained_s).where(gained_s > 0, math.inf)
    return ordered(pairs[columns])
