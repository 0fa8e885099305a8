"""What docs/results.md may say of studies on single H100s, one of them on H200s, too."""

import pandas as pd

from fp8study.analysis.instruments import kernels_table
from fp8study.analysis.leads import leads_table
from fp8study.analysis.losses import comparisons, formats_table
from fp8study.analysis.matched import equal_time_table
from fp8study.analysis.runs.frames import metrics_frame, runs_frame
from fp8study.analysis.runs.pairing import shorten_arms
from fp8study.analysis.stats import judged
from fp8study.core.records import StoredRun
from fp8study.report.page import report_of
from tests.project.quotes import ends, gap_ends, one, per_cent, runs_of, stored


def h100_texts() -> list[str]:
    """What is said of one H100."""
    return [
        *_equal_time_texts(), *_stale_batch_texts(), *_recipe_texts(), *_optimizer_state_texts(),
    ]  # fmt: skip


def _of(study: str) -> list[StoredRun]:
    return [run for run in stored("h100x1") if run.record.study == study]


def _equal_time_texts() -> list[str]:
    """What is said of the time to one loss."""
    runs = _of("equal-time")
    frame, metrics = runs_frame(runs), metrics_frame(runs)
    row = one(equal_time_table(runs, frame, metrics), precision="fp8_tensorwise")
    assert row["num_pairs"] == 4
    of_runs = metrics.groupby("run_id", as_index=False)["step_time_ms"].median().merge(frame)
    steps = of_runs.pivot_table(index="seed", columns="precision", values="step_time_ms")
    shorter = 100 * (1 - steps["fp8_tensorwise"] / steps["bf16"]).mean()
    report = report_of(runs)
    gaps = [one(table, precision="fp8_tensorwise") for table in
            (report.loss_gaps, report.validation_gaps)]  # fmt: skip
    assert [gap["verdict"] for gap in gaps] == ["undecided"] * 2
    train, held_out = (f"{per_cent(gap['gap_pct'], 2)} (95 % CI {gap_ends(gap)})" for gap in gaps)
    return [
        f"held-out text, {row['loss']:.2f} nats, it takes {row['seconds']:.0f} s of steps where "
        f"BF16 takes {row['seconds_bf16']:.0f} s: {row['saved_pct']:.1f} % less (95 % CI "
        f"{row['low_95']:.1f} to {row['high_95']:.1f}). Its steps are {shorter:.1f} % shorter",
        f"Whether the losses at the end are equal is undecided: {train}, on held-out text "
        f"{held_out}",
    ]


def _stale_batch_texts() -> list[str]:
    """What is said of a stale optimizer at larger batches."""
    gaps = comparisons(report_of(_of("stale-batch")).loss_gaps)
    assert set(gaps["num_pairs"]) == {3} and gaps["stale"].all()
    accumulates = gaps["setting"].str.contains("4 accumulation steps")
    (_, four), (_, steps) = *gaps[~accumulates].iterrows(), *gaps[accumulates].iterrows()
    return [
        f"it ends {per_cent(four['gap_pct'])} above BF16 at batch 4 and "
        f"{per_cent(steps['gap_pct'])} above it with 4 accumulation steps, at "
        f"{four['loss']:.2f} and {steps['loss']:.2f} against {four['loss_bf16']:.2f} and "
        f"{steps['loss_bf16']:.2f}",
    ]


def _recipe_texts() -> list[str]:
    """What is said of the three recipes' speed, and of the layers that stay in BF16."""
    runs = shorten_arms(runs_frame(_of("recipe-speed")))
    leads = leads_table(runs)
    assert (set(leads["num_pairs"]), set(leads["num_sessions"])) == ({2}, {1})
    by_arm = leads.set_index("arm")
    plain, rowwise, third = (
        by_arm.loc[name] for name in ("FP8 tensorwise", "FP8 rowwise",
                                      "FP8 rowwise, BF16 weight gradient")
    )  # fmt: skip
    (both,) = by_arm[by_arm.index.str.contains("q_proj")].to_dict("records")
    return [
        f"tensorwise {per_cent(plain['lead_pct'])}, rowwise {per_cent(rowwise['lead_pct'])}, "
        f"rowwise with BF16 weight gradients {per_cent(third['lead_pct'])}",
        f"peaks change by {per_cent(plain['memory_change_pct'])}, "
        f"{per_cent(rowwise['memory_change_pct'])} and {per_cent(third['memory_change_pct'])}",
        f"as much with the first layer in BF16, too: {per_cent(both['lead_pct'])}",
        *_recipe_time_texts(),
    ]


def _recipe_time_texts() -> list[str]:
    """What is said of where the recipes' profiled steps spend their time."""
    times = kernels_table(report_of(_of("recipe-speed")).instruments).set_index("arm").fillna(0)
    gemms = times["gemm_fp8"] + times["gemm_bf16"]
    rowwise, third = "FP8 rowwise", "FP8 rowwise, BF16 weight gradient"
    return [
        f"its casts and other fused kernels take {times['fused'][third]:.0f} ms of a step instead "
        f"of {times['fused'][rowwise]:.0f}, its GEMMs {gemms[third]:.0f} instead of "
        f"{gemms[rowwise]:.0f}",
    ]


def _optimizer_state_texts() -> list[str]:
    """What is said of narrower optimizer states and of FP16, seed by seed against FP32 states."""
    both = pd.concat([runs_of("h100x1"), runs_of("h200x4")])
    both = both[both["study"] == "optimizer-states"]
    by_card = formats_table(both).astype({"precision": str})
    assert {*by_card["num_pairs"]} == {3} and {*by_card["verdict"]} == {"equivalent"}
    arms = by_card.groupby(["precision", "optimizer_state"])
    less = arms["memory_change_pct"].median()
    apart = (arms["gap_pct"].max() - arms["gap_pct"].min()).max()
    by_seed = both.assign(state=both["optimizer_state"].fillna("fp32")).pivot(
        index="seed", columns=["precision", "state"], values="loss_last20_mean"
    )
    gaps = 100 * (by_seed.div(by_seed["bf16", "fp32"], axis=0) - 1)
    found = {arm: judged(gaps[arm].dropna().tolist(), 0.25, "gap_pct") for arm in [*less.index]}
    assert {row["verdict"] for row in found.values()} == {"equivalent"}
    assert sorted(row["num_pairs"] for row in found.values()) == [3, 6, 6, 6, 6, 6]
    (bf16, fp8), learnt = ("bf16", "fp8_tensorwise"), report_of(_of("optimizer-states")).loss_gaps
    return [
        f"BF16 ends about {learnt['learnt_pct'].mean():.0f} % below what the tokens' frequencies "
        "alone give",
        f"BF16 states end {_gap(found[bf16, 'bf16'])}, FP8 states {_gap(found[bf16, 'fp8'])}, FP16 "
        f"{_gap(found['fp16', 'fp32'])}",
        f"with FP8 GEMMs {_gap(found[fp8, 'fp32'])} with FP32 states, {_gap(found[fp8, 'bf16'])} "
        f"with BF16 and {_gap(found[fp8, 'fp8'])} with FP8 ones",
        f"{_less(less[bf16, 'bf16'])} and {_less(less[bf16, 'fp8'])} less, with FP8 GEMMs "
        f"{_less(less[fp8, 'fp32'])}, {_less(less[fp8, 'bf16'])} and {_less(less[fp8, 'fp8'])}",
        f"three on an H100 and three on H200s, whose means are at most {apart:.2f} points apart",
    ]


def _gap(row: dict[str, float]) -> str:
    return f"{per_cent(row['gap_pct'], 2)} ({ends(pd.Series(row), '{}_95', 2)})"


def _less(change_pct: float) -> str:
    assert change_pct < 0
    return f"{-change_pct:.0f} %"
