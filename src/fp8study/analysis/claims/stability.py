"""Up to which learning rate an arm trains: in FP8 and BF16, by master weights and warm-up."""

from __future__ import annotations

from operator import gt, lt
from typing import Any

import pandas as pd

from fp8study.analysis.claims.finding import Claim, Finding, Verdict, judges
from fp8study.analysis.claims.rules import out_of, spread
from fp8study.analysis.claims.tables import Tables
from fp8study.analysis.losses import smoothed
from fp8study.analysis.runs.frames import PLACE, key_of
from fp8study.analysis.runs.naming import PRECISION_LABELS
from fp8study.analysis.runs.pairing import healthy, in_fp8, together
from fp8study.core.config import completed
from fp8study.core.fields import varying
from fp8study.core.records import StoredRun
from fp8study.core.words import count

#: What tells the arms of a sweep apart, besides the learning rate.
_ARM = ["precision", "master_dtype", "lr_warmup_steps"]
_NAMES = ["sweep", *_ARM, "machine", "model"]
#: What was found of an arm.
_FOUND = [*_NAMES, "stable", "num_seeds", "lost", "broke", "run_ids"]
#: What two arms must both have been run at to be compared.
_CELL = ["learning_rate", "seed"]
#: As many must have been run at each rate.
MIN_SEEDS = 2
#: What else may differ in a sweep: the seed, and what exists for FP8 only.
_WITHIN = {*_ARM, "learning_rate", "seed", *varying("pair")}


@judges("C14")
def learning_rate_breaks(tables: Tables, claim: Claim) -> Finding:
    """Hold the highest stable learning rate of FP8 against BF16's, where a sweep reaches an edge.

    It is reproduced if FP8's is lower in more settings than it is higher, what it loses is lost
    early, and a longer warm-up raises it, as far as that was tried. A run that never learnt was not
    lost at any step, and is counted apart. A single seed may end on either
    side of what counts as lost, and decides nothing.
    """
    runs = _swept_runs(tables)
    both = _beside(runs, "precision")
    both = both[in_fp8(both) & (both["precision_before"] == "bf16") & (both["stable_before"] > 0)]
    if both.empty:
        return claim.open()
    longer, finer = _beside(runs[in_fp8(runs)], "lr_warmup_steps"), _beside(runs, "master_dtype")
    if (both["num_seeds"] >= MIN_SEEDS).any():
        both, longer, finer = (p[p["num_seeds"] >= MIN_SEEDS] for p in (both, longer, finer))
    held = together([*both["run_ids"], *both["run_ids_before"]]).split()
    lower, higher = (compare(both["stable"], both["stable_before"]) for compare in (lt, gt))
    steps = claim.published["steps"]
    broke = pd.Series([step for steps in both["broke"] for step in steps], dtype=float)
    early = broke.dropna() <= steps
    warmer = longer["stable"] > longer["stable_before"]
    verdict, seeds = Verdict.CONTRADICTED, int(both["num_seeds"].min())
    if lower.any():
        more = lower.sum() > higher.sum()  # the edge of either precision moves by chance
        whole = more and early.any() and (warmer.any() or longer.empty)
        verdict = Verdict.REPRODUCED if whole else Verdict.PARTLY
    if seeds < MIN_SEEDS:
        verdict = Verdict.UNDECIDED
    return claim.found(
        verdict, spread(100 * both["stable"] / both["stable_before"]), both, longer, finer,
        holds=out_of(lower), higher=out_of(higher), early=f"{early.sum()} of {len(broke)}",
        never=broke.isna().sum(), warmer=out_of(warmer),
        finer=out_of(finer["stable"] > finer["stable_before"]),
        rates=listed(_edges(runs[runs["run_ids"].isin(held)])),
        seeds=count(seeds, "seed"),
    )  # fmt: skip


def stable_rates(tables: Tables) -> pd.DataFrame:
    """Return one row per arm on GPUs that was run at two learning rates or more.

    ``stable`` is the highest rate at which, and below which, no seed was lost (0: none is), of
    ``num_seeds`` at each, and ``lost`` the number of runs that were; ``broke`` lists at which
    steps. A run is lost whose loss is no number, or ends above its first or above that of who knows
    the tokens' frequencies alone: there AdamW leaves what it broke.
    """
    return _edges(_swept_runs(tables))


def _swept_runs(tables: Tables) -> pd.DataFrame:
    """Return the runs whose losses count, with their sweep, whether one ``is_lost`` and when."""
    runs = tables.of_records(_swept, "sweep").merge(tables.runs.drop(columns="run_ids"), on=PLACE)
    runs = runs[runs["status"].isin(["completed", "diverged"]) & (runs["device"] == "cuda")]
    runs = healthy(runs)
    runs = runs.assign(limit=runs[["loss_start", "unigram_loss"]].min(axis=1))
    runs = runs.merge(_last_below(runs, tables.metrics), on=PLACE, how="left")
    is_diverged = runs["status"] == "diverged"
    has_trained = runs["loss_last20_mean"] <= runs["limit"]  # nor is a missing loss, no number
    runs["is_lost"] = is_diverged | ~has_trained
    ended = runs["steps_completed"].astype(float).where(is_diverged)
    runs["step"] = runs["step"].astype(float).fillna(ended)
    return runs


def _edges(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `stable_rates` from those of `_swept_runs`."""
    arms = (arm for _, arm in runs.groupby(["sweep", *_ARM], sort=False))
    rows = [_edge(arm) for arm in arms if arm["learning_rate"].nunique() > 1]
    return pd.DataFrame(rows, columns=_FOUND)


def _edge(arm: pd.DataFrame) -> dict[str, object]:
    lost = arm[arm["is_lost"]]
    below = arm.loc[~(arm["learning_rate"] >= lost["learning_rate"].min()), "learning_rate"]
    return arm[_NAMES].iloc[0].to_dict() | {
        "stable": below.max() if len(below) else 0.0,
        "num_seeds": arm.groupby("learning_rate")["seed"].nunique().min(),
        "lost": len(lost), "broke": lost["step"].tolist(), "run_ids": together(arm["run_ids"]),
    }  # fmt: skip


def _swept(run: StoredRun) -> dict[str, object]:
    """Return what a run shares with the others of its sweep."""
    record = run.record
    config = completed(record.config, record.machine.get("device"))
    place = [run.machine_label, record.study, record.versions.get("torch"),
             record.data.get("corpus_sha256")]  # fmt: skip
    return {"sweep": key_of(config, _WITHIN, place)}


def _last_below(runs: pd.DataFrame, metrics: pd.DataFrame) -> pd.DataFrame:
    """Return the last step at which each run's smoothed loss was no higher than its limit."""
    curves = smoothed(metrics).merge(runs[[*PLACE, "limit"]], on=PLACE)
    return curves[curves["smooth"] <= curves["limit"]].groupby(PLACE)["step"].max().reset_index()


def _beside(runs: pd.DataFrame, field: str) -> pd.DataFrame:
    """Set each arm beside another that differs in a field alone: ``…_before``.

    In its precision that is BF16, else the next smaller; BF16 master weights come before FP32 ones.
    Only rates and seeds count that both were run at: one arm's third seed, or higher rate, may be
    what it loses. Where no run was lost nothing is known of an edge.
    """
    arms: dict[Any, pd.DataFrame] = dict(iter(runs.groupby(["sweep", *_ARM], sort=False)))
    at, rows = 1 + _ARM.index(field), []
    for key, own in arms.items():
        lower = [other for other in arms if other[at] < key[at]
                 and other[:at] + other[at + 1 :] == key[:at] + key[at + 1 :]]  # fmt: skip
        if not lower:
            continue
        theirs = arms[min(lower) if field == "precision" else max(lower)]
        cells = own[_CELL].merge(theirs[_CELL]).drop_duplicates()
        both = [arm.merge(cells) for arm in (own, theirs)]
        if cells["learning_rate"].nunique() > 1 and any(arm["is_lost"].any() for arm in both):
            edge, before = map(_edge, both)
            rows.append(edge | {f"{name}_before": value for name, value in before.items()})
    return pd.DataFrame(rows, columns=[*_FOUND, *(f"{name}_before" for name in _FOUND)])


def listed(rates: pd.DataFrame) -> str:
    """Name the highest stable rate of each arm, or the highest tried if no run was lost there."""
    rates = rates.sort_values(["master_dtype", "lr_warmup_steps"], kind="stable")
    more = (rates["lost"] == 0).map({True: " or more", False: ""})
    stable = rates["stable"].map(lambda rate: f"{rate:g}" if rate else "none") + more
    said = rates["precision"].map(PRECISION_LABELS) + " " + stable
    arms = rates["master_dtype"].str.upper() + " master weights, warm-up "
    texts = said.groupby(arms + rates["lr_warmup_steps"].astype(str), sort=False).agg(", ".join)
    return "; ".join(f"{arm}: {text}" for arm, text in texts.items())
