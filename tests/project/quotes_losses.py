"""What docs/results.md may say of skipped layers, schedules and the same run done again."""

import re
from typing import Any

from fp8study.analysis.advice.question import answer, question_for
from fp8study.analysis.claims.losses import seed_by_seed
from fp8study.analysis.claims.tables import Tables
from fp8study.analysis.losses import comparisons
from fp8study.analysis.matched import equal_time_table, matched_loss_table
from fp8study.analysis.noise import tables as noise
from fp8study.analysis.runs.frames import metrics_frame, runs_frame
from fp8study.analysis.runs.pairing import goes_on
from fp8study.core.recipes import FP8_RECIPES
from fp8study.report import noise_sentences
from fp8study.report.page import Report, report_of
from tests.checkout import ROOT, committed_runs
from tests.project.quotes import ends, gap_ends, one, per_cent, stored

MACHINE = "h200x1"
STORIES = "precision-noise"
STUDIES = ("skipped-layers", "schedules")


def loss_texts() -> list[str]:
    """What is said of losses on one H200 at 5e-5 and, of an 8B, 2e-5."""
    runs = [run for run in stored(MACHINE) if run.record.study in STUDIES]
    report = report_of(runs)
    eight = report_of([run for run in stored(MACHINE) if run.record.study.startswith("loss-8b")])
    return [
        *_arms_texts(report), *_again_texts(report), *_eight_b_again_texts(eight),
        *_batch_2_texts(), *_growth_texts(),
    ]  # fmt: skip


def _arms_texts(report: Report) -> list[str]:
    tables = Tables(report, [MACHINE])
    skips = seed_by_seed(tables, "skip")
    skips = skips[skips["skip"].str.contains("lm_head")]
    schedules = seed_by_seed(tables, "precision_schedule")
    assert set(skips["num_pairs"]) == {6}
    assert set(schedules["num_pairs"]) == {5}
    by_schedule = schedules.set_index("precision_schedule")
    late, early = "fp8_tensorwise:-25 bf16", "bf16:25 fp8_tensorwise"
    both = f"{early}:-25 bf16"
    verdicts = ["undecided", "equivalent", "equivalent"]
    assert [*by_schedule.loc[[early, late, both], "verdict"]] == verdicts
    gaps = report.validation_gaps
    assert set(gaps.loc[gaps["study"] == "skipped-layers", "verdict"]) == {"equivalent"}
    (row,) = skips.to_dict("records")
    first, *others = (_ends(by_schedule.loc[name]) for name in (early, late, both))
    second, third = (words.replace("95 % CI ", "") for words in others)
    plain = one(gaps, study="schedules", arm="FP8 tensorwise")
    assert plain["verdict"] == "undecided"
    assert set(schedules["bf16_verdict_before"]) == {"undecided"}
    assert set(schedules["lr_warmup_steps"]) == {50}
    return [
        f"ends {_ends(row)} from FP8 in every layer",
        f"{first}, {second} and {third}",
        f"{per_cent(plain['gap_pct'], 2)} (95 % CI {gap_ends(plain)}) from BF16 on held-out text",
    ]


def assert_by_rate(report: Report) -> None:
    """On new text what is decided is at rates of at most 5e-5, and nothing is at 1e-4 and 3e-4."""
    gaps = comparisons(report.loss_gaps)
    gaps = gaps[~gaps["stale"].astype(bool) & (gaps["device"] == "cuda") & (gaps["epochs"] <= 1)]
    gaps = gaps[~goes_on(gaps)]
    rates = report.runs.drop_duplicates("arm_key").set_index("arm_key")["learning_rate"]
    rate = gaps["arm_key"].map(rates)
    known = gaps["verdict"] != "undecided"
    assert set(gaps.loc[known, "verdict"]) == {"equivalent"}
    assert rate[known].max() == 5e-5
    assert {1e-4, 3e-4} <= {*rate[~known]}
    assert list(gaps.loc[known, "model"]).count("llama-3.1-8b") == 5


def _ends(row: Any) -> str:
    return f"{per_cent(row['apart'], 2)} (95 % CI {ends(row, '{}_95', 2)})"


def _again_texts(report: Report) -> list[str]:
    """Hold the BF16 runs of both studies, which are the same, against each other."""
    runs = report.runs[report.runs["precision"] == "bf16"]
    first, second = (runs[runs["study"] == study].set_index("run_id") for study in STUDIES)
    both = first.join(second, how="inner", suffixes=("_1", "_2"))
    assert len(both) == 5
    apart, unseen = (
        100 * (both[f"{loss}_2"] / both[f"{loss}_1"] - 1).abs()
        for loss in ("loss_last20_mean", "validation_loss")
    )
    odd = apart.idxmax()
    metrics = report.metrics.pivot_table("loss", "step", ["study", "run_id"])
    curve = 100 * (metrics[STUDIES[1], odd] / metrics[STUDIES[0], odd] - 1).abs()
    fp8 = report.runs[
        (report.runs["study"] == STUDIES[1])
        & (report.runs["arm"] == "FP8 tensorwise")
        & (report.runs["seed"] == both.loc[odd, "seed_1"])
    ]
    (loss,) = fp8["loss_last20_mean"]
    above = 100 * (loss / both.loc[odd, "loss_last20_mean_2"] - 1)
    return [
        f"Four seeds of five do, to {apart.drop(odd).max():.3f} %",
        f"The fifth ends {apart[odd]:.2f} % apart, {unseen[odd]:.2f} % on held-out text",
        f"For 140 steps its losses agree to {curve[:140].max():.2f} %; at step {curve.idxmax()} "
        f"they differ by {curve.max():.1f} %",
        f"FP8 ends {above:.2f} % above one of the two BF16 runs and "
        f"{100 * (loss / both.loc[odd, 'loss_last20_mean_1'] - 1):.2f} % above the other",
    ]


def _eight_b_again_texts(report: Report) -> list[str]:
    """Give the 8B's loss at the second of its study's rates, and its first runs done again."""
    known = report.runs.set_index("arm_key")["learning_rate"].to_dict()
    trained, unseen = (
        one(gaps[gaps["arm_key"].map(known) == 2e-5], study="loss-8b")
        for gaps in (report.loss_gaps, report.validation_gaps)
    )
    assert {trained["verdict"], unseen["verdict"]} == {"equivalent"}
    assert {trained["num_pairs"], unseen["num_pairs"]} == {6}
    runs = report.runs[report.runs["learning_rate"] == 2e-5]
    first = runs[runs["study"] == "loss-8b"]
    last = first.pivot(index="seed", columns="precision", values="loss_last20_mean")
    gaps = 100 * (last["fp8_tensorwise"] / last["bf16"] - 1)
    twice = runs[runs["seed"].isin([0, 1])]
    assert len(twice) == 8
    said = [
        f"{per_cent(trained['gap_pct'], 2)} (95 % CI {gap_ends(trained)})",
        f"on held-out text {per_cent(unseen['gap_pct'], 2)} ({gap_ends(unseen)})",
        f"Its pairs differ by {gaps.min():+.2f} to {gaps.max():+.2f} %".replace("-", "−"),
    ]
    for loss in ("loss_last20_mean", "validation_loss"):
        table = twice.pivot(index=["precision", "seed"], columns="study", values=loss)
        apart = 100 * (table["loss-8b-2"] / table["loss-8b"] - 1).abs()
        bf16, fp8 = apart["bf16"], apart["fp8_tensorwise"]
        said.append(
            f"{bf16[0]:.2f} and {bf16[1]:.2f} % apart in BF16, "
            f"{fp8[0]:.2f} and {fp8[1]:.2f} % in FP8"
        )
    return said


def _batch_2_texts() -> list[str]:
    """Give the losses of a 1B at batch 2: not sharded, under FSDP2, and with its head in FP8."""
    said = []
    for machine, strategy, head in (
        (MACHINE, "none", ["lm_head"]), ("h200x4", "fsdp2", ["lm_head"]), ("h200x4", "none", [])
    ):  # fmt: skip
        runs = [
            run for run in stored(machine)
            if run.record.study == "check-loss" and run.record.config["num_gpus"] == 1
            and run.record.config["strategy"] == strategy
        ]  # fmt: skip
        in_fp8 = [run for run in runs if run.record.config["precision"] == "fp8_tensorwise"]
        assert all(run.record.config["skip"] == head for run in in_fp8)
        report = report_of(runs)
        trained, unseen = one(report.loss_gaps), one(report.validation_gaps)
        assert {trained["verdict"], unseen["verdict"]} == {"equivalent"}
        assert {trained["num_pairs"], unseen["num_pairs"]} == {6}
        said += [
            f"{per_cent(trained['gap_pct'], 2)} (95 % CI {gap_ends(trained)})",
            f"on held-out text {per_cent(unseen['gap_pct'], 2)} ({gap_ends(unseen)})",
        ]
        if machine == "h200x4":  # scored eight times, the other three
            saved = one(equal_time_table(runs, report.runs, report.metrics))
            share, low, high = (f"{saved[n]:.1f}" for n in ("saved_pct", "low_95", "high_95"))
            said.append(f"one held-out loss in {share} % less time (95 % CI {low} to {high})")
    return said


def _growth_texts() -> list[str]:
    """What is said of one loss that all batches come down to."""
    found = report_of([run for run in stored(MACHINE) if run.record.study == "batch-growth"])
    rows = matched_loss_table(found.metrics, found.runs)
    assert {*rows["effective_batch"]} == {1, 8, 32}
    assert list(rows.sort_values("effective_batch")["num_pairs"]) == [3, 3, 2]
    elsewhere = [run for run in stored() if run.record.study == "batch-growth"]
    third = one(
        matched_loss_table(metrics_frame(elsewhere), runs_frame(elsewhere)), effective_batch=32
    )
    assert third["num_pairs"] == 1
    one_, eight, most = (per_cent(gap, 2) for gap in rows["gap_pct"])
    slope, low, high = (
        f"{rows[name].iloc[0]:+.3f}".replace("-", "−")
        for name in ("slope_points", "slope_low_95", "slope_high_95")
    )
    return [
        f"another box: {per_cent(third['gap_pct'], 2)}, where BF16 has come down to "
        f"{third['loss']:.2f}",
        f"{one_} of BF16's loss at a batch of 1, {eight} at 8 and {most} at 32, where BF16 has "
        f"come down to {rows['loss'].iloc[0]:.2f} nats; with each doubling {slope} points (95 % CI "
        f"{low} to {high})",
    ]


def noise_texts() -> list[str]:
    """What is said of FP8's error in a gradient, and of the batches at which it would matter."""
    runs = [run for run in committed_runs() if run.record.noise]
    told = [
        noise_sentences.here(place).partition(", ")[0] for place in noise_sentences.places(runs)
    ]
    assert told == ["llama-3.2-1b on text:tinystories-train.txt",
                    "llama-1b-width-1024 on text:english-prose.txt",
                    "llama-3.2-1b on text:english-prose.txt"]  # fmt: skip
    answers = re.findall(r"^- .*$", noise_sentences.answer(runs), re.MULTILINE)
    share, batch = r"([\d,]+(?: to [\d,]+)?) % (?:at|after)", r"([\d,]+ to [\d,]+) (?:at the|after)"
    shares = [re.findall(share, line) for line in answers]
    batches = [re.findall(batch, line.partition("equal at")[2]) for line in answers]
    scale = noise.over_runs(noise.scale_table, runs)
    start = scale[(scale["scope"] == "all") & (scale["step"] == 0)]
    other, stories = (rows["noise_scale"] for _, rows in start.groupby(start["study"] == STORIES))
    narrow = noise.over_runs(noise.gradient_table, noise_sentences.places(runs)[1])
    narrow = narrow[narrow["precision"].isin(FP8_RECIPES) & (narrow["reference"] == "bf16")]
    worst = narrow[narrow["scope"].eq("all") & narrow["step"].gt(0) & narrow["seed"].eq(1)]
    worst = worst["worst_error"]
    off = re.search(r"off by (.*?), a BF16 one by (.*?) \(", said := noise_sentences.gemms(runs))
    zero = re.search(r": ([\d,]+ of [\d,]+ GEMMs) lose more than 1 %, and their operands are", said)
    assert "none is cut off" in said and "as others are" in said
    assert off
    assert zero
    asked = question_for([], "llama-3.1-8b", 1, 4096, 1, "h200")
    open_ = answer(asked, ROOT / "results").loss_uncovered
    (steps,) = (line for line in open_ if line.startswith("steps of more than"))
    of_any = re.search(r"\(any model: (.+)\)", steps)
    assert of_any
    return [
        f"No loss from random weights was settled in steps of more than {of_any[1]} tokens, nor of "
        f"an 8B in {steps.partition(' with ')[0]}",
        f"is {shares[0][0]} % of its sampling noise at the start and {shares[0][1]} % after "
        "training for a 1B on simple stories (four seeds)",
        f"equal at {batches[0][0]} sequences of 2,048 tokens at the start and {batches[0][1]} "
        "sequences after training, less than a million tokens",
        f"the same 1B (one seed) is at {batches[2][0]} and {batches[2][1]} sequences, a model half "
        f"as wide (two seeds) at {batches[1][0]} and {batches[1][1]}: beyond a million tokens",
        f"the noise scale is {other.min():.0f} to {other.max():.0f} sequences there, not "
        f"{stories.min():.0f} to {stories.max():.0f}",
        f"off by {worst.max():.2f} times its gradient in tensorwise, another by "
        f"{100 * worst.min():.0f} % in every recipe",
        f"One FP8 GEMM is off by {off[1]}, one in BF16 by {off[2]}.",
        f"become zero in {zero[1]}",
    ]
