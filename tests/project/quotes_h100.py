"""What docs/results.md may say of the studies on single H100s."""

import pandas as pd

from fp8study.analysis.instruments import kernels_table
from fp8study.analysis.leads import leads_table
from fp8study.analysis.losses import comparisons, formats_table
from fp8study.analysis.matched import equal_time_table
from fp8study.analysis.runs.frames import metrics_frame, runs_frame
from fp8study.analysis.runs.pairing import shorten_arms
from fp8study.core.records import StoredRun
from fp8study.report.page import report_of
from tests.project.quotes import ends, gap_ends, one, per_cent, stored


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
    runs = _of("optimizer-states")
    found = formats_table(runs_frame(runs))
    assert set(found["num_pairs"]) == {3}
    assert set(found["verdict"]) == {"equivalent"}
    row = found.set_index(["precision", "optimizer_state"])
    plain, fp8 = row.loc["bf16"], row.loc["fp8_tensorwise"]
    learnt = report_of(runs).loss_gaps["learnt_pct"].mean()
    return [
        f"BF16 ends about {learnt:.0f} % below what the tokens' frequencies alone give",
        f"BF16 states end {_gap(plain.loc['bf16'])}, FP8 states {_gap(plain.loc['fp8'])}, FP16 "
        f"{_gap(row.loc['fp16', 'fp32'])}",
        f"with FP8 GEMMs {_gap(fp8.loc['fp32'])} with FP32 states, {_gap(fp8.loc['bf16'])} with "
        f"BF16 and {_gap(fp8.loc['fp8'])} with FP8 ones",
        f"{_less(plain.loc['bf16'])} and {_less(plain.loc['fp8'])} less, with FP8 GEMMs "
        f"{_less(fp8.loc['fp32'])}, {_less(fp8.loc['bf16'])} and {_less(fp8.loc['fp8'])}",
    ]


def _gap(row: pd.Series) -> str:
    return f"{per_cent(row['gap_pct'], 2)} ({ends(row, '{}_95', 2)})"


def _less(row: pd.Series) -> str:
    assert row["memory_change_pct"] < 0
    return f"{-row['memory_change_pct']:.0f} %"
