"""The tables of the report: every number that it shows is computed here from run records.

A run whose optimizer holds stale parameters keeps the words "stale optimizer (x % of parameters
not trained)" in its ``arm`` in every table, so that it is never taken for an FP8 speed-up or
loss gap. CPU runs emulate FP8: they get no speed-up at all.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fp8study import stats
from fp8study.frames import METRIC_COLUMNS, RUN_COLUMNS, metrics_frame, runs_frame

__all__ = [
    "METRIC_COLUMNS",
    "RUN_COLUMNS",
    "data_table",
    "document_a_table",
    "failures_table",
    "loss_gap_table",
    "metrics_frame",
    "provenance_table",
    "published_table",
    "runs_frame",
    "throughput_table",
]

#: Largest relative loss difference that counts as none, %: DeepSeek-V3's published bound.
LOSS_MARGIN_PCT = 0.25
#: Above this share of the GPU's memory, time spent in the allocator can pass for a speed-up.
MEMORY_LIMIT_SHARE = 0.85

_CONTEXT = ["machine", "device", "gpu_name", "study", "model", "strategy", "num_gpus", "setting"]
_ARM = [*_CONTEXT, "precision", "arm", "stale", "arm_key"]
_MEASURED = [
    "tokens_per_second_per_gpu",
    "tflops_per_gpu",
    "mfu_bf16_peak_pct",
    "step_time_ms_median",
    "memory_peak_gib",
    "startup_seconds",
    "first_step_seconds",
    "compile_seconds",
]

THROUGHPUT_COLUMNS = [
    *_ARM,
    "num_runs",
    *_MEASURED,
    "speedup_pct",
    "memory_change_pct",
    "note",
]
LOSS_GAP_COLUMNS = [
    *_ARM,
    "num_pairs",
    "num_lost",
    "loss_bf16",
    "loss",
    "gap",
    "gap_pct",
    "gap_pct_low_90",
    "gap_pct_high_90",
    "gap_pct_low_95",
    "gap_pct_high_95",
    "interval",
    "verdict",
]


def _pairs(runs: pd.DataFrame, value: str) -> pd.DataFrame:
    """Give every FP8 run the `value` of the BF16 run that differs in precision alone.

    Returns:
        The FP8 rows that have a partner, with the partner's value, peak memory and allocator
        retries in columns that end in ``_bf16``.
    """
    usable = runs[(runs["status"] == "completed") & runs[value].notna()]
    baseline = (
        usable[(usable["precision"] == "bf16") & ~usable["stale"].fillna(False)]
        .groupby("pair_key")[[value, "memory_peak_gib", "num_alloc_retries"]]
        .median()
        .add_suffix("_bf16")
    )
    return usable[usable["precision"] != "bf16"].merge(baseline, on="pair_key", how="inner")


def throughput_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Speed and memory by arm: the median over seeds.

    Args:
        runs: From `runs_frame`.

    Returns:
        The columns of `THROUGHPUT_COLUMNS`. ``speedup_pct`` is the median over pairs of how much
        more tokens per second the arm makes than BF16 with everything else equal, %; it is
        missing without a partner and on CPUs. ``mfu_bf16_peak_pct`` is over the dense BF16 peak
        for every precision. ``note`` names what limits the comparison.
    """
    timed = runs[(runs["status"] == "completed") & runs["tokens_per_second_per_gpu"].notna()]
    if timed.empty:
        return pd.DataFrame(columns=THROUGHPUT_COLUMNS)
    groups = timed.groupby("arm_key", sort=False)
    table = groups[[name for name in _ARM if name != "arm_key"]].first()
    table["num_runs"] = groups.size()
    table[_MEASURED] = groups[_MEASURED].median()
    pairs = _pairs(runs, "tokens_per_second_per_gpu")
    pairs = pairs[pairs["device"] != "cpu"]
    speed = pairs["tokens_per_second_per_gpu"] / pairs["tokens_per_second_per_gpu_bf16"]
    memory = pairs["memory_peak_gib"] / pairs["memory_peak_gib_bf16"]
    limit = MEMORY_LIMIT_SHARE * pairs["gpu_memory_gib"]
    peak = pairs[["memory_peak_gib", "memory_peak_gib_bf16"]].max(axis=1)
    retries = pairs[["num_alloc_retries", "num_alloc_retries_bf16"]].max(axis=1)
    pairs = pairs.assign(
        speedup_pct=100 * (speed - 1),
        memory_change_pct=100 * (memory - 1),
        full=(peak > limit) | (retries > 0),
    )
    by_arm = pairs.groupby("arm_key")
    table["speedup_pct"] = by_arm["speedup_pct"].median()
    table["memory_change_pct"] = by_arm["memory_change_pct"].median()
    full = set(pairs.loc[pairs["full"], "arm_key"])
    table["note"] = [_speed_note(row, key in full) for key, row in table.iterrows()]
    return _ordered(table.reset_index()[THROUGHPUT_COLUMNS])


def _speed_note(row: pd.Series, full: bool) -> str:
    if row["device"] == "cpu":
        return "CPU, FP8 emulated"
    notes = []
    if row["stale"]:
        notes.append("does less work per step")
    if full:
        notes.append("memory nearly full")
    if row["precision"] != "bf16" and pd.isna(row["speedup_pct"]):
        notes.append("no BF16 partner")
    return "; ".join(notes)


def _ordered(table: pd.DataFrame) -> pd.DataFrame:
    """Sort by context, BF16 first and stale arms last, and drop nothing."""
    rank = (table["precision"] != "bf16").astype(int) + 2 * table["stale"].fillna(False).astype(int)
    by = ["machine", "study", "model", "setting", "num_gpus"]
    ordered = table.assign(_rank=rank).sort_values([*by, "_rank", "arm"], kind="stable")
    return ordered.drop(columns="_rank").reset_index(drop=True)


def loss_gap_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Compare the final training loss of every arm with BF16, paired by seed.

    Args:
        runs: From `runs_frame`.

    Returns:
        The columns of `LOSS_GAP_COLUMNS`. Losses are means over the last 20 steps, in nats per
        token; ``gap`` is FP8 − BF16, ``gap_pct`` the mean of the gaps relative to BF16.
        ``num_lost`` counts runs of the arm without a pair (failed, diverged, no partner). With
        three pairs or more, the 90 and 95 % paired-t intervals and the verdict of the
        equivalence test at `LOSS_MARGIN_PCT`; with fewer, ``interval`` says so.
    """
    pairs = _pairs(runs, "loss_last20_mean")
    if pairs.empty:
        return pd.DataFrame(columns=LOSS_GAP_COLUMNS)
    started = runs.groupby("arm_key").size()
    rows = []
    for key, group in pairs.groupby("arm_key", sort=False):
        gap = group["loss_last20_mean"] - group["loss_last20_mean_bf16"]
        gap_pct = 100 * gap / group["loss_last20_mean_bf16"]
        row = {name: group[name].iloc[0] for name in _ARM}
        row |= {
            "num_pairs": len(group),
            "num_lost": int(started[key]) - len(group),
            "loss_bf16": group["loss_last20_mean_bf16"].mean(),
            "loss": group["loss_last20_mean"].mean(),
            "gap": gap.mean(),
            "gap_pct": gap_pct.mean(),
        }
        rows.append(row | _intervals(gap_pct.tolist()))
    return _ordered(pd.DataFrame(rows, columns=LOSS_GAP_COLUMNS))


def _intervals(gap_pct: list[float]) -> dict[str, object]:
    if len(gap_pct) < stats.MIN_PAIRS_FOR_INTERVAL:
        count = "one pair" if len(gap_pct) == 1 else f"{len(gap_pct)} pairs"
        return {"interval": f"{count}: no interval", "verdict": "undecided"}
    outcome = stats.tost(gap_pct, LOSS_MARGIN_PCT)
    wide = stats.paired_t_interval(gap_pct, 0.95)
    narrow = outcome.interval
    return {
        "gap_pct_low_90": narrow.low,
        "gap_pct_high_90": narrow.high,
        "gap_pct_low_95": wide.low,
        "gap_pct_high_95": wide.high,
        "interval": f"90 %: {narrow.low:+.2f} to {narrow.high:+.2f} %; "
        f"95 %: {wide.low:+.2f} to {wide.high:+.2f} %",
        "verdict": outcome.verdict,
    }


def document_a_table(runs: pd.DataFrame) -> pd.DataFrame:
    """The arms of document A's single-GPU failure, with what their optimizers did not train.

    Args:
        runs: From `runs_frame`, or a selection of it.

    Returns:
        One row per machine and arm of the studies named ``document-a…``; empty if there is none.
    """
    chosen = runs[runs["study"].fillna("").str.startswith("document-a")]
    columns = ["parameters_outside_optimizer_pct", "loss_start", "loss_last20_mean"]
    identity = ["machine", "device", "study", "model", "master_dtype", "precision", "arm", "stale"]
    chosen = chosen[(chosen["status"] == "completed") & chosen["loss_last20_mean"].notna()]
    groups = chosen.groupby("arm_key", sort=False)
    table = groups[identity].first()
    table["num_runs"] = groups.size()
    table[columns] = groups[columns].mean()
    speed = throughput_table(chosen).set_index("arm_key")
    for name in ("tokens_per_second_per_gpu", "memory_peak_gib", "speedup_pct"):
        table[name] = pd.to_numeric(speed[name].reindex(table.index), errors="coerce")
    # A CPU's tokens per second with emulated FP8 say nothing; leave nothing to be quoted.
    table.loc[table["device"] == "cpu", "tokens_per_second_per_gpu"] = float("nan")
    rank = (table["precision"] != "bf16").astype(int) + table["stale"].fillna(False).astype(int)
    table = table.assign(_rank=rank)
    table = table.sort_values(["machine", "study", "model", "master_dtype", "_rank", "arm"])
    return table.drop(columns="_rank").reset_index()


def provenance_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Say, for each machine and study, where its numbers come from.

    Returns:
        One row per machine, study and installation: hardware, versions, commit, corpus, dates
        and how many runs ended in which status.
    """
    hardware = runs["gpu_name"].fillna(runs["cpu_name"])
    commit = runs["git_commit"].astype("object").map(lambda c: c[:10] if isinstance(c, str) else "")
    dirty = runs["git_dirty"].map(lambda flag: " + uncommitted changes" if flag is True else "")
    frame = runs.assign(
        hardware=hardware,
        commit=commit + dirty,
        corpus_sha=runs["corpus_sha256"].map(lambda h: h[:10] if isinstance(h, str) else ""),
    )
    keys = ["machine", "study", "hardware", "driver", "version_torch", "version_torchao", "commit"]
    keys += ["version_cuda", "version_transformers", "corpus", "corpus_sha"]
    columns = [*keys, "first_run", "last_run", "num_runs", "statuses"]
    rows = []
    for values, group in frame.groupby(keys, dropna=False, sort=False):
        counts = group["status"].value_counts()
        rows.append(
            {
                **dict(zip(keys, values, strict=True)),
                "first_run": str(group["started_at"].min())[:16].replace("T", " "),
                "last_run": str(group["ended_at"].max())[:16].replace("T", " "),
                "num_runs": len(group),
                "statuses": ", ".join(f"{count} {status}" for status, count in counts.items()),
            }
        )
    return pd.DataFrame(rows, columns=columns)


def failures_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Every run that did not complete, with what it says of itself."""
    columns = ["machine", "study", "model", "num_gpus", "arm", "seed", "run_id"]
    columns += ["status", "steps_completed", "status_detail"]
    return runs.loc[runs["status"] != "completed", columns].reset_index(drop=True)


def published_table(path: Path) -> pd.DataFrame:
    """Figures that others published, tokens/s per GPU, with each recipe's lead over BF16.

    Args:
        path: ``published.csv``: source, setting, gpus, and one column per precision.

    Returns:
        The file with ``fp8_tensorwise_pct`` and ``fp8_rowwise_pct``, % over BF16, added.
    """
    table = pd.read_csv(path)
    for recipe in ("fp8_tensorwise", "fp8_rowwise"):
        table[f"{recipe}_pct"] = 100 * (table[recipe] / table["bf16"] - 1)
    return table


def data_table(runs: pd.DataFrame) -> pd.DataFrame:
    """How much of which corpus the runs of each study saw."""
    keys = ["machine", "study", "corpus"]
    seen = runs[runs["num_tokens_seen"].notna()]
    return (
        seen.groupby(keys, sort=False)
        .agg(
            num_train_tokens=("num_train_tokens", "max"),
            tokens_seen_max=("num_tokens_seen", "max"),
            epochs_max=("epochs", "max"),
            num_seeds=("seed", "nunique"),
        )
        .reset_index()
    )
