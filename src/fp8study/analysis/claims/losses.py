"""Claims about losses: whether FP8 ends where BF16 does, and what is said to help."""

from __future__ import annotations

import dataclasses

import pandas as pd

from fp8study.analysis import stats
from fp8study.analysis.claims.finding import Claim, Figure, Finding, Verdict, judges
from fp8study.analysis.claims.rules import (
    by_parts,
    by_rows,
    by_share,
    ends,
    equal_losses,
    out_of,
    spread,
    with_pairs,
)
from fp8study.analysis.claims.tables import Tables, along
from fp8study.analysis.frames import PLACE
from fp8study.analysis.losses import gap_by_step, pass_table, seed_spread
from fp8study.analysis.noise import tables as noise
from fp8study.analysis.pairing import pairs_of


@judges("A10", "A11")
def equal_on_several_gpus(tables: Tables, claim: Claim) -> Finding:
    gaps = tables.gaps[tables.gaps["num_gpus"] == claim.published["num_gpus"]]
    return equal_losses(claim, gaps[gaps["precision"] == "fp8_tensorwise"])


@judges("A24")
def skipping_keeps_quality(tables: Tables, claim: Claim) -> Finding:
    """Judge the first and last layer in BF16 against all layers in FP8, seed by seed."""
    skips = tables.of_records(
        lambda run: {"skip": " ".join(run.record.config.get("skip") or [])}, "skip"
    )
    pairs = pairs_of(tables.runs[~tables.runs["speed_only"]], "loss_last20_mean")
    pairs = pairs[~pairs["stale"]].merge(skips[[*PLACE, "skip"]], on=PLACE)
    pairs["gap"] = 100 * (pairs["loss_last20_mean"] / pairs["loss_last20_mean_bf16"] - 1)
    outer = pairs["skip"].str.contains("lm_head") & pairs["skip"].str.contains(r"layers\.0\.")
    keys, whole = ["machine", "study", "pair_key"], pairs[pairs["skip"] == ""]
    both = pairs[outer].merge(whole, on=keys, suffixes=("", "_before"))
    apart = both["gap"] - both["gap_before"]
    if len(apart) < stats.MIN_PAIRS_FOR_INTERVAL:
        return claim.open()
    margin = float(both["margin_pct"].iloc[0])
    found = stats.judged(apart.tolist(), margin)
    lead = tables.cells.set_index("arm_key")["speedup_pct"]
    cost = (both["arm_key_before"].map(lead) - both["arm_key"].map(lead)).median()
    verdict = Verdict.CONTRADICTED
    if found["verdict"] == "undecided":
        verdict = Verdict.UNDECIDED
    elif found["high_90"] < -margin:
        verdict = by_parts(True, cost <= claim.published["cost_points"])
    figure = Figure(float(apart.mean()), found["low_95"], found["high_95"], "95 % CI")
    said = "not measured" if pd.isna(cost) else f"{cost:.1f} points"
    return claim.found(verdict, figure, both, seeds=len(apart), found=found["verdict"],
                       margin=margin, cost=said)  # fmt: skip


@judges("B01")
def four_arms_equal(tables: Tables, claim: Claim) -> Finding:
    """Judge studies of several recipes at the end, and where their first pass over a text ended."""
    gaps, passes = with_pairs(tables.gaps), pass_table(tables.metrics, tables.runs)
    gaps = gaps[(gaps["sequence_length"] == 4096) & (gaps["num_gpus"] == 1)]
    gaps = gaps[gaps.groupby(["machine", "study"])["precision"].transform("nunique") > 1]
    first = passes[(passes["passes"] == 1) & passes["arm_key"].isin(gaps["arm_key"])]
    same = first["verdict"] == "equivalent"
    words = {"first": out_of(same), "by_then": ends(first["gap_pct"]) if len(first) else "none"}
    found = equal_losses(claim, gaps, epochs=gaps["epochs"].max(), **words)
    if found.verdict is Verdict.CONTRADICTED and len(first) and same.all():
        return dataclasses.replace(found, verdict=Verdict.PARTLY)
    return found


@judges("A27")
def recipes_in_order(tables: Tables, claim: Claim) -> Finding:
    order = ["fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_gw_hp"]
    groups = list(along(tables.cells[tables.cells["precision"].isin(order)], "precision"))
    leads = [group.drop_duplicates("precision").set_index("precision") for group in groups]
    speed = pd.DataFrame([group["speedup_pct"].reindex(order) for group in leads], columns=order)
    apart = (speed[order[0]] - speed[order[1]]).dropna()
    errors = noise.over_runs(noise.gradient_table, tables.stored)
    if len(errors):
        errors = errors[(errors["scope"] == "fp8_layers") & (errors["reference"] == "bf16")]
        error = errors.pivot_table("relative_error", [*PLACE, "step"], "precision")
        error = error.reindex(columns=order).dropna()
    if apart.empty or errors.empty or error.empty:
        return claim.open()
    faster, finer = apart > 0, error.diff(axis=1).iloc[:, 1:].lt(0).all(axis=1)
    third = speed[order[2]].notna().any()
    verdict = by_share(min(float(faster.mean()), float(finer.mean())))
    if verdict is Verdict.REPRODUCED and not third:
        verdict = Verdict.PARTLY
    means = ", ".join(f"{100 * mean:.1f}" for mean in error.mean())
    return claim.found(
        verdict, spread(apart), *groups, errors, faster=out_of(faster), finer=out_of(finer),
        errors=means, third="measured" if third else "not measured",
    )  # fmt: skip


@judges("C09")
def early_divergence(tables: Tables, claim: Claim) -> Finding:
    """Hold the mean gap of each arm against the spread of BF16's seeds, early and late."""
    curves = gap_by_step(tables.metrics, tables.runs)
    curves = curves[curves["precision"] == "fp8_tensorwise"]
    early, late = claim.published["early_steps"], claim.published["late_step"]
    place = ["machine", "study", "model", "num_gpus", "setting"]
    keys = [*place, "arm"]
    spreads = seed_spread(tables.metrics, tables.runs).groupby([*place, "step"])["spread_pct"].min()
    mean = curves.groupby([*keys, "step"]).agg(
        gap=("gap_pct", lambda gaps: abs(gaps.mean())), seeds=("seed", "nunique")
    )
    mean = mean[mean["seeds"] >= stats.MIN_PAIRS_FOR_INTERVAL].reset_index()
    mean = mean.join(spreads, on=[*place, "step"]).dropna()
    mean["times"] = mean["gap"] / mean["spread_pct"]
    rows = []
    for _, arm in mean.groupby(keys, sort=False):
        before, after = arm[arm["step"] <= early], arm[arm["step"].between(late / 2, late)].tail(1)
        if len(before) and len(after) and arm["step"].max() >= late:
            worst = before.sort_values("times").tail(1)
            rows.append(worst.assign(late=float(after["times"].iloc[0])))
    if not rows:
        return claim.open()
    found = pd.concat(rows)
    shown, settled = found["times"] > 1, found["late"] <= 1
    verdict = by_parts(True, settled.all()) if shown.any() else Verdict.CONTRADICTED
    return claim.found(
        verdict, spread(found["times"]), tables.gaps.merge(found[keys], on=keys),
        shown=out_of(shown), settled=out_of(settled), gap=found["gap"].max(),
    )  # fmt: skip


@judges("C10")
def schedules_help(tables: Tables, claim: Claim) -> Finding:
    """Judge runs that change their precision on the way against those in FP8 throughout."""
    field = claim.published["field"]
    named = tables.of_records(lambda run: {field: run.record.config.get(field) or None}, field)
    named = named.dropna()
    gaps, changed = with_pairs(tables.gaps), tables.runs.merge(named)
    scheduled = gaps["arm_key"].isin(changed["arm_key"])
    place = ["machine", "study", "model", "num_gpus"]
    both = gaps[scheduled].merge(gaps[~scheduled], on=place, suffixes=("", "_before"))
    helps = both["gap_pct_high_95"] < both["gap_pct_low_95_before"]
    return by_rows(claim, both, both["gap_pct"], helps)
