"""Claims about losses: whether FP8 ends where BF16 does, and what is said to help."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pandas as pd

from fp8study.analysis.claims.finding import Claim, Figure, Finding, Verdict, judges
from fp8study.analysis.claims.rules import (
    by_parts,
    by_share,
    ends,
    equal_losses,
    out_of,
    spread,
)
from fp8study.analysis.claims.tables import Tables, along
from fp8study.analysis.losses import (
    gap_curves,
    judged_pairs,
    pass_table,
    passes_by,
    with_pairs,
)
from fp8study.analysis.noise import tables as noise
from fp8study.analysis.runs.frames import PLACE, key_of
from fp8study.analysis.runs.naming import FAST_ACCUMULATION, FP8_HEAD
from fp8study.analysis.runs.pairing import DIVERGED, FAILURE_STUDIES, healthy, pairs_of, together
from fp8study.core.config import completed
from fp8study.core.fields import varying
from fp8study.core.records import MIN_PAIRS_FOR_INTERVAL, StoredRun
from fp8study.core.words import count

#: What `_new_text_windows` says of an arm, in % of BF16's loss.
_WINDOWS = ("early_gap", "early_spread", "late_gap", "late_spread")

#: What seeds of one arm share, on whatever machine: what was trained on what, by what.
_ALIKE = [
    "gpu_name", "study", "precision", "others", "corpus_sha256", "num_parameters",
    "version_torch", "version_torchao", "version_transformers",
]  # fmt: skip


@judges("A10", "A11")
def equal_on_several_gpus(tables: Tables, claim: Claim) -> Finding:
    gaps = tables.gaps[tables.gaps["num_gpus"] == claim.published["num_gpus"]]
    return equal_losses(claim, gaps[gaps["precision"] == "fp8_tensorwise"])


def seed_by_seed(tables: Tables, field: str) -> pd.DataFrame:
    """Judge FP8 with a list in `field` against FP8 with an empty one, in a study, seed by seed.

    One row per two arms with three seeds or more in both: what `judged_pairs` says of ``apart``,
    the difference of their gaps to BF16, % of its loss, and the list as a text. The arms differ in
    `field` alone. Studies are not pooled: one on repeated text, whose seeds lie far apart, would
    drown another. Machines are: runs are paired on their own, and a seed of several is their mean.
    ``bf16_…`` is how far the arm itself ends from BF16, ``bf16_…_before`` the other.
    """
    pairs = _gaps(tables, field)
    is_plain = pairs[field] == ""
    keys = ["machine", "study", "precision", "pair_key", "others"]
    both = pairs[~is_plain].merge(pairs[is_plain], on=keys, suffixes=("", "_before"))
    rows = []
    for _, arms in both.groupby([*_ALIKE, field], sort=False, dropna=False):
        gaps = arms.groupby("seed")[["gap", "gap_before"]].mean()
        if len(gaps) >= MIN_PAIRS_FOR_INTERVAL:
            ids = {"run_ids_before": together(arms["run_ids_before"])}
            found = judged_pairs((gaps["gap"] - gaps["gap_before"]).tolist(), arms, "apart")
            rows.append(arms.iloc[0].to_dict() | _from_bf16(arms, gaps) | found | ids)
    return pd.DataFrame(rows)


def _from_bf16(arms: pd.DataFrame, gaps: pd.DataFrame) -> dict[str, Any]:
    """Return what is said of the gaps to BF16 of an arm, and of that it is held against."""
    said: dict[str, Any] = {}
    for end in ("", "_before"):
        pairs = arms.assign(diverged=arms[f"diverged{end}"])
        found = judged_pairs(gaps[f"gap{end}"].tolist(), pairs, "gap")
        names = ("gap", "low_95", "high_95", "verdict")
        said |= {f"bf16_{name}{end}": found[name] for name in names}
    return said


def _gaps(tables: Tables, field: str) -> pd.DataFrame:
    """Return every healthy pair's final ``gap``, %, with a list of the FP8 run as a text.

    On held-out text where that was asked for: there seeds of one arm differ less than in training.
    """
    runs = _with_text(tables, field)
    scored = runs["validation_sequences"].fillna(0) > 0
    runs = runs.assign(final=runs["validation_loss"].where(scored, runs["loss_last20_mean"]))
    pairs = healthy(pairs_of(runs[~runs["speed_only"]], "final"))
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
    found, timed = best.iloc[0], _timed_skipping(tables, _are_ends)
    cost = (timed["speedup_pct_before"] - timed["speedup_pct"]).median()
    head = _timed_skipping(tables, lambda skip: skip == "lm_head")
    head = head[head["arm_before"].str.contains(FP8_HEAD)]  # as the tuned path computes it
    kept, plain = (found[f"bf16_verdict{end}"] == "equivalent" for end in ("", "_before"))
    verdict, so = Verdict.CONTRADICTED, ""
    if found["verdict"] == "undecided":
        verdict = Verdict.UNDECIDED
    elif found["high_90"] < -found["margin_pct"]:
        verdict = by_parts(True, cost <= claim.published["cost_points"])
    elif kept and plain:  # not by those layers, then
        verdict, so = Verdict.PARTLY, ": the quality is kept either way, and they need no BF16"
    figure = Figure(found["apart"], found["low_95"], found["high_95"], "95 % CI")
    said = "what they cost in speed is not measured"
    if len(timed):
        gpus = " and ".join(sorted({*timed["gpu_name"]}))
        moves = f"{'falls' if cost > 0 else 'rises'} by {abs(cost):.1f} points"
        moves = "moves by less than 0.1 points" if abs(cost) < 0.05 else moves
        said = f"FP8's lead {moves} with them ({gpus})"
    if len(head):
        falls = head["speedup_pct_before"] - head["speedup_pct"]
        said += (
            f"; with the last alone, on the tuned path, it falls by {ends(falls, '.1f')} points in "
            + count(len(falls), "setting")
        )
    return claim.found(
        verdict, figure, best, timed, head, seeds=found["num_pairs"], margin=found["margin_pct"],
        cost=said,
        own=_gap_text(found, ""), plain=_gap_text(found, "_before"), so=so, found=found["verdict"],
    )  # fmt: skip


def _gap_text(row: pd.Series, end: str) -> str:
    """Write a gap to BF16 with its verdict."""
    return f"{row[f'bf16_gap{end}']:+.2f} % ({row[f'bf16_verdict{end}']})"


def _timed_skipping(tables: Tables, skipped: Callable[[pd.Series], pd.Series]) -> pd.DataFrame:
    """Return FP8's leads with what is `skipped` in BF16, and with nothing ``_before``."""
    by_arm = _with_text(tables, "skip").drop_duplicates("arm_key").set_index("arm_key")["skip"]
    cells = tables.cells.assign(skip=tables.cells["arm_key"].map(by_arm))
    keys = ["machine", "study", "model", "num_gpus", "setting", "precision"]
    none = cells[cells["skip"] == ""]
    return cells[skipped(cells["skip"])].merge(none, on=keys, suffixes=("", "_before"))


@judges("B01")
def four_arms_equal(tables: Tables, claim: Claim) -> Finding:
    """Judge studies of several recipes at the end, and where their first pass over a text ended.

    Those at document B's length, and those that never saw a text again.
    """
    gaps, passes = with_pairs(tables.gaps), pass_table(tables.metrics, tables.runs)
    asked = (gaps["sequence_length"] == 4096) | (gaps["epochs"] <= 1)
    usual = ~gaps["study"].str.startswith(FAILURE_STUDIES)
    named = gaps["precision"].isin(["fp8_tensorwise", "fp8_rowwise"])
    gaps = gaps[asked & usual & named & (gaps["num_gpus"] == 1)]
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
    between = speed.dropna()[order[1]] > speed.dropna()[order[2]]
    verdict = by_share(min(float(faster.mean()), float(finer.mean())))
    if verdict is Verdict.REPRODUCED and (between.empty or not between.all()):
        verdict = Verdict.PARTLY
    third = "the third's speed is not measured"
    if len(between):
        gpus = tables.cells.loc[tables.cells["precision"] == order[2], "gpu_name"].unique()
        third = f"the third is slower than rowwise in {out_of(between)} ({' and '.join(gpus)})"
    means = ", ".join(f"{100 * mean:.1f}" for mean in error.mean())
    first = pass_table(tables.metrics, tables.runs)
    first = first[(first["passes"] == 1) & first["precision"].isin(order)]
    several = first.groupby(["machine", "study"])["precision"].transform("nunique") > 1
    first, kept = first[several], ""
    if len(first):
        same = out_of(first["verdict"] == "equivalent")
        kept = f"; in loss {same} of their arms are equivalent to BF16 after one pass over a text"
    together = tables.pooled_gaps
    together = together[together["precision"].isin(order) & together["epochs"].le(1)]
    if len(together):
        same = out_of(together["verdict"] == "equivalent")
        kept += f"; on text never repeated {same} are, machines together"
    return claim.found(
        verdict, spread(apart), *groups, errors, first, together, faster=out_of(faster),
        finer=out_of(finer), errors=means, third=third, kept=kept,
    )  # fmt: skip


@judges("C09")
def early_divergence(tables: Tables, claim: Claim) -> Finding:
    """Hold FP8's mean gap against the spread of BF16's seeds, early and late, on new text.

    The largest mean gap over the early steps, and over as many late ones: of chance alone the
    largest of many is always above a single one. The spread is the median over the same steps: at
    a step where curves cross it is next to nothing, and any gap would be large beside it.
    """
    windows = _new_text_windows(tables, claim)
    long = windows.dropna(subset="late_gap")
    if long.empty:
        return claim.open()
    short = windows[windows["late_gap"].isna()]
    shown, settled, parted = (
        table[f"{when}_gap"] > table[f"{when}_spread"]
        for table, when in ((long, "early"), (long, "late"), (short, "early"))
    )
    settled = ~settled
    verdict = by_parts(True, settled.all()) if shown.any() else Verdict.CONTRADICTED
    said = {name: ends(long[name], ".2f") for name in _WINDOWS}
    short_arms = f"of {count(len(short), 'arm')} with less new text {parted.sum()} parted early"
    if parted.any():
        times = short["early_gap"] / short["early_spread"]
        worst = short[times == times.max()].to_dict("records")[0]
        short_arms += " (at most {early_gap:.2f} % beside {early_spread:.2f} %)".format(**worst)
    return claim.found(
        verdict, spread(long["early_gap"] / long["early_spread"]),
        tables.gaps[tables.gaps["arm_key"].isin(windows["arm_key"])], shown=out_of(shown),
        settled=out_of(settled), models=", ".join(sorted({*long["model"]})), short=short_arms,
        seeds=ends(long["seeds"], ".0f"), **said,
    )  # fmt: skip


def _new_text_windows(tables: Tables, claim: Claim) -> pd.DataFrame:
    """Return one row per tensorwise arm with three pairs on text that was new at the steps asked.

    The largest mean gap, and the median spread of its BF16 runs, over the early steps, and over the
    late ones; the latter are missing where the arm ended, or saw its text again, before.
    """
    early, late = claim.published["early_steps"], claim.published["late_step"]
    curves = gap_curves(tables.metrics, tables.runs)
    usual = curves["arm_key"].isin(tables.gaps["arm_key"])
    usual &= ~curves["arm"].str.contains(FAST_ACCUMULATION)
    rows = []
    for key, arm in curves[usual & (curves["precision"] == "fp8_tensorwise")].groupby("arm_key"):
        steps = arm.groupby("step").agg(
            gap=("gap_pct", lambda gaps: abs(gaps.mean())), seeds=("seed", "nunique"),
            mean=("smooth_bf16", "mean"), deviation=("smooth_bf16", "std"),
        )  # fmt: skip
        steps["spread"] = 100 * steps["deviation"] / steps["mean"]
        is_new = steps.index * passes_by(arm.iloc[0], 1) <= 1
        steps = steps[is_new & (steps["seeds"] >= MIN_PAIRS_FOR_INTERVAL)]
        before, after = steps.loc[:early], steps.loc[late - early + 1 : late]
        if before.empty:
            continue
        after = after if steps.index.max() >= late else after.iloc[:0]
        found = (before["gap"].max(), before["spread"].median(), after["gap"].max(),
                 after["spread"].median())  # fmt: skip
        rows.append({"arm_key": key, "model": arm["model"].iloc[0], "seeds": steps["seeds"].max(),
                     **dict(zip(_WINDOWS, found, strict=True))})  # fmt: skip
    return pd.DataFrame(rows, columns=["arm_key", "model", "seeds", *_WINDOWS])


@judges("C10")
def schedules_help(tables: Tables, claim: Claim) -> Finding:
    """Judge runs that change their precision on the way against those in FP8 throughout.

    Where these end surely above BF16 (95 %), a schedule helps that surely lowers the loss and wins
    half of it back or more, and does not that surely wins back less. Elsewhere there is no loss
    to win back: that a schedule wins none says nothing, unless it does harm. That none helps is
    known only if something is of one that begins in BF16, and of one that ends in it.
    """
    field = claim.published["field"]
    judged = seed_by_seed(tables, field)
    if judged.empty:
        return claim.open()
    half, worse = -judged["bf16_gap_before"] / 2, judged["bf16_low_95_before"] > 0
    lost, moves = judged["verdict"] == DIVERGED, judged["verdict"] == "different"
    wins_back = worse & ~lost & (judged["high_95"] < 0) & (judged["apart"] <= half)
    helps = wins_back | moves & (judged["apart"] < 0)
    harms = (lost | moves) & ~helps
    worse |= judged["bf16_verdict_before"] == DIVERGED
    known = helps | harms | worse & (judged["low_95"] > half)
    verdict = by_share(float(helps[known].mean())) if known.any() else Verdict.UNDECIDED
    ways = judged[field].str.startswith("bf16:"), judged[field].str.endswith("bf16")
    if verdict is Verdict.CONTRADICTED and not all((known & way).any() for way in ways):
        verdict = Verdict.UNDECIDED
    # Of all seeds that it has beside a schedule.
    most = judged.sort_values("num_pairs", ascending=False, kind="stable")
    plain = most.drop_duplicates(_ALIKE)  # of which `others` leaves the schedule out
    ends_at = "; ".join(
        f"{row['bf16_gap_before']:+.2f} % (95 % CI {row['bf16_low_95_before']:+.2f} to "
        f"{row['bf16_high_95_before']:+.2f}) from BF16"
        for row in plain.to_dict("records")
    )
    at_first = judged[field].str.extract(r"^bf16:(\d+)", expand=False)
    warm = judged.assign(at_first=at_first).dropna(subset=["at_first", "lr_warmup_steps"])
    lasted = warm["at_first"] + " of " + warm["lr_warmup_steps"].astype(int).astype(str)
    begins = "".join(
        f"; BF16 at the start was {steps} steps of warm-up" for steps in lasted.unique()
    )
    return claim.found(
        verdict, spread(judged["apart"]), judged, holds=out_of(helps),
        open=int((~known).sum()),
        margin=judged["margin_pct"].max(), apart=ends(judged["apart"]),
        seeds=ends(judged["num_pairs"], "d"), throughout=ends_at, begins=begins,
        worse="" if worse.any() else ": no loss is shown that a schedule could win back",
    )  # fmt: skip
