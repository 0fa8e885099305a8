"""Up to which learning rate an arm trains: in FP8 and BF16, by master weights and warm-up."""

from __future__ import annotations

import pandas as pd

from fp8study.analysis.claims.finding import Claim, Finding, Verdict, judges
from fp8study.analysis.claims.rules import out_of, spread
from fp8study.analysis.claims.tables import Tables
from fp8study.analysis.frames import PLACE, key_of
from fp8study.analysis.losses import smoothed
from fp8study.analysis.pairing import PRECISION_LABELS, in_fp8, together
from fp8study.core.config import completed
from fp8study.core.fields import varying
from fp8study.core.records import StoredRun

#: What tells the arms of a sweep apart, besides the learning rate.
_ARM = ["precision", "master_dtype", "lr_warmup_steps"]
#: As many must have been run at each rate.
MIN_SEEDS = 2
#: What else may differ in a sweep: the seed, and what exists for FP8 only.
_WITHIN = {*_ARM, "learning_rate", "seed", *varying("pair")}


@judges("C14")
def learning_rate_breaks(tables: Tables, claim: Claim) -> Finding:
    """Hold the highest stable learning rate of FP8 against BF16's, where a sweep reaches an edge.

    It is reproduced if FP8's is lower anywhere, what it loses is lost early, and a longer warm-up
    raises it, as far as that was tried. A single seed may end on either side of what counts as
    lost, and decides nothing.
    """
    rates = stable_rates(tables)
    fp8, bf16 = rates[in_fp8(rates)], rates[rates["precision"] == "bf16"]
    alike = ["sweep", "master_dtype", "lr_warmup_steps"]
    both = _with_edge(fp8.merge(bf16, on=alike, suffixes=("", "_before")))
    both = both[both["stable_before"] > 0]
    if both.empty:
        return claim.open()
    num_seeds = both[["num_seeds", "num_seeds_before"]].min(axis=1)
    if (num_seeds >= MIN_SEEDS).any():
        both = both[num_seeds >= MIN_SEEDS]
    lower, steps = both["stable"] < both["stable_before"], claim.published["steps"]
    early = pd.Series([step <= steps for broke in both["broke"] for step in broke], dtype=bool)
    longer, finer = _beside(fp8, "lr_warmup_steps"), _beside(rates, "master_dtype")
    warmer = longer["stable"] > longer["stable_before"]
    verdict, seeds = Verdict.CONTRADICTED, int(num_seeds[both.index].min())
    if lower.any():
        whole = early.any() and (warmer.any() or longer.empty)
        verdict = Verdict.REPRODUCED if whole else Verdict.PARTLY
    if seeds < MIN_SEEDS:
        verdict = Verdict.UNDECIDED
    return claim.found(
        verdict, spread(100 * both["stable"] / both["stable_before"]), both, longer, finer,
        holds=out_of(lower), early=out_of(early), warmer=out_of(warmer),
        finer=out_of(finer["stable"] > finer["stable_before"]), rates=listed(rates),
        seeds=f"{seeds} seed{'s' if seeds > 1 else ''}",
    )  # fmt: skip


def stable_rates(tables: Tables) -> pd.DataFrame:
    """Return one row per arm on GPUs that was run at two learning rates or more.

    ``stable`` is the highest rate at which, and below which, no seed was lost (0: none is), of
    ``num_seeds`` at each, and ``lost`` the number of runs that were; ``broke`` lists at which
    steps. A run is lost whose loss is no number, or ends above its first or above that of who knows
    the tokens' frequencies alone: there AdamW leaves what it broke.
    """
    runs = tables.of_records(_swept, "sweep", "lr_warmup_steps").merge(
        tables.runs.drop(columns="run_ids"), on=PLACE
    )
    runs = runs[runs["status"].isin(["completed", "diverged"]) & (runs["device"] == "cuda")]
    runs = runs[~runs["stale"]]
    runs = runs.assign(limit=runs[["loss_start", "unigram_loss"]].min(axis=1))
    runs = runs.merge(_last_below(runs, tables.metrics), on=PLACE, how="left")
    is_diverged = runs["status"] == "diverged"
    has_trained = runs["loss_last20_mean"] <= runs["limit"]  # nor is a missing loss, no number
    runs["is_lost"] = is_diverged | ~has_trained
    runs["step"] = runs["step"].fillna(runs["steps_completed"].where(is_diverged, 0))
    rows = []
    for key, arm in runs.groupby(["sweep", *_ARM], sort=False):
        if arm["learning_rate"].nunique() < 2:
            continue
        lost = arm[arm["is_lost"]]
        below = arm.loc[~(arm["learning_rate"] >= lost["learning_rate"].min()), "learning_rate"]
        rows.append(
            dict(zip(["sweep", *_ARM], key, strict=True))
            | {"machine": arm["machine"].iloc[0], "model": arm["model"].iloc[0],
               "stable": below.max() if len(below) else 0.0,
               "num_seeds": arm.groupby("learning_rate")["seed"].nunique().min(),
               "lost": len(lost), "broke": lost["step"].tolist(),
               "run_ids": together(arm["run_ids"])}
        )  # fmt: skip
    found = ["machine", "model", "stable", "num_seeds", "lost", "broke", "run_ids"]
    return pd.DataFrame(rows, columns=["sweep", *_ARM, *found])


def _swept(run: StoredRun) -> dict[str, object]:
    """Return what a run shares with the others of its sweep."""
    record = run.record
    config = completed(record.config, record.machine.get("device"))
    place = [run.machine_label, record.study, record.versions.get("torch"),
             record.data.get("corpus_sha256")]  # fmt: skip
    return {"sweep": key_of(config, _WITHIN, place),
            "lr_warmup_steps": config.get("lr_warmup_steps") or 0}  # fmt: skip


def _last_below(runs: pd.DataFrame, metrics: pd.DataFrame) -> pd.DataFrame:
    """Return the last step at which each run's smoothed loss was no higher than its limit."""
    curves = smoothed(metrics).merge(runs[[*PLACE, "limit"]], on=PLACE)
    return curves[curves["smooth"] <= curves["limit"]].groupby(PLACE)["step"].max().reset_index()


def _beside(arms: pd.DataFrame, field: str) -> pd.DataFrame:
    """Set each arm beside the next smaller one in a field that alone differs: ``…_before``.

    BF16 master weights come before FP32 ones.
    """
    columns = ["stable", "lost", "run_ids"]
    arms = arms.sort_values(field, kind="stable")
    groups = arms.groupby(["sweep", *(name for name in _ARM if name != field)], sort=False)
    return _with_edge(arms.join(groups[columns].shift().add_suffix("_before")).dropna())


def _with_edge(pairs: pd.DataFrame) -> pd.DataFrame:
    """Keep the pairs of arms of which one at least lost a run: the others say nothing."""
    return pairs[pairs["lost"] + pairs["lost_before"] > 0]


def listed(rates: pd.DataFrame) -> str:
    """Name the highest stable rate of each arm, or the highest tried if no run was lost there."""
    rates = rates.sort_values(["master_dtype", "lr_warmup_steps"], kind="stable")
    more = (rates["lost"] == 0).map({True: " or more", False: ""})
    stable = rates["stable"].map(lambda rate: f"{rate:g}" if rate else "none") + more
    said = rates["precision"].map(PRECISION_LABELS) + " " + stable
    arms = rates["master_dtype"].str.upper() + " master weights, warm-up "
    texts = said.groupby(arms + rates["lr_warmup_steps"].astype(str), sort=False).agg(", ".join)
    return "; ".join(f"{arm}: {text}" for arm, text in texts.items())
