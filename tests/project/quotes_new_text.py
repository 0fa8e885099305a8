"""What the README and docs/results.md may say of the study new-text: gaps, floors, runs."""

from __future__ import annotations

import pandas as pd

from fp8study.analysis.claims.losses import seed_by_seed
from fp8study.analysis.claims.tables import Tables
from fp8study.analysis.floors import (
    AGAIN,
    KERNELS,
    RANDOM,
    TRAINED,
    kernel_pairs,
    pooled_table,
    scatter_table,
    validation_curve,
)
from fp8study.analysis.losses import loss_gap_table
from fp8study.analysis.runs.frames import metrics_frame, runs_frame
from fp8study.analysis.runs.pairing import shorten_arms
from fp8study.analysis.stats import paired_t_interval
from fp8study.core.studies import load_study
from fp8study.report import words
from fp8study.report.page import report_of
from tests.checkout import committed_runs
from tests.project.quotes import ends, gap_ends, one, per_cent, runs_of, stored


def new_text() -> list[str]:
    """What is said of the study new-text, by machine and of all together."""

    def said(row: pd.Series, level: int, ci: str) -> str:
        return f"{per_cent(row['gap_pct'], 2)} ({level} % CI {ci})"

    texts = []
    for machine in ("h200x2", "h100x4"):
        chosen = runs_of(machine)
        chosen = chosen[chosen["study"] == "new-text"]
        row = one(loss_gap_table(chosen), precision="fp8_tensorwise")
        assert (row["verdict"], row["num_pairs"]) == ("undecided", 3)
        texts.append(said(row, 95, gap_ends(row)))
    every = [run for run in committed_runs() if run.record.study == "new-text"]
    table = pooled_table(every, shorten_arms(runs_frame(every))).set_index("what")
    order = ["FP8 tensorwise", "FP8 rowwise", "FP8 rowwise, BF16 weight gradient"]
    rows = [table.loc[what] for what in order]
    assert [row["verdict"] for row in rows] == ["equivalent", "equivalent", "undecided"]
    assert [row["num_pairs"] for row in rows] == [5, 4, 4]
    tensorwise, rowwise, third = (said(row, 90, ends(row, "{}_90", 2)) for row in rows)
    sizes = [f"{row['size_pct']:.2f} %" for row in rows]
    floors = [
        f"{table.loc[rung, 'size_pct']:.2f} % ({table.loc[rung, 'num_runs']} pairs)"
        for rung in (KERNELS, AGAIN)
    ]
    return [
        *texts, f"tensorwise {tensorwise}, five seeds in {rows[0]['num_runs']} pairs",
        f"rowwise {rowwise}, four", f"BF16 weight gradients, {third}, four",
        f"of the size of {sizes[0]} (tensorwise), {sizes[1]} (rowwise) and {sizes[2]} (BF16",
        f"apart by {floors[0]}, the same run done again by {floors[1]}",
        f"Held out after 1,500 steps of a 1B at 3e-4: equivalent, {tensorwise}, five seeds;",
        *_of_3b(), *_of_going_on(),
    ]  # fmt: skip


def _of_3b() -> list[str]:
    """What is said of the study new-text-3b: its gaps, in the end and on the way."""
    runs = [run for run in committed_runs() if run.record.study == "new-text-3b"]
    frame = shorten_arms(runs_frame(runs))
    together = one(pooled_table(runs, frame), precision="fp8_tensorwise")
    assert (together["num_pairs"], together["num_runs"]) == (6, 10)
    assert together["verdict"] == "equivalent"
    told = f"{per_cent(together['gap_pct'], 2)} (90 % CI {ends(together, '{}_90', 2)})"
    held_out = loss_gap_table(frame, loss="validation_loss")
    beside, cooled, warmed, third = (
        one(held_out, arm=arm, machine="h200x2")
        for arm in (
            "FP8 tensorwise",
            "FP8 tensorwise, schedule fp8:-100 bf16",
            "FP8 tensorwise, schedule bf16:100 fp8",
            "FP8 rowwise, BF16 weight gradient",
        )
    )
    assert [row["num_pairs"] for row in (beside, cooled, warmed, third)] == [6, 6, 4, 4]
    trained = [
        one(loss_gap_table(frame), arm="FP8 tensorwise", machine=machine)
        for machine in ("h200x4", "h200x2")
    ]
    assert [(row["num_pairs"], row["verdict"]) for row in trained] == [
        (4, "equivalent"), (6, "equivalent"),
    ]  # fmt: skip
    first, second = (
        f"{per_cent(row['gap_pct'], 2)} (90 % CI {gap_ends(row, 90)})" for row in trained
    )
    curve = validation_curve(runs, frame)
    late = [
        [f"{gap:+.2f}" for gap in curve[curve["machine"].eq(row["machine"])
         & curve["arm"].eq("FP8 tensorwise") & curve["step"].ge(375)]["gap_pct"]]
        for row in trained
    ]  # fmt: skip
    tables = Tables(report_of(stored("h200x2")), ["h200x2"])
    won = one(seed_by_seed(tables, "precision_schedule"), num_pairs=6)
    assert won["bf16_gap_before"] / 2 > -won["low_95"]  # half of the gap is ruled out
    final = frame[frame["machine"].eq("h200x2") & frame["status"].eq("completed")]
    final = final.pivot_table(index="seed", columns="arm", values="loss_last20_mean")
    cool = final["FP8 tensorwise"] - final["FP8 tensorwise, schedule fp8:-100 bf16"]
    in_training = (100 * cool / final["BF16"]).dropna()
    assert len(in_training) == 6
    wins = paired_t_interval(in_training.tolist(), 0.95)
    assert wins.low > 0 and wins.high < (final["FP8 tensorwise"] / final["BF16"] - 1).mean() * 50
    return [
        f"In training it wins {in_training.mean():.3f} points (95 % CI {wins.low:.3f} to "
        f"{wins.high:.3f})",
        f"The last wins {-won['apart']:.2f} points (95 % CI "
        f"{words.number(-won['high_95'], '.3f')} to {-won['low_95']:.3f})",
        f"half of the gap, {won['bf16_gap_before'] / 2:.3f},",
        f"{told.replace(' % (', ' % on held-out text (', 1)}, six seeds, four of them twice;",
        f"in training {first}, and of the second time {second};",
        f"{', '.join(late[0][:-1])} and {late[0][-1]} % from step 375 to 1,000",
        f"and the second time {', '.join(late[1][:-1])} and {late[1][-1]} %",
        f"leaves {per_cent(cooled['gap_pct'], 2)} of {per_cent(beside['gap_pct'], 2)} (six seeds;",
        f"the first tenth in BF16 {per_cent(warmed['gap_pct'], 2)} (four seeds;",
        f"leaves {per_cent(third['gap_pct'], 2)} (90 % CI {gap_ends(third, 90)}; four seeds;",
        f"after 1,000 of a 3B at 2e-5 equivalent but not zero, {told}",
    ]


def _of_going_on() -> list[str]:
    """What is said of the study continue-in-fp8: gaps from trained weights, and their scatter."""
    runs = runs_of("h200x2")
    chosen = runs[runs["study"] == "continue-in-fp8"]
    curve = validation_curve(stored("h200x2"), chosen)
    assert set(curve["verdict"]) == {"equivalent"}
    assert sorted(curve["num_pairs"]) == [*[3] * 5, *[4] * 5]
    texts = []
    for arm in ("FP8 tensorwise", "FP8 rowwise"):
        trained, held_out = (
            one(loss_gap_table(chosen, loss=loss), arm=arm)
            for loss in ("loss_last20_mean", "validation_loss")
        )
        assert trained["verdict"] == held_out["verdict"] == "equivalent"
        told, trained_too = (
            f"{per_cent(row['gap_pct'], 2)}{where} (90 % CI {gap_ends(row, 90)})"
            for row, where in ((held_out, ""), (trained, " in training"))
        )
        texts += [f"{told.replace(' % (', ' % on held-out text (')}, {trained_too}"]
    of_3b = runs_of("h200x1")
    of_3b = of_3b[of_3b["study"] == "continue-3b"]
    trained, held_out = (
        one(loss_gap_table(of_3b, loss=loss), num_pairs=5)
        for loss in ("loss_last20_mean", "validation_loss")
    )
    assert trained["verdict"] == held_out["verdict"] == "equivalent"
    assert held_out["gap_pct_low_95"] > 0  # and not zero
    told = f"{per_cent(held_out['gap_pct'], 2)} (90 % CI {gap_ends(held_out, 90)})"
    trained_too = f"{per_cent(trained['gap_pct'], 2)} in training ({gap_ends(trained, 90)})"
    alone = scatter_table(metrics_frame(stored("h200x1")), of_3b)
    texts += [
        f"{told.replace(' % (', ' % on held-out text (')} and {trained_too}, five seeds",
        f"its pairs scatter by {one(alone, starts_from=TRAINED)['scatter_pct']:.2f} %",
        f"a 3B {told}, five",
    ]
    texts += _of_an_8b_going_on()
    both = runs[runs["study"].isin(["continue-in-fp8", "new-text"])]
    scatter = scatter_table(metrics_frame(stored("h200x2")), both).set_index("starts_from")
    assert set(scatter["learning_rate"]) == {3e-4}
    on, anew = (scatter.loc[start] for start in (TRAINED, RANDOM))
    return [
        *texts,
        f"pairs scatter by {on['scatter_pct']:.2f} % in training, from random weights at this rate "
        f"by {anew['scatter_pct']:.2f} %: {on['num_to_decide']} seeds decide, or "
        f"{anew['num_to_decide']}",
        f"{_held_out(texts[0])}, four seeds",
    ]


def _of_an_8b_going_on() -> list[str]:
    """What is said of the study continue-8b, on one GPU and on four."""
    runs = runs_of("h200x4")
    runs = runs[runs["study"] == "continue-8b"]
    texts = []
    for num_gpus, num_seeds in ((1, 4), (4, 3)):
        trained, held_out = (
            one(loss_gap_table(runs, loss=loss), num_gpus=num_gpus)
            for loss in ("loss_last20_mean", "validation_loss")
        )
        assert trained["verdict"] == held_out["verdict"] == "equivalent"
        assert trained["num_pairs"] == held_out["num_pairs"] == num_seeds
        gap, within = per_cent(held_out["gap_pct"], 2), f"(90 % CI {gap_ends(held_out, 90)})"
        texts += [
            f"{gap} on held-out text {within}",
            f"{per_cent(trained['gap_pct'], 2)} in training ({gap_ends(trained, 90)}) on "
            + ("one GPU, four seeds" if num_gpus == 1 else "four, three seeds"),
            f"at 1e-4, an 8B: {gap}** {within}, four seeds"
            if num_gpus == 1
            else f"on 4 GPUs {gap} {within}, three",
        ]
    alone = one(scatter_table(metrics_frame(stored("h200x4")), runs), starts_from=TRAINED)
    assert alone["num_pairs"] == 7
    early = one(validation_curve(stored("h200x4"), runs), num_gpus=1, step=100)
    (begun,) = (run for run in stored("h200x4") if run.record.study == "bf16-start-8b")
    assert early["verdict"] == "undecided"
    return [
        *texts,
        f"the seven pairs scatter by {alone['scatter_pct']:.2f} %",
        f"BF16 had seen {100 * begun.record.data['epochs']:.0f} % of their text",
        f"{per_cent(early['gap_pct'], 2)} (95 % CI {ends(early, '{}_95', 2)}) on one GPU",
    ]


def _held_out(told: str) -> str:
    """Return the part of a text that is about held-out text, as README has it."""
    return told.partition(", ")[0].replace(" on held-out text", "")


def null_texts(runs: pd.DataFrame) -> list[str]:
    """What is said of BF16 by another attention kernel, on new text."""
    chosen = runs[runs["study"] == "new-text"]
    kernels = kernel_pairs(chosen)
    apart = 100 * (kernels["loss_last20_mean"] / kernels["loss_last20_mean_base"] - 1).abs()
    assert len(apart) == 3
    gap = one(loss_gap_table(chosen), precision="fp8_tensorwise")
    held_out = one(loss_gap_table(chosen, loss="validation_loss"), precision="fp8_tensorwise")
    assert gap["num_pairs"] == held_out["num_pairs"] == 2
    curve = validation_curve(stored("h200x4"), chosen)
    end, soon = (one(curve, rung=KERNELS, step=step) for step in (1500, 188))
    fp8 = one(curve, rung="FP8 tensorwise", step=188)
    return [
        f"by {apart.min():.2f} to {apart.max():.2f} %",
        f"FP8's gaps there are {per_cent(gap['gap_pct'], 2)} in training and "
        f"{per_cent(held_out['gap_pct'], 2)} on held-out text (two seeds)",
        f"{per_cent(end['gap_pct'], 2)} ({ends(end, '{}_95', 2)}) on held-out text",
        f"{per_cent(soon['gap_pct'], 2)} after 188 steps, and FP8 at {per_cent(fp8['gap_pct'], 2)}",
    ]


def done_text() -> str:
    """How many runs of the study new-text are there, by machine."""
    done = [{run.record.run_id for run in stored(machine) if run.record.study == "new-text"}
            for machine in ("h200x2", "h200x4", "h100x4")]  # fmt: skip
    planned = {run.run_id for run in load_study("new-text").runs}
    assert set.union(*done) <= planned
    two, four, h100 = map(len, done)
    return (
        f"`new-text` has {len(set.union(*done))} of its {len(planned)} runs, all of a 1B, in "
        f"{two + four + h100} records: {two} on two H200, {four} on four, {h100} on four H100"
    )
