"""Claims about losses: whether FP8 ends where BF16 does, and what is said to help."""

from __future__ import annotations

import pandas as pd

from fp8study.analysis import stats
from fp8study.analysis.claims.finding import Claim, Figure, Finding, Verdict, judges, undecided
from fp8study.analysis.claims.rules import (
    behind,
    by_parts,
    by_share,
    count,
    ends,
    equal_losses,
    judged_by_rows,
    mean_gap,
    spread,
    with_pairs,
)  # fmt: skip
from fp8study.analysis.claims.tables import PLACE, Tables, along, steps
from fp8study.analysis.pairing import pairs_of


@judges("A10", "A11")
def equal_on_several_gpus(tables: Tables, claim: Claim) -> Finding:
    gaps = tables.gaps[tables.gaps["num_gpus"] == claim.published["num_gpus"]]
    return equal_losses(gaps[gaps["precision"] == "fp8_tensorwise"])


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
    keys = ["machine", "study", "pair_key"]
    both = pairs[outer].merge(pairs[pairs["skip"] == ""], on=keys, suffixes=("", "_all"))
    apart = both["gap"] - both["gap_all"]
    if len(apart) < stats.MIN_PAIRS_FOR_INTERVAL:
        return undecided("no three seeds were run with those layers in BF16 and with none")
    margin = float(both["margin_pct"].iloc[0])
    found = stats.judged(apart.tolist(), margin)
    figure = Figure("gap with both layers in BF16, less that with none", float(apart.mean()), "%",
                    found["low_95"], found["high_95"], "95 % CI", "+.2f")  # fmt: skip
    lead = tables.cells.set_index("arm_key")["speedup_pct"]
    cost = (both["arm_key_all"].map(lead) - both["arm_key"].map(lead)).median()
    why = (
        f"over {len(apart)} seeds the difference is {found['verdict']} at ±{margin:g} %; what both "
        f"layers cost in speed {'is not measured' if pd.isna(cost) else f'is {cost:.1f} points'}"
    )
    verdict = Verdict.CONTRADICTED
    if found["verdict"] == "undecided":
        verdict = Verdict.UNDECIDED
    elif found["high_90"] < -margin:
        verdict = by_parts(True, cost <= claim.published["cost_points"])
    runs = behind(both, both[["run_ids_all"]].set_axis(["run_ids"], axis=1))
    return Finding(verdict, why, figure, runs)


@judges("B01")
def four_arms_equal(tables: Tables, claim: Claim) -> Finding:
    """Judge studies of several recipes at the end, and where their first pass over a text ended."""
    gaps = with_pairs(tables.gaps)
    gaps = gaps[(gaps["sequence_length"] == 4096) & (gaps["num_gpus"] == 1)]
    gaps = gaps[gaps.groupby(["machine", "study"])["precision"].transform("nunique") > 1]
    ended, passes = equal_losses(gaps), tables.passes
    first = passes[(passes["passes"] == 1) & passes["arm_key"].isin(gaps["arm_key"])]
    if ended.verdict is not Verdict.CONTRADICTED or first.empty:
        return ended
    same = first["verdict"] == "equivalent"
    why = (
        f"{ended.why}; the text was seen {gaps['epochs'].max():.1f} times, and at the end of the "
        f"first time {same.sum()} of {len(first)} were equivalent ({ends(first['gap_pct'])} %)"
    )
    verdict = Verdict.PARTLY if same.all() else Verdict.CONTRADICTED
    return Finding(verdict, why, mean_gap("loss gap at the end", gaps), ended.runs)


@judges("A27")
def recipes_in_order(tables: Tables, claim: Claim) -> Finding:
    order = ["fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_gw_hp"]
    groups = list(along(tables.cells[tables.cells["precision"].isin(order)], "precision"))
    leads = [group.drop_duplicates("precision").set_index("precision") for group in groups]
    speed = pd.DataFrame([group["speedup_pct"].reindex(order) for group in leads], columns=order)
    apart = (speed[order[0]] - speed[order[1]]).dropna()
    errors = tables.gradients
    if len(errors):
        errors = errors[(errors["scope"] == "fp8_layers") & (errors["reference"] == "bf16")]
        error = errors.pivot_table("relative_error", [*PLACE, "step"], "precision")
        error = error.reindex(columns=order).dropna()
    if apart.empty or errors.empty or error.empty:
        return undecided("the recipes' speeds or gradient errors are not measured side by side")
    finer = error.diff(axis=1).iloc[:, 1:].lt(0).all(axis=1)
    third = speed[order[2]].notna().any()
    why = (
        f"tensorwise is faster than rowwise in {(apart > 0).sum()} of {len(apart)} settings; "
        f"gradient errors of {', '.join(f'{100 * mean:.1f}' for mean in error.mean())} % fall in "
        f"the order of the recipes at {finer.sum()} of {len(error)} points; the third recipe's "
        f"speed is {'' if third else 'not '}measured"
    )
    verdict = by_share(min(float((apart > 0).mean()), float(finer.mean())))
    if verdict is Verdict.REPRODUCED and not third:
        verdict = Verdict.PARTLY
    figure = spread("tensorwise's lead less rowwise's", apart, "points", "+.1f")
    return Finding(verdict, why, figure, behind(*groups, errors))


@judges("C09")
def early_divergence(tables: Tables, claim: Claim) -> Finding:
    """Hold the mean gap of each arm against the spread of BF16's seeds, early and late."""
    curves = tables.gap_curves[tables.gap_curves["precision"] == "fp8_tensorwise"]
    early, late = claim.published["early_steps"], claim.published["late_step"]
    place = ["machine", "study", "model", "num_gpus", "setting"]
    spreads = tables.seed_spread.groupby([*place, "step"])["spread_pct"].min()
    mean = curves.groupby([*place, "arm", "step"]).agg(
        gap=("gap_pct", lambda gaps: abs(gaps.mean())), seeds=("seed", "nunique")
    )
    mean = mean[mean["seeds"] >= stats.MIN_PAIRS_FOR_INTERVAL].reset_index()
    mean = mean.join(spreads, on=[*place, "step"]).dropna()
    mean["times"] = mean["gap"] / mean["spread_pct"]
    rows = []
    for _, arm in mean.groupby([*place, "arm"], sort=False):
        before, after = arm[arm["step"] <= early], arm[arm["step"].between(late / 2, late)].tail(1)
        if len(before) and len(after) and arm["step"].max() >= late:
            worst = before.sort_values("times").tail(1)
            rows.append(worst.assign(late=float(after["times"].iloc[0])))
    if not rows:
        return undecided(f"no tensorwise arm has three seeds over {late:,} steps")
    found = pd.concat(rows)
    shown, settled = found["times"] > 1, found["late"] <= 1
    why = (
        f"in the first {early} steps {shown.sum()} of {count(len(found), 'tensorwise arm')} leave "
        f"the spread of BF16's seeds (the largest mean gap is {found['gap'].max():.2f} % of the "
        f"loss), and at step {late:,} {settled.sum()} lie inside it"
    )
    verdict = by_parts(True, settled.all()) if shown.any() else Verdict.CONTRADICTED
    figure = spread("largest early gap over the spread of seeds", found["times"], spec=".2f")
    keys = [*place, "arm"]
    return Finding(verdict, why, figure, behind(tables.gaps.merge(found[keys], on=keys)))


@judges("C10")
def schedules_help(tables: Tables, claim: Claim) -> Finding:
    """Judge runs that change their precision on the way against those in FP8 throughout."""
    field = claim.published["field"]
    named = tables.of_records(lambda run: {"name": run.record.config.get(field)}, "name").dropna()
    gaps, changed = with_pairs(tables.gaps), tables.runs.merge(named)
    scheduled = gaps["arm_key"].isin(changed["arm_key"])
    both = gaps[scheduled].merge(
        gaps[~scheduled], on=["machine", "study", "model", "num_gpus"], suffixes=("", "_constant")
    )
    helps = both["gap_pct_high_95"] < both["gap_pct_low_95_constant"]
    words = "the gap is smaller with a schedule of precisions in {} comparisons"
    return judged_by_rows(both, both["gap_pct"], helps, words, "gap with a schedule",
                          "no run changes its precision on the way", spec="+.2f")  # fmt: skip


@judges("C14")
def learning_rate_breaks(tables: Tables, claim: Claim) -> Finding:
    """Look for FP8 arms that diverge early at a learning rate and not at a lower one."""
    runs = tables.runs[tables.runs["status"].isin(["completed", "diverged"])]
    runs = runs[(runs["device"] == "cuda") & ~runs["stale"]].drop_duplicates("arm_key")
    lost = (runs["status"] == "diverged") & (runs["steps_completed"] <= claim.published["steps"])
    sweeps = steps(along(runs.assign(lost=lost.fillna(False).astype(int)), "learning_rate"), "lost")
    sweeps = sweeps[sweeps["precision"] != "bf16"]
    if sweeps.empty:
        return undecided("no FP8 arm was run at two learning rates")
    broken = sweeps["lost"] > sweeps["lost_before"]
    why = (
        f"FP8 begins to diverge within {claim.published['steps']} steps in {broken.sum()} of "
        f"{count(len(sweeps), 'step')} to a higher learning rate"
    )
    verdict = Verdict.REPRODUCED if broken.any() else Verdict.CONTRADICTED
    figure = Figure("steps that break FP8", 100 * float(broken.mean()), "%", spec=".0f")
    return Finding(verdict, why, figure, behind(sweeps))
