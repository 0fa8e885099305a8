"""The tables of the report: every number that it shows is computed here from run records.

A run whose optimizer holds stale parameters keeps the words "stale optimizer (x % of parameters
not trained)" in its ``arm`` in every table, so that it is never taken for an FP8 speed-up or
loss gap. CPU runs emulate FP8: they get no speed-up at all.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Literal

import pandas as pd

from fp8study import stats
from fp8study.frames import METRIC_COLUMNS, RUN_COLUMNS, metrics_frame, runs_frame
from fp8study.inventory import data_table, failures_table, provenance_table, published_table
from fp8study.power import smallest_detectable
from fp8study.records import RESULTS
from fp8study.startup import PARTS
from fp8study.studies import LOSS_MARGIN_PCT

__all__ = [
    "LOSS_MARGIN_PCT",
    "METRIC_COLUMNS",
    "RUN_COLUMNS",
    "data_table",
    "document_a_table",
    "failures_table",
    "loss_gap_table",
    "metrics_frame",
    "newest_per_seed",
    "paired_losses",
    "provenance_table",
    "published_table",
    "runs_frame",
    "shorten_arms",
    "throughput_table",
    "timing_is_void",
]

#: Their few steps are there to be timed: what their losses are says nothing.
SPEED_STUDIES = (
    "bench", "bench-cpu", "beside-torchtitan", "beside-torchtitan-fsdp", "best-batch",
    "small-products", "tuned-switches",
)  # fmt: skip
#: They plant faults or repeat them, at a learning rate of 1e-5.
FAILURE_STUDIES = ("attribution", "corner-arms", "document-a")
#: Above this share of the GPU's memory, time spent in the allocator can pass for a speed-up, where
#: the record does not count what the allocator did.
MEMORY_LIMIT_SHARE = 0.85
#: Events in the timed window that void a timing.
ALLOCATOR_EVENTS = ("num_alloc_retries", "num_device_allocs")
#: The verdict on an arm that lost seeds by diverging: those that are left are not a fair sample.
DIVERGED = "diverged"
#: The note of a run that came near the limit; its speed is compared with nothing.
MEMORY_FULL = "memory nearly full"

_CONTEXT = ["machine", "device", "gpu_name", "study", "model", "strategy", "num_gpus", "setting"]
_ARM = [*_CONTEXT, "path", "precision", "arm", "stale", "arm_key"]
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
    *_ARM,
    "num_runs",
    *_MEASURED,
    "speedup_pct",
    "memory_change_pct",
    "note",
]
#: What an FP8 run says of the layers that it keeps out of FP8, inside its ``arm``.
_SKIPS = r", skips ([^,]*)"

LOSS_GAP_COLUMNS = [
    *_ARM,
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


def shorten_arms(runs: pd.DataFrame) -> pd.DataFrame:
    """Leave out of the arms' names what tells no two of them apart.

    When a BF16 run made its optimizer says nothing: nothing is converted. Which layers stay out
    of FP8 is said once per study, if all of its FP8 runs agree.

    Args:
        runs: From `runs_frame`.

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
        runs: From `runs_frame`, or a selection of it.
    """
    results = runs[runs["status"].isin(RESULTS)].sort_values(
        ["repeat", "ended_at"],
        ascending=[False, True],
        kind="stable",
        key=lambda column: column.fillna(0) if column.name == "repeat" else column,
    )
    newest = results.drop_duplicates(["arm_key", "pair_key"], keep="last")
    return runs[runs.index.isin(newest.index)]


def _pairs(runs: pd.DataFrame, value: str) -> pd.DataFrame:
    """Give every FP8 run the `value` of the BF16 run that differs in precision alone.

    Each seed of an arm counts once, see `newest_per_seed`.

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
        runs: From `runs_frame`.

    Returns:
        The columns of `runs_frame`, and of the partner ``run_id_bf16``, ``loss_last20_mean_bf16``,
        ``memory_peak_gib_bf16`` and ``num_alloc_retries_bf16``.
    """
    return _pairs(runs, "loss_last20_mean")


def _diverged_alone(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the FP8 runs that diverged where the BF16 run of the same seed did not."""
    newest = newest_per_seed(runs)
    sound = (newest["status"] == "completed") & newest["loss_last20_mean"].notna()
    healthy = ~newest["stale"].fillna(False).astype(bool)
    baseline = newest.loc[sound & healthy & (newest["precision"] == "bf16"), "pair_key"]
    gone = newest[(newest["status"] == "diverged") & (newest["precision"] != "bf16")]
    return gone[gone["pair_key"].isin(set(baseline))]


def throughput_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Speed and memory by arm: the median over seeds, of each the median over its repeats.

    Args:
        runs: From `runs_frame`.

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
    table = groups[[name for name in _ARM if name != "arm_key"]].first()
    table["num_runs"] = groups["num_repeats"].sum()
    table[_MEASURED] = groups[_MEASURED].median()
    pairs = _pairs(timed, "tokens_per_second_per_gpu")
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

    What was measured is the median over the seed's repeats, ``num_repeats`` is their number, and
    the allocator's events are the most of any.
    """
    timed = runs[(runs["status"] == "completed") & runs["tokens_per_second_per_gpu"].notna()]
    seed, events = ["arm_key", "pair_key"], list(ALLOCATOR_EVENTS)
    each = timed.sort_values("ended_at", kind="stable").drop_duplicates(
        [*seed, "repeat"], keep="last"
    )
    repeats = each.groupby(seed, sort=False)
    measured = repeats[_MEASURED].median().join(repeats[events].max())
    measured["num_repeats"] = repeats.size()
    first = newest_per_seed(each)
    kept = first.drop(columns=[*_MEASURED, *events])
    return kept.merge(measured.reset_index(), on=seed, how="left", validate="one_to_one")


def timing_is_void(runs: pd.DataFrame, suffix: str = "") -> pd.Series:
    """Tell the runs whose timings may be the allocator's.

    Those in which it had to retry, or took memory from the driver, inside the timed window; of
    older records, which do not count the second, those that nearly filled the GPU's memory.

    Args:
        runs: From `runs_frame`.
        suffix: End of the names of the columns to look at.
    """
    limit = MEMORY_LIMIT_SHARE * runs["gpu_memory_gib"]
    retries, allocs = (runs[f"{name}{suffix}"] for name in ALLOCATOR_EVENTS)
    unknown = allocs.isna() & (runs[f"memory_peak_gib{suffix}"] > limit)
    return unknown | (retries > 0) | (allocs > 0)


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


def ordered(table: pd.DataFrame) -> pd.DataFrame:
    """Sort by context, BF16 first and stale arms last, and drop nothing.

    The studies of document A's failure come last: nobody would use their setting.
    """
    rank = (table["precision"] != "bf16").astype(int) + 2 * table["stale"].fillna(False).astype(int)
    last = table["study"].fillna("").str.startswith(FAILURE_STUDIES)
    by = ["machine", "_last", "study", "model", "setting", "num_gpus", "_rank", "arm"]
    ordered = table.assign(_rank=rank, _last=last).sort_values(by, kind="stable")
    return ordered.drop(columns=["_rank", "_last"]).reset_index(drop=True)


def loss_gap_table(
    runs: pd.DataFrame,
    margins: Mapping[str, float] | None = None,
    loss: Literal["loss_last20_mean", "validation_loss"] = "loss_last20_mean",
) -> pd.DataFrame:
    """Compare the final loss of every arm with BF16, paired by seed.

    Args:
        runs: From `runs_frame`.
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
    runs = runs[~runs["study"].isin(SPEED_STUDIES)]
    if loss == "validation_loss":
        runs = runs[runs["validation_sequences"].fillna(0) > 0]
    pairs, gone = _pairs(runs, loss), _diverged_alone(runs)
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
        row = {name: first[name] for name in _ARM}
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


def document_a_table(runs: pd.DataFrame, study: str = "document-a") -> pd.DataFrame:
    """The arms of document A's single-GPU failure, with what their optimizers did not train.

    Args:
        runs: From `runs_frame`, or a selection of it.
        study: Beginning of the names of the studies to show.

    Returns:
        One row per machine and arm of those studies; empty if there is none.
    """
    chosen = newest_per_seed(runs[runs["study"].fillna("").str.startswith(study)])
    columns = ["parameters_outside_optimizer_pct", "loss_start", "loss_last20_mean"]
    identity = ["machine", "device", "study", "model", "master_dtype", "precision", "arm", "stale"]
    chosen = chosen[(chosen["status"] == "completed") & chosen["loss_last20_mean"].notna()]
    groups = chosen.groupby("arm_key", sort=False)
    table = groups[identity].first()
    table["num_runs"] = groups.size()
    table["masters"] = table["master_dtype"].str.upper()
    table[columns] = groups[columns].mean()
    speed = throughput_table(chosen).set_index("arm_key")
    for name in (
        "tokens_per_second_per_gpu", "memory_peak_gib", "speedup_pct", "memory_change_pct",
    ):  # fmt: skip
        table[name] = pd.to_numeric(speed[name].reindex(table.index), errors="coerce")
    # A CPU's tokens per second with emulated FP8 say nothing; leave nothing to be quoted.
    table.loc[table["device"] == "cpu", "tokens_per_second_per_gpu"] = float("nan")
    rank = (table["precision"] != "bf16").astype(int) + table["stale"].fillna(False).astype(int)
    table = table.assign(_rank=rank)
    table = table.sort_values(["machine", "study", "model", "master_dtype", "_rank", "arm"])
    return table.drop(columns="_rank").reset_index()
