"""How far FP8's losses are from BF16's, paired by seed, and what may be concluded.

At the end of training, along the way, where each pass over the corpus ends, and by effective batch.
What a gap is to be held against is in `fp8study.analysis.floors`.

Every table is made of rows of `fp8study.analysis.runs.frames.runs_frame`. Gaps are FP8 − BF16, in
% of the BF16 loss; runs of studies that only ask for speed have none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import pandas as pd

from fp8study.analysis import stats
from fp8study.analysis.runs.frames import PLACE
from fp8study.analysis.runs.naming import SCHEDULED
from fp8study.analysis.runs.pairing import (
    ARM,
    DIVERGED,
    diverged_alone,
    healthy,
    newest_per_seed,
    ordered,
    paired_losses,
    pairs_of,
    together,
)
from fp8study.core.records import MIN_PAIRS_FOR_INTERVAL

#: BF16's loss is to end so far below what the tokens' frequencies alone give; in % of that.
LEAST_LEARNT_PCT = 1.0
#: Logged steps in the running mean of a loss.
SMOOTHING_STEPS = 20

LOSS_GAP_COLUMNS = [
    *ARM, "num_pairs", "num_lost", "pairs", "epochs", "num_diverged", "loss_bf16", "loss",
    "learnt_pct", "gap", "gap_pct", "gap_pct_low_90", "gap_pct_high_90", "gap_pct_low_95",
    "gap_pct_high_95", "p_value", "p_holm", "detectable_pct", "margin_pct", "judged",
    "verdict", "swept", "run_ids",
]  # fmt: skip
_PLACE = ["machine", "study", "model", "num_gpus", "setting"]
SPREAD_COLUMNS = [*_PLACE, "step", "num_seeds", "spread_pct"]
_PASS_PLACE = [*_PLACE, "arm", "precision", "arm_key"]
_JUDGED = ["low_95", "high_95", "margin_pct", "verdict", "run_ids"]
PASS_COLUMNS = [*_PASS_PLACE, "passes", "step", "num_pairs", "gap_pct", *_JUDGED]
_USUAL_STATE = "fp32"
FORMAT_COLUMNS = [
    "machine", "device", "study", "model", "setting", "precision", "optimizer_state", "num_pairs",
    "num_diverged", "gap_pct", *_JUDGED, "memory_change_pct",
]  # fmt: skip
#: Their product is the effective batch.
COUNTS = ["num_gpus", "micro_batch_size", "gradient_accumulation_steps"]
WAYS_COLUMNS = [
    "machine", "study", "model", "precision", "effective_batch", "way", "other_way", "num_pairs",
    "difference_pct", *_JUDGED,
]  # fmt: skip


def loss_gap_table(
    runs: pd.DataFrame,
    loss: Literal["loss_last20_mean", "validation_loss"] = "loss_last20_mean",
) -> pd.DataFrame:
    """Compare the final loss of every arm with BF16, paired by seed.

    The columns of `LOSS_GAP_COLUMNS`. Losses are in nats per token: on what was trained on, the
    mean over the last 20 steps, or on what was not; ``learnt_pct`` is how far BF16's is below what
    the tokens' frequencies alone give, in % of that; ``gap`` is FP8 − BF16, ``gap_pct`` the mean of
    the gaps relative to BF16, ``epochs`` how often the corpus was seen at most. ``num_pairs``
    counts seeds with a pair, ``num_lost`` the arm's seeds without one (failed, diverged, no
    partner), and ``num_diverged`` those of them that diverged where BF16 did not; ``pairs`` says
    the first two in words. From three pairs on there are intervals, p-values and the verdict at
    ``margin_pct`` of `stats.judged`; ``p_holm`` is adjusted over the arms of a study that are not
    stale. An arm that diverged alone is called `DIVERGED` instead, however close its other seeds
    are, and has a row even if no seed is left. ``judged`` is the verdict, with the seeds that
    diverged, or why there is none. ``swept``: see `comparisons`.
    """
    runs = runs[~runs["speed_only"]]
    if loss == "validation_loss":
        runs = runs[runs["validation_sequences"].fillna(0) > 0]
    pairs, gone = pairs_of(runs, loss), diverged_alone(runs)
    # What failed early does not know yet what it was to train on.
    unknown = runs["corpus_sha256"].isna() | runs["num_parameters"].isna()
    rows = []
    for key in dict.fromkeys([*pairs["arm_key"], *gone["arm_key"]]):
        group, lone = pairs[pairs["arm_key"] == key], gone[gone["arm_key"] == key]
        first = (group if len(group) else lone).iloc[0]
        asked = unknown & (runs["asked_key"] == first["asked_key"])
        seeds = set(runs.loc[(runs["arm_key"] == key) | asked, "seed"].dropna())
        rows.append({name: first[name] for name in ARM} | _gap_row(group, loss, seeds, lone))
    table = pd.DataFrame(rows, columns=LOSS_GAP_COLUMNS)
    if table.empty:
        return table
    alike = runs.groupby([name for name in ARM if name != "arm_key"], dropna=False)
    is_swept = alike["learning_rate"].transform("nunique") > 2
    few = table["num_pairs"] + table["num_diverged"] < MIN_PAIRS_FOR_INTERVAL
    table["swept"] = few & table["arm_key"].isin(set(runs.loc[is_swept, "arm_key"]))
    p_holm = stats.adjusted(healthy(table), ["machine", "study", "model"])
    return ordered(table.assign(p_holm=p_holm))


def unswept(gaps: pd.DataFrame) -> pd.DataFrame:
    """Leave out ``swept``: one of three learning rates or more, with too few seeds to be judged."""
    return gaps[~gaps["swept"].astype(bool)]


def says_nothing(gaps: pd.DataFrame) -> pd.Series:
    """Whether BF16 itself learnt less than the least, and FP8 still ended no worse."""
    worse = gaps["verdict"].isin([DIVERGED, "different"]) & ~gaps["gap_pct"].lt(0)
    return gaps["learnt_pct"].lt(LEAST_LEARNT_PCT) & ~worse


def with_pairs(gaps: pd.DataFrame) -> pd.DataFrame:
    """Keep the arms that an interval can be given of, or that diverged."""
    return gaps[(gaps["num_pairs"] >= MIN_PAIRS_FOR_INTERVAL) | (gaps["verdict"] == DIVERGED)]


def comparisons(gaps: pd.DataFrame) -> pd.DataFrame:
    """Leave out what `unswept` does, what `says_nothing`, and arms that train steps in BF16."""
    return unswept(gaps[~says_nothing(gaps) & ~gaps["arm"].str.contains(SCHEDULED)])


def formats_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Compare every format with BF16 and usual optimizer states, paired by seed.

    Of the studies with FP16 runs, or with optimizer states narrower than the weights: the columns
    of `FORMAT_COLUMNS`, one row per arm. ``gap_pct`` is the mean over seeds of the final training
    losses' gap to the run in BF16 with FP32 states (or the weights' own), with the interval and the
    verdict of `stats.judged`; an arm of which a seed diverged is called `DIVERGED`.
    ``memory_change_pct`` is of the peaks, where both were measured.
    """
    newest = newest_per_seed(healthy(runs[~runs["speed_only"]]))
    newest = newest.assign(optimizer_state=newest["optimizer_state"].fillna(_USUAL_STATE))
    is_other = newest["optimizer_state"].ne(_USUAL_STATE) | newest["precision"].eq("fp16")
    newest = newest[newest["study"].isin(set(newest.loc[is_other, "study"]))]
    is_base = newest["precision"].eq("bf16") & newest["optimizer_state"].eq(_USUAL_STATE)
    measured = ["loss_last20_mean", "memory_peak_gib", "run_ids"]
    done = newest[is_base & newest["loss_last20_mean"].notna()].drop_duplicates("format_key")
    base = done.set_index("format_key")[measured].add_suffix("_base")
    both = newest[~is_base].join(base, on="format_key", how="inner")
    both["gap_pct"] = 100 * (both["loss_last20_mean"] / both["loss_last20_mean_base"] - 1)
    both["memory_change_pct"] = 100 * (both["memory_peak_gib"] / both["memory_peak_gib_base"] - 1)
    both["run_ids"] += " " + both["run_ids_base"]
    both["diverged"] = both["status"] == "diverged"
    rows = []
    for _, group in both.groupby("arm_key", sort=False):
        row = {name: group[name].iloc[0] for name in FORMAT_COLUMNS[:7]}
        gaps = group.loc[~group["diverged"], "gap_pct"].dropna().tolist()
        row |= judged_pairs(gaps, group, "gap_pct") | {"num_diverged": group["diverged"].sum()}
        rows.append(row | {"memory_change_pct": group["memory_change_pct"].median()})
    return pd.DataFrame(rows, columns=FORMAT_COLUMNS)


def _gap_row(
    group: pd.DataFrame, loss: str, seeds: set[int], diverged: pd.DataFrame
) -> dict[str, object]:
    """Return what one arm's row says: of its pairs, the seeds started and those that diverged."""
    gap = group[loss] - group[f"{loss}_bf16"]
    gap_pct = 100 * gap / group[f"{loss}_bf16"]
    margin = float((group if len(group) else diverged)["margin_pct"].iloc[0])
    found = stats.judged(gap_pct.tolist(), margin, "gap_pct")
    num_pairs, num_lost = len(group), len(seeds - set(group["seed"]))
    judged = found["verdict"]
    if len(diverged):
        judged = f"diverged in {len(diverged)} of {num_pairs + len(diverged)} seeds"
    elif math.isnan(margin):
        judged = "none: its runs state several margins"
    ends = {f"gap_pct_{end}": found[end] for end in ("low_90", "high_90", "low_95", "high_95")}
    return (
        found
        | ends
        | {
            "num_lost": num_lost,
            "pairs": f"{num_pairs} of {num_pairs + num_lost}" if num_lost else str(num_pairs),
            "num_diverged": len(diverged),
            "epochs": group["epochs"].max(),
            "loss_bf16": group[f"{loss}_bf16"].mean(),
            "loss": group[loss].mean(),
            "learnt_pct": (100 * (1 - group[f"{loss}_bf16"] / group["unigram_loss"])).mean(),
            "gap": gap.mean(),
            "margin_pct": margin,
            "judged": judged,
            "verdict": DIVERGED if len(diverged) else found["verdict"],
            "run_ids": together([*group["run_ids"], *diverged["run_ids"]]),
        }
    )


def asked_on_gpus(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs on GPUs whose losses are asked about."""
    return runs[~runs["speed_only"] & (runs["device"] == "cuda")]


def healthy_pairs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the pairs of `asked_on_gpus`, both runs of which train all."""
    return healthy(paired_losses(asked_on_gpus(runs)))


def effective_batch_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the healthy loss gaps of the studies named ``effective-batch…``.

    The columns of `LOSS_GAP_COLUMNS`, and ``effective_batch`` (sequences per optimizer step) and
    the ``way`` that it was reached: GPUs, micro-batch, accumulation.
    """
    chosen = runs[runs["study"].str.startswith("effective-batch")]
    gaps = healthy(loss_gap_table(chosen)).reset_index(drop=True)
    by_arm = chosen.drop_duplicates("arm_key").set_index("arm_key")
    return _with_ways(gaps, by_arm.reindex(gaps["arm_key"])).sort_values(
        ["machine", "model", "arm", "effective_batch", "way"], kind="stable"
    )


def ways_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Compare the healthy gaps of every two ways to one effective batch, paired by seed.

    ``difference_pct`` is the mean over seeds of the first way's gap less the second's. Only with
    three seeds or more in both. The columns of `WAYS_COLUMNS`.
    """
    pairs = healthy_pairs(runs[runs["study"].str.startswith("effective-batch")])
    base = pairs["loss_last20_mean_bf16"]
    pairs = _with_ways(pairs.assign(gap_pct=100 * (pairs["loss_last20_mean"] - base) / base), pairs)
    rows = []
    place = ["machine", "study", "model", "precision", "effective_batch"]
    for key, group in pairs.groupby(place, sort=True):
        wide = group.pivot_table(index="seed", columns="way", values="gap_pct")
        for one, other in itertools.combinations(wide.columns, 2):
            apart = (wide[one] - wide[other]).dropna().tolist()
            if len(apart) >= MIN_PAIRS_FOR_INTERVAL:
                row = dict(zip(WAYS_COLUMNS, (*key, one, other), strict=False))
                both = group[group["way"].isin([one, other])]
                rows.append(row | judged_pairs(apart, both, "difference_pct"))
    return pd.DataFrame(rows, columns=WAYS_COLUMNS)


def _with_ways(table: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Add the effective batch and the way to it, from rows of runs in the same order."""
    counts = runs[COUNTS].astype(float).to_numpy()
    names = ("GPUs", "micro-batch", "accumulation")
    ways = [
        " and ".join(name for name, n in zip(names, row, strict=True) if n > 1) or "one sequence"
        for row in counts
    ]
    return table.assign(effective_batch=counts.prod(axis=1), way=ways)


def judged_pairs(gaps: Sequence[float], pairs: pd.DataFrame, mean: str) -> dict[str, Any]:
    """Return `stats.judged` of the gaps of an arm's pairs, with their margin and ids.

    However close the seeds that are left, an arm of which one ``diverged`` is called `DIVERGED`.
    """
    margin = stats.agreed(pairs["margin_pct"])
    found = stats.judged(gaps, margin, mean)
    found |= {"margin_pct": margin, "run_ids": together(pairs["run_ids"].unique())}
    return found | ({"verdict": DIVERGED} if pairs["diverged"].any() else {})


def gap_curves(metrics: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return every healthy pair on a GPU at each step that both runs logged.

    Its ``gap_pct`` there is that of the means of the last `SMOOTHING_STEPS` logged steps.
    """
    ours = smoothed(metrics)
    theirs = ours.rename(columns={"run_id": "run_id_bf16", "smooth": "smooth_bf16"})
    both = healthy_pairs(runs).merge(ours, on=PLACE)
    both = both.merge(theirs, on=["machine", "study", "run_id_bf16", "step"])
    gap = both["smooth"] - both["smooth_bf16"]
    return both.assign(gap_pct=100 * gap / both["smooth_bf16"])


def seed_spread(metrics: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return how far BF16 runs with different seeds are apart, step by step.

    ``spread_pct`` is the standard deviation over seeds of the smoothed BF16 loss, in % of its
    mean. Arms of one seed have no row. The columns of `SPREAD_COLUMNS`.
    """
    newest = newest_per_seed(runs[~runs["speed_only"]])
    bf16 = newest[(newest["precision"] == "bf16") & (newest["status"] == "completed")]
    curves = healthy(bf16[bf16["device"] == "cuda"]).merge(smoothed(metrics), on=PLACE)
    seeds = curves.groupby("arm_key")["run_id"].transform("nunique").rename("num_seeds")
    steps = curves.groupby([*_PLACE, "arm_key", seeds, "step"], sort=False)["smooth"]
    found = steps.agg(["size", "mean", "std"]).reset_index()
    shared = found[(found["size"] == found["num_seeds"]) & (found["num_seeds"] > 1)]
    return shared.assign(spread_pct=100 * shared["std"] / shared["mean"])[SPREAD_COLUMNS]


def smoothed(metrics: pd.DataFrame) -> pd.DataFrame:
    """Return the running mean of each run's loss, ``smooth``, by step."""
    smooth = metrics.groupby(PLACE, sort=False)["loss"].rolling(SMOOTHING_STEPS).mean()
    curves = metrics.assign(smooth=smooth.droplevel([*PLACE]))
    return curves[[*PLACE, "step", "smooth"]].dropna(subset="smooth")


def pass_table(metrics: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Judge the healthy loss gap on GPUs where each pass over the corpus ends, and at the end.

    In the first pass a step's loss is on text that the model has never seen; later also a matter
    of what it remembers: a gap that begins with the second pass is another finding.

    The columns of `PASS_COLUMNS`, of arms that trained for two passes or more and have three pairs:
    ``passes`` over the corpus until ``step``, ``gap_pct`` the mean over seeds of the smoothed gaps
    there, with the interval and the verdict of `stats.judged`.
    """
    rows = []
    for _, group in gap_curves(metrics, runs).groupby("arm_key", sort=False):
        first = group.iloc[0]
        again = passes_by(first, int(first["steps_completed"])) >= 2
        if not again or group["run_id"].nunique() < MIN_PAIRS_FOR_INTERVAL:
            continue
        for passes, step in _pass_ends(first):
            upto = group[group["step"] <= step].groupby("run_id", sort=False)["gap_pct"]
            if gaps := upto.last().tolist():
                row = {name: first[name] for name in _PASS_PLACE} | {"passes": passes, "step": step}
                rows.append(row | judged_pairs(gaps, group, "gap_pct"))
    return pd.DataFrame(rows, columns=PASS_COLUMNS)


def passes_by(run: pd.Series, num_steps: int) -> float:
    """Return how often a run had seen its corpus's blocks by a step; NaN if it is not known."""
    blocks = run["num_train_tokens"] // run["sequence_length"]
    blocks -= 0 if pd.isna(run["validation_sequences"]) else run["validation_sequences"]
    per_step = math.prod(run[name] for name in COUNTS)
    known = not pd.isna(blocks) and not pd.isna(per_step) and blocks > 0
    return float(num_steps * per_step / blocks) if known else math.nan


def _pass_ends(run: pd.Series) -> list[tuple[float, int]]:
    """Return the last step that lies wholly in each pass, and the last of all."""
    num_steps = int(run["steps_completed"])
    last = passes_by(run, num_steps)
    whole = [(float(n), math.floor(n * num_steps / last + 1e-9)) for n in range(1, int(last) + 1)]
    return [end for end in whole if end[1] < num_steps] + [(last, num_steps)]
