"""How far apart runs end that compute the same: the floor that a precision is held against.

A cost of FP8 means little below the spread of the seeds, and nothing below that of the same run
done again, or of other kernels that are as exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

import pandas as pd

from fp8study.analysis import stats
from fp8study.analysis.losses import asked_on_gpus, healthy_pairs, judged_pairs
from fp8study.analysis.runs.frames import PLACE, place_of
from fp8study.analysis.runs.naming import FROM_WEIGHTS, PRECISION_LABELS
from fp8study.analysis.runs.pairing import goes_on, healthy, in_fp8, newest_per_seed, paired_losses
from fp8study.core.audit_rules import LOSS_RISE
from fp8study.core.records import LOSS_MARGIN_PCT, MIN_PAIRS_FOR_INTERVAL, StoredRun

AGAIN = "the same run again"
KERNELS = "other kernels"
_FLOORS = (AGAIN, KERNELS)
SEED = "another seed"
FAULT = "stale optimizer"

LADDER_COLUMNS = ["machine", "study", "model", "rung", "precision", "difference_pct",
                  "run_ids"]  # fmt: skip
_PLACE = ["machine", "study", "model", "num_gpus", "setting", "arm", "precision"]
CURVE_COLUMNS = [
    *_PLACE, "rung", "step", "num_pairs", "gap_pct", "low_95", "high_95", "margin_pct", "verdict",
    "run_ids",
]  # fmt: skip
_POOL = ["study", "model", "num_gpus", "learning_rate", "num_steps"]
POOLED_COLUMNS = [
    *_POOL, "what", "precision", "machines", "num_runs", "epochs", "num_pairs", "gap_pct",
    "size_pct", "low_90", "high_90", "low_95", "high_95", "margin_pct", "verdict", "run_ids",
]  # fmt: skip
SCATTER_COLUMNS = [
    "model", "learning_rate", "lr_warmup_steps", "starts_from", "num_arms", "num_pairs",
    "scatter_pct", "num_risen", "num_runs", "num_to_decide", "run_ids",
]  # fmt: skip
#: The weights that runs started from, as `scatter_table` says.
RANDOM, TRAINED = "random", "trained"


def _usable(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of `asked_on_gpus` that completed and train all."""
    asked = asked_on_gpus(runs)
    done = (asked["status"] == "completed") & asked["loss_last20_mean"].notna()
    return healthy(asked[done])


def reruns(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the repeats of a seed, each with the first one's run_id and loss (``…_base``)."""
    usable = _usable(runs)
    first = newest_per_seed(usable)
    return _joined(usable[~usable.index.isin(first.index)], first, ["arm_key", "pair_key"])


def kernel_pairs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return BF16 runs by other kernels than those of the BF16 arm that FP8 is compared with.

    Each with that arm's run_id and loss of its seed (``…_base``): they differ in attention or
    compilation alone.
    """
    newest = newest_per_seed(_usable(runs))
    bf16, fp8 = newest[newest["precision"] == "bf16"], newest[in_fp8(newest)]
    compared = bf16.loc[bf16["pair_key"].isin(set(fp8["pair_key"])), "arm_key"]
    is_base = bf16["arm_key"].isin(set(compared))
    return _joined(bf16[~is_base], bf16[is_base], ["kernel_key"])


def _joined(runs: pd.DataFrame, base: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    theirs = base.drop_duplicates(keys).set_index(keys)[["run_id", "run_ids", "loss_last20_mean"]]
    pairs = runs.join(theirs.add_suffix("_base"), on=keys, how="inner")
    pairs["run_ids"] += " " + pairs.pop("run_ids_base")
    return pairs


def ladder_table(runs: pd.DataFrame) -> pd.DataFrame:
    """List the differences in final loss of every two runs that one thing tells apart.

    The columns of `LADDER_COLUMNS`, one row per pair: ``rung`` is `AGAIN`, `KERNELS`, `SEED` (both
    of BF16 arms), a precision (against BF16, same seed) or `FAULT` (stale FP8 against BF16), and
    ``difference_pct`` the absolute difference in % of the loss. Only machines, studies and models
    with two runs of one arm, whose noise is known; runs on a CPU are left out, and so are studies
    of speed alone, whose few steps end anywhere.
    """
    usable = _usable(runs)
    newest = newest_per_seed(usable)
    bf16 = newest[newest["precision"] == "bf16"]
    noise = [*_apart(usable, ["arm_key", "pair_key"], AGAIN), *_apart(bf16, ["arm_key"], SEED)]
    pairs = paired_losses(asked_on_gpus(runs))
    rungs = pairs["precision"].map(PRECISION_LABELS).fillna("other").mask(pairs["stale"], FAULT)
    tables = [
        pd.DataFrame(noise, columns=LADDER_COLUMNS),
        _against(kernel_pairs(runs).assign(rung=KERNELS), "loss_last20_mean_base"),
        _against(pairs.assign(rung=rungs), "loss_last20_mean_bf16"),
    ]
    table = pd.concat([each for each in tables if len(each)] or tables[:1], ignore_index=True)
    place = ["machine", "study", "model"]
    return table.merge(tables[0][place].drop_duplicates(), on=place)


def _apart(runs: pd.DataFrame, keys: list[str], rung: str) -> Iterator[dict[str, object]]:
    """Compare every two runs of a group with each other."""
    for _, group in runs.groupby(keys, sort=False):
        first = group.iloc[0][LADDER_COLUMNS[:3]].to_dict() | {"rung": rung}
        first["precision"] = group["precision"].iloc[0]
        mean = group["loss_last20_mean"].mean()
        runs_of = zip(group["loss_last20_mean"], group["run_ids"], strict=True)
        for (one, a), (other, b) in itertools.combinations(runs_of, 2):
            yield first | {"difference_pct": 100 * abs(one - other) / mean, "run_ids": f"{a} {b}"}


def _against(pairs: pd.DataFrame, base: str) -> pd.DataFrame:
    apart = 100 * (pairs["loss_last20_mean"] - pairs[base]).abs() / pairs[base]
    return pairs.assign(difference_pct=apart)[LADDER_COLUMNS]


def scored_points(stored_runs: Iterable[StoredRun]) -> pd.DataFrame:
    """Return one row per record and ``step`` at which it scored held-out text: ``scored``, nats."""
    scores = [
        place_of(run) | {"step": point["step"], "scored": point["loss"]}
        for run in stored_runs
        for point in run.record.results.get("validation_losses", [])
        if point.get("loss") is not None
    ]
    return pd.DataFrame(scores, columns=[*PLACE, "step", "scored"])


def validation_curve(stored_runs: Iterable[StoredRun], runs: pd.DataFrame) -> pd.DataFrame:
    """Follow the gap on text that no run trained on, for FP8 and for what should make none.

    Of the records with ``validation_losses``, whose `runs_frame` is `runs`: the columns of
    `CURVE_COLUMNS`, one row per arm, ``rung`` and scored ``step``: the gap's mean over seeds, in %
    of the other run's loss, with the 95 % interval and the verdict of `judged_pairs`. The ``rung``
    says against what: a precision against BF16, `KERNELS` (BF16 against BF16), or `AGAIN` (the arm
    against its own first run).
    """
    both = _scored_pairs(stored_runs, runs)
    rows: list[dict[str, object]] = []
    for _, group in both.groupby(["arm_key", "rung"], sort=False):
        for step, scored in group.groupby("step"):
            row = {name: scored[name].iloc[0] for name in [*_PLACE, "rung"]} | {"step": step}
            rows.append(row | judged_pairs(scored["gap_pct"].tolist(), scored, "gap_pct"))
    return pd.DataFrame(rows, columns=CURVE_COLUMNS)


def _scored_pairs(stored_runs: Iterable[StoredRun], runs: pd.DataFrame) -> pd.DataFrame:
    """Return every two runs that `validation_curve` compares, at each step that both scored."""
    curves = scored_points(stored_runs)
    against_bf16 = healthy_pairs(runs).rename(columns={"run_id_bf16": "run_id_base"})
    labels = against_bf16["precision"].map(PRECISION_LABELS)
    floors = [kernel_pairs(runs).assign(rung=KERNELS), reruns(runs).assign(rung=AGAIN)]
    pairs = pd.concat([against_bf16.assign(rung=labels), *floors])
    pairs["diverged"] = pairs["diverged"].eq(True)  # of FP8 against BF16 alone
    ours = pairs.merge(curves, on=PLACE)
    base = curves.rename(columns={"run_id": "run_id_base", "scored": "scored_base"})
    both = ours.merge(base, on=["machine", "study", "run_id_base", "step"])
    return both.assign(gap_pct=100 * (both["scored"] / both["scored_base"] - 1))


def pooled_table(stored_runs: Iterable[StoredRun], runs: pd.DataFrame) -> pd.DataFrame:
    """Pool what several machines say of one study's final loss on text that no run trained on.

    The columns of `POOLED_COLUMNS`, one row per ``what``: an arm of FP8 against BF16, or of the
    studies that have such an arm `KERNELS` or `AGAIN`, as in `validation_curve`. Two runs are
    compared on their own machine alone; of ``num_runs`` such gaps those of a seed are averaged, and
    the means of ``num_pairs`` seeds judged, as a seed's text and first weights are the same
    everywhere. ``gap_pct`` is their mean in % of the other run's loss, ``size_pct`` the root mean
    square of all gaps: what a gap of one seed is like, whichever its sign.
    """
    both = _scored_pairs(stored_runs, runs)
    last = both[both["step"] == both.groupby(["machine", "run_ids"])["step"].transform("max")]
    of_fp8 = ~last["rung"].isin(_FLOORS)
    start = goes_on(last).map({True: f", {FROM_WEIGHTS}", False: ""})
    last = last.assign(what=(last["arm"] + start).where(of_fp8, last["rung"]))
    last = last.assign(like=last["setting"].where(of_fp8, ""))
    by_study = last[of_fp8].groupby([*_POOL, "what", "like"])["machine"].nunique()
    several = {key[: len(_POOL)] for key in by_study[by_study > 1].index}
    rows = []
    for key, group in last.groupby([*_POOL, "what", "like"], sort=False):
        is_pooled = group["machine"].nunique() > 1 or group["what"].iloc[0] in _FLOORS
        if key[: len(_POOL)] in several and is_pooled:
            seeds = group.groupby("seed")["gap_pct"].mean().tolist()
            rows.append(dict(zip([*_POOL, "what"], key, strict=False)) | {
                "precision": group["precision"].iloc[0],
                "machines": ", ".join(sorted(group["machine"].unique())),
                "num_runs": len(group),
                "epochs": group["epochs"].max(),
                "size_pct": math.sqrt((group["gap_pct"] ** 2).mean()),
            } | judged_pairs(seeds, group, "gap_pct"))  # fmt: skip
    return pd.DataFrame(rows, columns=POOLED_COLUMNS)


def pooled_fp8(pooled: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `pooled_table` that hold FP8 against BF16: those that are no floor."""
    return pooled[~pooled["what"].isin(_FLOORS)]


def scatter_table(metrics: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Tell how far FP8's gap to BF16 moves from seed to seed, by learning rate, warm-up and start.

    Of arms on GPUs with FP32 master weights and three pairs or more that saw no text twice; their
    final training losses. The columns of `SCATTER_COLUMNS`: ``scatter_pct`` is the standard
    deviation of the gaps within arms, in % of BF16's loss; ``num_risen`` of ``num_runs``, partners
    included, had a loss of `LOSS_RISE` times the first one; ``num_to_decide`` are the pairs with
    which two equal arms would be equivalent at `LOSS_MARGIN_PCT`.
    """
    pairs = healthy_pairs(runs)
    pairs = pairs[(pairs["master_dtype"] == "fp32") & (pairs["epochs"] <= 1)]
    gaps = 100 * (pairs["loss_last20_mean"] / pairs["loss_last20_mean_bf16"] - 1)
    arms = gaps.groupby(pairs["arm_key"])
    pairs = pairs.assign(squared=(gaps - arms.transform("mean")) ** 2)
    pairs = pairs[arms.transform("size") >= MIN_PAIRS_FOR_INTERVAL]
    highest = metrics.groupby(PLACE)["loss"].max().rename("highest")
    ends = runs.join(highest, on=PLACE).set_index("run_ids")
    has_risen = ends["highest"] >= LOSS_RISE * ends["loss_start"]
    rows = []
    pairs = pairs.assign(starts_from=goes_on(pairs).map({True: TRAINED, False: RANDOM}))
    for key, group in pairs.groupby(SCATTER_COLUMNS[:4]):
        ids = list(dict.fromkeys(" ".join(group["run_ids"]).split()))
        num_arms = group["arm_key"].nunique()
        scatter = math.sqrt(group["squared"].sum() / (len(group) - num_arms))
        rows.append(dict(zip(SCATTER_COLUMNS, key, strict=False)) | {
            "num_arms": num_arms, "num_pairs": len(group), "scatter_pct": scatter,
            "num_risen": int(has_risen.reindex(ids).sum()), "num_runs": len(ids),
            "num_to_decide": stats.pairs_to_decide(scatter, LOSS_MARGIN_PCT),
            "run_ids": " ".join(ids),
        })  # fmt: skip
    return pd.DataFrame(rows, columns=SCATTER_COLUMNS).sort_values("scatter_pct", ignore_index=True)
