"""Which runs belong together: arms, repeats of a seed, and FP8 runs with their BF16 partners."""

from __future__ import annotations

import pandas as pd

from fp8study.core.records import RESULTS

#: They plant faults or repeat them, at a learning rate of 1e-5.
FAILURE_STUDIES = ("attribution", "corner-arms", "document-a")
#: Above this share of the GPU's memory, time spent in the allocator can pass for a speed-up, where
#: the record does not count what the allocator did.
MEMORY_LIMIT_SHARE = 0.85
#: Events in the timed window that void a timing.
ALLOCATOR_EVENTS = ("num_alloc_retries", "num_device_allocs")
#: The verdict on an arm that lost seeds by diverging: those that are left are not a fair sample.
DIVERGED = "diverged"
#: Where a comparison was made.
_CONTEXT = ["machine", "device", "gpu_name", "study", "model", "strategy", "num_gpus", "setting"]
#: What names an arm in a table.
ARM = [*_CONTEXT, "path", "precision", "arm", "stale", "arm_key"]
#: What an FP8 run says of the layers that it keeps out of FP8, inside its ``arm``.
_SKIPS = r", skips ([^,]*)"


def shorten_arms(runs: pd.DataFrame) -> pd.DataFrame:
    """Leave out of the arms' names what tells no two of them apart.

    When a BF16 run made its optimizer says nothing: nothing is converted. Which layers stay out
    of FP8 is said once per study, if all of its FP8 runs agree.

    Args:
        runs: From `fp8study.analysis.tables.runs_frame`.

    Returns:
        The same rows with shorter names in ``arm``, and with ``kept_in_bf16``: the layers that
        were taken out of the name, missing elsewhere.
    """
    arm = runs["arm"].astype(object)
    is_bf16 = runs["precision"] == "bf16"
    arm = arm.where(~is_bf16, arm.str.removesuffix(", optimizer made before conversion"))
    kept = arm.str.extract(_SKIPS, expand=False).astype(object)
    agreed = kept[~is_bf16].fillna("").groupby(runs["study"]).nunique() == 1
    shorten = kept.notna() & runs["study"].map(agreed).eq(True)
    short = arm.str.replace(_SKIPS, "", regex=True)
    return runs.assign(arm=arm.where(~shorten, short), kept_in_bf16=kept.where(shorten, None))


def newest_per_seed(runs: pd.DataFrame) -> pd.DataFrame:
    """Keep the newest result of every seed of an arm: a repeat is no further seed.

    Of repeats it is the first that counts, whichever was done last.

    Args:
        runs: From `fp8study.analysis.tables.runs_frame`, or a selection of it.
    """
    results = runs[runs["status"].isin(RESULTS)].sort_values(
        ["repeat", "ended_at"],
        ascending=[False, True],
        kind="stable",
        key=lambda column: column.fillna(0) if column.name == "repeat" else column,
    )
    newest = results.drop_duplicates(["arm_key", "pair_key"], keep="last")
    return runs[runs.index.isin(newest.index)]


def pairs_of(runs: pd.DataFrame, value: str) -> pd.DataFrame:
    """Give every FP8 run the `value` of the BF16 run that differs in precision alone.

    Each seed of an arm counts once, see `newest_per_seed`.

    Args:
        runs: From `fp8study.analysis.tables.runs_frame`.
        value: A column that both must have.

    Returns:
        The FP8 rows that have a partner, with the partner's name, value, peak memory and
        allocator retries in columns that end in ``_bf16``.
    """
    newest = newest_per_seed(runs)
    usable = newest[(newest["status"] == "completed") & newest[value].notna()]
    baseline = (
        usable[(usable["precision"] == "bf16") & ~usable["stale"].fillna(False)]
        .sort_values("ended_at", kind="stable")
        .drop_duplicates("pair_key", keep="last")
        .set_index("pair_key")[["run_id", value, "memory_peak_gib", *ALLOCATOR_EVENTS]]
        .add_suffix("_bf16")
    )
    return usable[usable["precision"] != "bf16"].merge(baseline, on="pair_key", how="inner")


def paired_losses(runs: pd.DataFrame) -> pd.DataFrame:
    """Return every FP8 run that has a BF16 partner, stale ones too, one row per pair.

    Args:
        runs: From `fp8study.analysis.tables.runs_frame`.

    Returns:
        The columns of `fp8study.analysis.tables.runs_frame`, and of the partner ``run_id_bf16``,
        ``loss_last20_mean_bf16``, ``memory_peak_gib_bf16`` and ``num_alloc_retries_bf16``.
    """
    return pairs_of(runs, "loss_last20_mean")


def diverged_alone(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the FP8 runs that diverged where the BF16 run of the same seed did not."""
    newest = newest_per_seed(runs)
    sound = (newest["status"] == "completed") & newest["loss_last20_mean"].notna()
    healthy = ~newest["stale"].fillna(False).astype(bool)
    baseline = newest.loc[sound & healthy & (newest["precision"] == "bf16"), "pair_key"]
    gone = newest[(newest["status"] == "diverged") & (newest["precision"] != "bf16")]
    return gone[gone["pair_key"].isin(set(baseline))]


def timing_is_void(runs: pd.DataFrame, suffix: str = "") -> pd.Series:
    """Tell the runs whose timings may be the allocator's.

    Those in which it had to retry, or took memory from the driver, inside the timed window; of
    older records, which do not count the second, those that nearly filled the GPU's memory.

    Args:
        runs: From `fp8study.analysis.tables.runs_frame`.
        suffix: End of the names of the columns to look at.
    """
    limit = MEMORY_LIMIT_SHARE * runs["gpu_memory_gib"]
    retries, allocs = (runs[f"{name}{suffix}"] for name in ALLOCATOR_EVENTS)
    unknown = allocs.isna() & (runs[f"memory_peak_gib{suffix}"] > limit)
    return unknown | (retries > 0) | (allocs > 0)


def ordered(table: pd.DataFrame) -> pd.DataFrame:
    """Sort by context, BF16 first and stale arms last, and drop nothing.

    The studies of document A's failure come last: nobody would use their setting.
    """
    rank = (table["precision"] != "bf16").astype(int) + 2 * table["stale"].fillna(False).astype(int)
    last = table["study"].fillna("").str.startswith(FAILURE_STUDIES)
    by = ["machine", "_last", "study", "model", "setting", "num_gpus", "_rank", "arm"]
    ordered = table.assign(_rank=rank, _last=last).sort_values(by, kind="stable")
    return ordered.drop(columns=["_rank", "_last"]).reset_index(drop=True)
