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
    equal_losses,
    mean_gap,
    of_cells,
    spread,
    with_pairs,
)
from fp8study.analysis.claims.tables import Tables, along, steps
from fp8study.analysis.pairing import pairs_of
from fp8study.core.records import StoredRun

_PLACE = ["machine", "study", "run_id"]


@judges("A10", "A11")
def equal_on_several_gpus(tables: Tables, claim: Claim) -> Finding:
    gaps = tables.gaps[tables.gaps["num_gpus"] == claim.published["num_gpus"]]
    gaps = gaps[gaps["precision"] == "fp8_tensorwise"]
    return equal_losses(gaps)


@judges("A24")
def skipping_keeps_quality(tables: Tables, claim: Claim) -> Finding:
    """Judge the first and last layer in BF16 against all layers in FP8, seed by seed."""
    skips = tables.of_records(
        lambda run: {"skip": " ".join(run.record.config.get("skip") or [])}, "skip"
    )
    pairs = pairs_of(tables.runs[~tables.runs["speed_only"]], "loss_last20_mean")
    pairs = pairs[~pairs["stale"]].merge(skips[[*_PLACE, "skip"]], on=_PLACE)
    pairs["gap"] = 100 * (pairs["loss_last20_mean"] / pairs["loss_last20_mean_bf16"] - 1)
    ends = pairs["skip"].str.contains("lm_head") & pairs["skip"].str.contains(r"layers\.0\.")
    keys = ["machine", "study", "pair_key"]
    both = pairs[ends].merge(pairs[pairs["skip"] == ""], on=keys, suffixes=("", "_all"))
    apart = (both["gap"] - both["gap_all"]).tolist()
    if len(apart) < stats.MIN_PAIRS_FOR_INTERVAL:
        return undecided("no three seeds were run with those layers in BF16 and with none")
    margin = float(both["margin_pct"].iloc[0])
    found = stats.judged(apart, margin)
    ends_of = found["low_95"], found["high_95"]
    figure = Figure("loss saved by skipping them", -sum(apart) / len(apart), "%",
                    -ends_of[1], -ends_of[0], "95 % CI", "+.2f")  # fmt: skip
    better = found["high_90"] < -margin
    why = (
        f"over {len(apart)} seeds the gap to BF16 is {sum(apart) / len(apart):+.2f} points with "
        f"both layers in BF16 against all in FP8: {found['verdict']} at ±{margin:g} %"
    )
    runs = behind(both, both[["run_ids_all"]].set_axis(["run_ids"], axis=1))
    if found["verdict"] == "undecided":
        return Finding(Verdict.UNDECIDED, why, figure, runs)
    lead = tables.cells.set_index("arm_key")["speedup_pct"]
    cost = (both["arm_key_all"].map(lead) - both["arm_key"].map(lead)).dropna()
    cheap = bool(len(cost)) and bool(cost.median() <= claim.published["cost_points"])
    verdict = by_parts(better, cheap) if better else Verdict.CONTRADICTED
    return Finding(verdict, why, figure, runs)


@judges("B01")
def four_arms_equal(tables: Tables, claim: Claim) -> Finding:
    gaps = with_pairs(tables.gaps)
    gaps = gaps[(gaps["sequence_length"] == 4096) & (gaps["num_gpus"] == 1)]
    recipes = gaps.groupby(["machine", "study"])["precision"].transform("nunique")
    gaps = gaps[recipes > 1]
    runs = behind(gaps)
    ended = equal_losses(gaps)
    passes = tables.passes
    first = passes[(passes["passes"] == 1) & passes["arm_key"].isin(gaps["arm_key"])]
    if ended.verdict is not Verdict.CONTRADICTED or first.empty:
        return ended
    same = first["verdict"] == "equivalent"
    why = (
        f"{ended.why}; where the first pass over their text ended, {same.sum()} of {len(first)} "
        f"were equivalent ({first['gap_pct'].min():+.2f} to {first['gap_pct'].max():+.2f} %), and "
        f"the text was seen {gaps['epochs'].max():.1f} times"
    )
    verdict = Verdict.PARTLY if same.all() else Verdict.CONTRADICTED
    return Finding(verdict, why, mean_gap("loss gap at the end", gaps), runs)


@judges("A27")
def recipes_in_order(tables: Tables, claim: Claim) -> Finding:
    order = ["fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_gw_hp"]
    both = [
        group.drop_duplicates("precision").set_index("precision")
        for group in along(tables.cells, "precision")
    ]
    speed = pd.DataFrame([group["speedup_pct"].reindex(order) for group in both], columns=order)
    timed = speed.dropna(subset=order[:2])
    gradients = tables.gradients
    if timed.empty or gradients.empty:
        return undecided("the recipes' speeds or gradient errors are not measured side by side")
    chosen = gradients[(gradients["scope"] == "fp8_layers") & (gradients["reference"] == "bf16")]
    error = chosen.pivot_table(
        index=[*_PLACE, "step"], columns="precision", values="relative_error"
    ).reindex(columns=order)
    faster = timed["fp8_tensorwise"] > timed["fp8_rowwise"]
    finer = error.diff(axis=1).iloc[:, 1:].lt(0).all(axis=1)
    means = ", ".join(f"{100 * mean:.1f}" for mean in error.mean())
    why = (
        f"tensorwise is faster than rowwise in {faster.sum()} of {count(len(timed), 'setting')}; "
        f"gradient errors of {means} % keep the order tensorwise, rowwise, BF16 weight gradient at "
        f"{finer.sum()} of {count(len(error), 'point')}, and the last recipe's speed is "
        f"{'measured' if speed[order[2]].notna().any() else 'not measured'}"
    )
    keys = pd.concat([group.reset_index() for group in both])
    verdict = by_share(min(float(faster.mean()), float(finer.mean())))
    if verdict is Verdict.REPRODUCED and speed[order[2]].isna().all():
        verdict = Verdict.PARTLY
    apart = timed["fp8_tensorwise"] - timed["fp8_rowwise"]
    figure = spread("tensorwise's lead less rowwise's", apart, "points", "+.1f")
    return Finding(verdict, why, figure, behind(keys, chosen))


@judges("C09")
def early_divergence(tables: Tables, claim: Claim) -> Finding:
    """Hold the mean gap of each arm against the spread of BF16's seeds, early and late."""
    curves = tables.gap_curves[tables.gap_curves["precision"] == "fp8_tensorwise"]
    early, late = claim.published["early_steps"], claim.published["late_step"]
    place = ["machine", "study", "model", "num_gpus", "setting"]
    rows = []
    for key, arm in curves.groupby([*place, "arm"], sort=False):
        if arm["seed"].nunique() < stats.MIN_PAIRS_FOR_INTERVAL or arm["step"].max() < late:
            continue
        noise = tables.seed_spread.merge(pd.DataFrame([key[:-1]], columns=place))
        both = pd.DataFrame({
            "gap": arm.groupby("step")["gap_pct"].mean().abs(),
            "noise": noise.groupby("step")["spread_pct"].min(),
        }).dropna()  # fmt: skip
        before, after = both[both.index <= early], both[both.index <= late].tail(1)
        if len(before) and len(after):
            rows.append({
                **dict(zip(place, key[:-1], strict=True)), "arm": key[-1],
                "early": (before["gap"] / before["noise"]).max(), "gap": before["gap"].max(),
                "late": (after["gap"] / after["noise"]).iloc[0],
            })  # fmt: skip
    if not rows:
        return undecided(f"no tensorwise arm has three seeds over {late:,} steps")
    found = pd.DataFrame(rows)
    shown, settled = found["early"] > 1, found["late"] <= 1
    why = (
        f"of {count(len(found), 'tensorwise arm')} with three seeds or more {shown.sum()} leave the"
        f" spread of BF16's seeds in the first {early} steps, and {settled.sum()} are inside it at "
        f"step {late:,}; the largest early gap is {found['gap'].max():.2f} % of the loss, "
        f"{found['early'].max():.2f} of that spread"
    )
    arms = tables.gaps.merge(found[[*place, "arm"]], on=[*place, "arm"])
    verdict = by_parts(shown.any(), settled.all())
    verdict = verdict if shown.any() else Verdict.CONTRADICTED
    figure = spread("largest early gap over the spread of seeds", found["early"], spec=".2f")
    return Finding(verdict, why, figure, behind(arms))


@judges("C10")
def schedules_help(tables: Tables, claim: Claim) -> Finding:
    """Judge runs that change their precision on the way against those in FP8 throughout."""

    def schedule(run: StoredRun) -> dict[str, str] | None:
        named = run.record.config.get("precision_schedule")
        return {"schedule": str(named)} if named else None

    changed = tables.of_records(schedule, "schedule")
    keys = tables.runs.merge(changed[_PLACE], on=_PLACE)["arm_key"]
    gaps = with_pairs(tables.gaps)
    with_one = gaps["arm_key"].isin(keys)
    if not with_one.any() or with_one.all():
        return undecided("no run changes its precision on the way")
    place = ["machine", "study", "model", "num_gpus"]
    both = gaps[with_one].merge(gaps[~with_one], on=place, suffixes=("", "_constant"))
    helps = both["gap_pct_high_95"] < both["gap_pct_low_95_constant"]
    why = f"the gap is smaller with a schedule in {helps.sum()} of {count(len(both), 'comparison')}"
    return of_cells(helps, why, mean_gap("gap with a schedule", gaps[with_one]),
        behind(gaps[with_one]),
    )  # fmt: skip


@judges("C14")
def learning_rate_breaks(tables: Tables, claim: Claim) -> Finding:
    """Look for FP8 arms that diverge early at a learning rate and not at a lower one."""
    runs = tables.runs[tables.runs["status"].isin(["completed", "diverged"])]
    runs = runs[(runs["device"] == "cuda") & ~runs["stale"]].drop_duplicates("arm_key")
    lost = (runs["status"] == "diverged") & (runs["steps_completed"] <= claim.published["steps"])
    sweeps = steps(along(runs.assign(lost=lost), "learning_rate"), "lost")
    sweeps = sweeps[sweeps["precision"] != "bf16"] if len(sweeps) else sweeps
    if sweeps.empty:
        return undecided("no FP8 arm was run at two learning rates")
    cured = sweeps["lost"].astype(bool) & ~sweeps["lost_before"].astype(bool)
    why = (
        f"in {cured.sum()} of {count(len(sweeps), 'step')} to a higher learning rate FP8 begins to "
        f"diverge within {claim.published['steps']} steps"
    )
    verdict = Verdict.REPRODUCED if cured.any() else Verdict.CONTRADICTED
    figure = Figure("steps of the sweep that break FP8", 100 * float(cured.mean()), "%")
    return Finding(verdict, why, figure, behind(sweeps))
