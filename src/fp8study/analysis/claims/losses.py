"""Claims about losses: whether FP8 ends where BF16 does, and what is said to help."""

from __future__ import annotations

import dataclasses

import pandas as pd

from fp8study.analysis import stats
from fp8study.analysis.claims.finding import Claim, Figure, Finding, Verdict, judges
from fp8study.analysis.claims.rules import (
    by_parts,
    by_share,
    ends,
    equal_losses,
    out_of,
    spread,
    with_pairs,
)
from fp8study.analysis.claims.tables import Tables, along
from fp8study.analysis.losses import gap_by_step, judged_pairs, pass_table, seed_spread
from fp8study.analysis.noise import tables as noise
from fp8study.analysis.runs.frames import PLACE, key_of
from fp8study.analysis.runs.naming import FAST_ACCUMULATION
from fp8study.analysis.runs.pairing import FAILURE_STUDIES, pairs_of, together
from fp8study.core.config import completed
from fp8study.core.fields import varying
from fp8study.core.records import StoredRun


@judges("A10", "A11")
def equal_on_several_gpus(tables: Tables, claim: Claim) -> Finding:
    gaps = tables.gaps[tables.gaps["num_gpus"] == claim.published["num_gpus"]]
    return equal_losses(claim, gaps[gaps["precision"] == "fp8_tensorwise"])


def seed_by_seed(tables: Tables, field: str) -> pd.DataFrame:
    """Judge FP8 with a list in `field` against FP8 with an empty one, in a study, seed by seed.

    One row per two arms with three seeds or more in both: what `judged_pairs` says of ``apart``,
    the difference of their gaps to BF16, % of its loss, and the list as a text. The arms differ in
    `field` alone. They are not pooled: a study on repeated text, whose seeds lie far apart, would
    drown another.
    """
    pairs = _gaps(tables, field)
    is_plain = pairs[field] == ""
    keys = ["machine", "study", "precision", "pair_key", "others"]
    both = pairs[~is_plain].merge(pairs[is_plain], on=keys, suffixes=("", "_before"))
    rows = []
    for _, arms in both.groupby(["arm_key", "arm_key_before"], sort=False):
        if len(arms) >= stats.MIN_PAIRS_FOR_INTERVAL:
            apart = (arms["gap"] - arms["gap_before"]).tolist()
            ids = {"run_ids_before": together(arms["run_ids_before"])}
            rows.append(arms.iloc[0].to_dict() | judged_pairs(apart, arms, "apart") | ids)
    return pd.DataFrame(rows)


def _gaps(tables: Tables, field: str) -> pd.DataFrame:
    """Return every healthy pair's final ``gap``, %, with a list of the FP8 run as a text.

    On held-out text where that was asked for: there seeds of one arm differ less than in training.
    """
    runs = _with_text(tables, field)
    scored = runs["validation_sequences"].fillna(0) > 0
    runs = runs.assign(final=runs["validation_loss"].where(scored, runs["loss_last20_mean"]))
    pairs = pairs_of(runs[~runs["speed_only"]], "final")
    pairs = pairs[~pairs["stale"]]
    return pairs.assign(gap=100 * (pairs["final"] / pairs["final_bf16"] - 1))


def _with_text(tables: Tables, field: str) -> pd.DataFrame:
    """Return all runs with a field that is a list, as a text, and with their ``others``."""
    free = {field, *varying("repeat")}

    def read(run: StoredRun) -> dict[str, str]:
        config, device = run.record.config, run.record.machine.get("device")
        others = key_of(completed(config, device), free)
        return {field: " ".join(config.get(field) or []), "others": others}

    texts = tables.of_records(read, field, "others")
    return tables.runs.merge(texts[[*PLACE, field, "others"]], on=PLACE)


def _are_ends(skip: pd.Series) -> pd.Series:
    return skip.str.contains("lm_head") & skip.str.contains(r"layers\.0\.")


@judges("A24")
def skipping_keeps_quality(tables: Tables, claim: Claim) -> Finding:
    """Judge the first and last layer in BF16 against all in FP8 by the study that says most."""
    judged = seed_by_seed(tables, "skip")
    if judged.empty or (judged := judged[_are_ends(judged["skip"])]).empty:
        return claim.open()
    best = judged.loc[[(judged["high_95"] - judged["low_95"]).idxmin()]]
    found, cost = best.iloc[0], _cost_of_skipping(tables)
    verdict = Verdict.CONTRADICTED
    if found["verdict"] == "undecided":
        verdict = Verdict.UNDECIDED
    elif found["high_90"] < -found["margin_pct"]:
        verdict = by_parts(True, cost <= claim.published["cost_points"])
    figure = Figure(found["apart"], found["low_95"], found["high_95"], "95 % CI")
    said = "not measured" if pd.isna(cost) else f"{cost:.1f} points"
    return claim.found(verdict, figure, best, seeds=found["num_pairs"], found=found["verdict"],
                       margin=found["margin_pct"], cost=said)  # fmt: skip


def _cost_of_skipping(tables: Tables) -> float:
    """Return by how many points the first and last layer in BF16 lower FP8's lead."""
    by_arm = _with_text(tables, "skip").drop_duplicates("arm_key").set_index("arm_key")["skip"]
    cells = tables.cells.assign(skip=tables.cells["arm_key"].map(by_arm))
    keys = ["machine", "study", "model", "num_gpus", "setting", "precision"]
    both = cells[_are_ends(cells["skip"])].merge(cells[cells["skip"] == ""], on=keys)
    return float((both["speedup_pct_y"] - both["speedup_pct_x"]).median())


@judges("B01")
def four_arms_equal(tables: Tables, claim: Claim) -> Finding:
    """Judge studies of several recipes at the end, and where their first pass over a text ended.

    Those at document B's length, and those that never saw a text again.
    """
    gaps, passes = with_pairs(tables.gaps), pass_table(tables.metrics, tables.runs)
    asked = (gaps["sequence_length"] == 4096) | (gaps["epochs"] <= 1)
    usual = ~gaps["study"].str.startswith(FAILURE_STUDIES)
    gaps = gaps[asked & usual & (gaps["num_gpus"] == 1)]
    gaps = gaps[gaps.groupby(["machine", "study"])["precision"].transform("nunique") > 1]
    first = passes[(passes["passes"] == 1) & passes["arm_key"].isin(gaps["arm_key"])]
    same, again = first["verdict"] == "equivalent", ""
    if len(first):
        by_then = ends(first["gap_pct"])
        again = f"; after the first time {out_of(same)} were equivalent ({by_then} %)"
    found = equal_losses(claim, gaps, epochs=gaps["epochs"].max(), again=again)
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
    """Hold the mean gap of each arm against the spread of BF16's seeds, early and late.

    The largest over the early steps against the largest over as many late ones: of chance alone the
    largest of many is always above a single one.
    """
    curves = gap_by_step(tables.metrics, tables.runs)
    usual = ~curves["arm"].str.contains(FAST_ACCUMULATION)
    curves = curves[usual & (curves["precision"] == "fp8_tensorwise")]
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
        before = arm[arm["step"] <= early]
        after = arm[arm["step"].between(late - early + 1, late)]
        if len(before) and len(after) and arm["step"].max() >= late:
            worst = before.sort_values("times").tail(1)
            rows.append(worst.assign(late=after["times"].max()))
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
    judged = seed_by_seed(tables, claim.published["field"])
    if judged.empty:
        return claim.open()
    known = judged["verdict"] != "undecided"
    helps = (judged["verdict"] == "different") & (judged["apart"] < 0)
    verdict = by_share(float(helps[known].mean())) if known.any() else Verdict.UNDECIDED
    return claim.found(
        verdict, spread(judged["apart"]), judged, holds=out_of(helps),
        open=int((~known).sum()), margin=judged["margin_pct"].max(), apart=ends(judged["apart"]),
        seeds=ends(judged["num_pairs"], "d"),
    )  # fmt: skip
