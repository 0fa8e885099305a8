"""The rows of tables that only the pages show, in the pages' words."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Sequence

import pandas as pd
from scipy.stats import quantile_test

from fp8study.analysis import instruments, stats
from fp8study.analysis.floors import AGAIN, KERNELS, RANDOM
from fp8study.analysis.losses import comparisons, with_pairs
from fp8study.analysis.noise.tables import ALIKE, DOMINATED
from fp8study.analysis.runs.frames import run_path
from fp8study.analysis.runs.pairing import DIVERGED, goes_on, healthy, together
from fp8study.core.hardware import GPU_PEAKS, find_peak
from fp8study.core.recipes import GEMMS
from fp8study.core.records import RunRecord, StoredRun
from fp8study.report import layouts
from fp8study.report.loss_sentences import shown_equal
from fp8study.report.page import Report
from fp8study.report.table import Layout
from fp8study.report.words import (
    count,
    in_words,
    interval,
    machine_name,
    named_machines,
    number,
    own_first,
    rate,
    recipe,
    span,
)

_END = "end"


def warning_texts(record: RunRecord) -> list[str]:
    """Return a record's warnings; one that today's rule would not give says so."""
    return [
        f"{text} (by an earlier limit)"
        if text.startswith("the allocator took") and not record.timing_is_void
        else text
        for text in record.warnings
    ]


def warnings(stored: Sequence[StoredRun]) -> pd.DataFrame:
    """List what the runs of a machine warn of, and how many of which studies do."""
    found = [
        (run.machine_label, text, run.record.study, run_path(run))
        for run in stored
        for text in warning_texts(run.record)
    ]
    groups = pd.DataFrame(found, columns=["machine", "warning", "study", "run_ids"]).groupby(
        ["machine", "warning"], as_index=False, sort=False
    )
    table = groups.agg(
        num_runs=("study", "size"),
        studies=("study", lambda names: ", ".join(dict.fromkeys(names))),
        run_ids=("run_ids", together),
    )
    return own_first(table.sort_values("num_runs", ascending=False, kind="stable"))


def peaks(runs: pd.DataFrame, documents: pd.DataFrame) -> pd.DataFrame:
    """The peaks of the GPUs of these runs, and of ``report/documents.csv``."""
    names = [*runs["gpu_name"].dropna().unique(), *documents["document"].unique()]
    used = {peak for name in names if (peak := find_peak(name))}
    return pd.DataFrame([dataclasses.asdict(peak) for peak in GPU_PEAKS if peak in used])


def utilisation(frame: pd.DataFrame) -> pd.DataFrame:
    """Add ``gemm_pct``: how fast the GEMMs ran inside the profiled step, % of their GEMM peak.

    That peak is the faster of what they did alone and what they did there.
    """
    table = instruments.utilisation_table(frame)
    inside = table["arm_key"].map(instruments.gemm_pct(frame))
    faster = inside.clip(lower=100).fillna(100) / 100
    return table.assign(
        gemm_pct=inside / faster,
        achievable_tflops=table["achievable_tflops"] * faster,
        mfu_achievable_pct=table["mfu_achievable_pct"] / faster,
    )


def overhead(frame: pd.DataFrame) -> pd.DataFrame:
    """By how much steps with instruments took longer than steps without, by machine, %."""
    rows = []
    for (machine, gpu), runs in frame.groupby(["machine", "gpu_name"]):
        pairs = instruments.overhead_pairs(runs)
        if len(pairs) >= stats.MIN_FOR_MEDIAN_INTERVAL:
            ends = quantile_test(pairs, p=0.5).confidence_interval()
            rows.append({
                "machine": machine, "gpu_name": gpu, "num_pairs": len(pairs),
                "interval": interval(ends.low, ends.high, "+.2f"),
                "median_pct": statistics.median(pairs),
            })  # fmt: skip
    return pd.DataFrame(rows)


def rungs(ladder: pd.DataFrame) -> pd.DataFrame:
    """Medians of the noise ladder's rungs, the lowest first."""
    if ladder.empty:
        return ladder
    by = ladder.groupby(["machine", "study", "model", "rung"], sort=False)
    table = by.agg(
        num_pairs=("rung", "size"),
        median_pct=("difference_pct", "median"),
        num_equal=("difference_pct", lambda values: (values == 0).sum()),
        run_ids=("run_ids", together),
    ).reset_index()
    return table.sort_values(["machine", "study", "model", "median_pct"], kind="stable")


def by_pass(table: pd.DataFrame) -> tuple[pd.DataFrame, Layout]:
    """Put the ends of an arm's first passes, and of its run, beside each other.

    From `fp8study.analysis.losses.pass_table`: a row per arm with a column for each end, the mean
    paired difference and half of its 95 % interval, in %; and the layout with these columns.
    """
    arm = ["machine", "study", "model", "num_gpus", "setting", "arm", "arm_key"]
    cells = table.assign(
        end=[f"pass {p:.0f}" if p == int(p) else _END for p in table["passes"]],
        cell=[
            f"{number(gap, '+.2f')} ±\u00a0{(high - low) / 2:.2f}"
            for gap, low, high in table[["gap_pct", "low_95", "high_95"]].to_numpy()
        ],
    ).sort_values("passes", kind="stable")
    wide = cells.pivot_table(index=arm, columns="end", values="cell", aggfunc="first")
    ends = [end for end in ("pass 1", "pass 2", _END) if end in wide]
    columns = dict(layouts.PASSES.columns) | {end: (end, "") for end in ends}
    groups = table.groupby(arm)
    rows = groups[["num_pairs", "passes"]].max().join(groups["run_ids"].agg(together)).join(wide)
    return with_labels(rows.reset_index()), dataclasses.replace(layouts.PASSES, columns=columns)


def verdicts(report: Report) -> pd.DataFrame:
    """What came of the comparisons of losses, a row for each machine and kind of loss.

    ``where`` names them; the rest is of `verdict_row`.
    """
    found = []
    for kind, gaps in (("training", report.loss_gaps), ("unseen text", report.validation_gaps)):
        for machine, rows in named_machines(healthy(gaps)):
            for device, known in rows.groupby("device", sort=False):
                cpu = "" if device == "cuda" else ", a CPU that emulates FP8"
                row = verdict_row(known)
                if row["num_judged"] or row["num_few"]:
                    found.append({"where": f"{kind}, {machine}{cpu}"} | row)
    return pd.DataFrame(found)


def verdict_row(gaps: pd.DataFrame) -> dict[str, object]:
    """Count the verdicts of some loss gaps; ``num_few`` have too few seeds, arms of a sweep aside.

    ``span`` and ``detectable`` are those of the judged gaps, in %.
    """
    gaps = comparisons(gaps)
    gone = gaps["verdict"] == DIVERGED
    few = gaps["gap_pct_low_90"].isna() & ~gone
    tested = gaps[~few & ~gone & gaps["margin_pct"].notna()]
    within, apart = (tested[tested["verdict"] == name] for name in ("equivalent", "different"))
    sure = int(((within["gap_pct_low_95"] > 0) | (within["gap_pct_high_95"] < 0)).sum())
    better = int((apart["gap_pct"] < 0).sum())
    return {
        "num_judged": len(tested),
        "span": span(tested["gap_pct"], "+.2f") if len(tested) else "",
        "equivalent": f"{len(within)}{f', {sure} surely not zero' * bool(sure)}",
        "different": f"{len(apart)}{f', FP8 better in {better}' * bool(better)}",
        "undecided": str(len(tested) - len(within) - len(apart)),
        "detectable": span(tested["detectable_pct"], ".2f") if len(tested) else "",
        "num_few": int(few.sum()),
        "run_ids": together(gaps["run_ids"]),
    }


def scatter(table: pd.DataFrame) -> pd.DataFrame:
    """`fp8study.analysis.floors.scatter_table` in words: the rate, and the runs that rose."""
    risen = table["num_risen"].map(str) + " of " + table["num_runs"].map(str)
    return table.assign(
        rate=table["learning_rate"].map(rate),
        # Where the first loss is a trained model's, that of a harder text is a rise.
        risen=risen.where(table["starts_from"] == RANDOM, "–"),
    )


def pooled(table: pd.DataFrame) -> pd.DataFrame:
    """`fp8study.analysis.floors.pooled_table` in words: the 90 % interval, and floors as such."""
    floors = {KERNELS: f"BF16 by {KERNELS}", AGAIN: AGAIN}
    ends = zip(table["low_90"], table["high_90"], strict=True)
    return table.assign(
        what=[floors.get(what, f"{what} v BF16") for what in table["what"]],
        rate=table["learning_rate"].map(rate),
        num_steps=table["num_steps"].map("{:,.0f}".format),
        interval=["" if pd.isna(low) else stats.interval_text(low, high) for low, high in ends],
    )


def settled_losses(report: Report) -> pd.DataFrame:
    """Say where FP8's loss is shown equal: a row for a model, its first weights and its GPUs.

    Of each the highest learning rate, then the longest training, then the most seeds.
    """
    gaps = shown_equal(report)
    facts = report.runs.groupby("arm_key")[["learning_rate", "num_steps", "num_tokens_seen"]].max()
    table = gaps.join(facts, on="arm_key")
    table["starts_from"] = ["BF16's" if on else RANDOM for on in goes_on(table)]
    best = table.sort_values(["learning_rate", "num_tokens_seen", "num_pairs"], kind="stable")
    best = best.groupby(["starts_from", "model", "num_gpus"], sort=True).tail(1)
    sizes = best["model"].map(report.runs.groupby("model")["num_parameters"].max())
    best = best.assign(size=sizes).sort_values(["size", "starts_from", "num_gpus"], kind="stable")
    return best.assign(
        rate=best["learning_rate"].map(rate),
        num_steps=best["num_steps"].map("{:,.0f}".format),
        tokens=[f"{seen / 1e6:,.1f}" for seen in best["num_tokens_seen"].astype(float)],
        interval=[
            interval(low, high, "+.2f")
            for low, high in zip(best["gap_pct_low_90"], best["gap_pct_high_90"], strict=True)
        ],
    )


def losses(report: Report) -> pd.DataFrame:
    """`losses_of` all records; titles leave out what `usual` names."""
    table = losses_of(report.loss_gaps, report.validation_gaps)
    said = usual(judged(comparisons(report.loss_gaps)))
    return table.assign(title=[without(title, said) for title in table["title"]])


def losses_of(gaps: pd.DataFrame, unseen: pd.DataFrame) -> pd.DataFrame:
    """Judged training losses of healthy arms, with the gap on text kept out of training beside.

    From the tables of loss gaps of both: the columns of `with_labels`, ``unseen_gap_pct`` and
    ``unseen_judged``, and as ``interval`` the 90 % one, which decides the verdict.
    """
    beside = {name: f"unseen_{name}" for name in ("gap_pct", "judged")}
    kept_out = unseen.set_index("arm_key")[[*beside]].rename(columns=beside)
    table = with_labels(healthy(with_pairs(comparisons(gaps))).join(kept_out, on="arm_key"))
    ends = table[["gap_pct_low_90", "gap_pct_high_90"]].astype(float)
    return table.assign(
        interval=[interval(low, high, "+.2f") for low, high in ends.to_numpy()],
    )


def judged(gaps: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a `loss_gap_table` on GPUs, healthy, with an interval."""
    known = (gaps["device"] == "cuda") & gaps["gap_pct_low_95"].notna()
    return healthy(gaps[known])


def usual(gaps: pd.DataFrame) -> list[str]:
    """Return what the settings of most studies share; a study that differs names its own."""
    titles = with_labels(gaps)["title"].unique()
    parts = Counter(part for title in titles for part in title.partition(": ")[2].split(", "))
    return [part for part, times in parts.items() if times > len(titles) / 2]


def without(title: str, said: Sequence[str]) -> str:
    """Take out of a title of `with_labels` what was said of all."""
    study, _, parts = title.partition(": ")
    own = ", ".join(part for part in parts.split(", ") if part not in said)
    return f"{study}{': ' * bool(own)}{own}"


def with_labels(gaps: pd.DataFrame) -> pd.DataFrame:
    """Add to loss gaps what the arms of a study share, ``title``, and the rest, ``label``."""
    table = gaps.assign(title="", label="")
    for (machine, study), rows in gaps.groupby(["machine", "study"], sort=False):
        shared, labels = apart(
            [[row["model"], count(row["num_gpus"], "GPU"), *row["setting"].split(", "), row["arm"]]
             for _, row in rows.iterrows()]
        )  # fmt: skip
        table.loc[rows.index, "title"] = f"{study} on {machine_name(machine)}: {shared}"
        table.loc[rows.index, "label"] = labels
    return table


def apart(names: Sequence[Sequence[str]]) -> tuple[str, list[str]]:
    """Return what all of some names share of their parts, and of each the rest, or its last."""
    shared = [part for part in names[0] if all(part in of for of in names)]
    rest = [", ".join(part for part in of if part not in shared) or of[-1] for of in names]
    return in_words(", ".join(shared)), [in_words(text) for text in rest]


def crossings(table: pd.DataFrame) -> pd.DataFrame:
    """Precision error against sampling error: medians over seeds, and the hull of their CIs.

    A row for each point of training, recipe and reference, over all parameters. Where one sequence
    holds most of the error, the ratio is without it, and has no CI.
    """
    if table.empty:
        return table
    found = []
    keys = [*ALIKE, "step", "precision", "reference"]
    for key, rows in table[table["scope"] == "all"].groupby(keys, sort=False):
        row = dict(zip(keys, key, strict=True))
        is_sound = rows["worst_share"] <= DOMINATED
        ratio, sound = (
            rows["ratio_at_1"].where(is_sound, rows["ratio_without_worst"]),
            rows[is_sound],
        )
        against = "" if row["reference"] == "bf16" else f" v {str(row['reference']).upper()}"
        found.append(row | {
            "what": f"{recipe(row['precision'])}{against}",
            "num_seeds": rows["seed"].nunique(), "run_ids": together(rows["run_ids"]),
            "ratio_pct": 100 * ratio.median(),
            "systematic_pct": 100 * sound["systematic_share"].median(),
            "crossing_batch": rows["crossing_batch"].median(),
            "ratio_range": _hull(100 * sound["ratio_at_1_low"], 100 * sound["ratio_at_1_high"]),
            "crossing_range": _hull(rows["crossing_batch_low"], rows["crossing_batch_high"]),
        })  # fmt: skip
    return pd.DataFrame(found)


def gemms(table: pd.DataFrame) -> pd.DataFrame:
    """Each recipe's errors in one GEMM, median over layers, points and runs; what its casts lose.

    A row for each place and recipe, with a column ``error_pct_…`` for each of `recipes.GEMMS`.
    """
    found = []
    keys = [*ALIKE, "precision"]
    for key, rows in table.groupby(keys, sort=False) if len(table) else ():
        errors = rows.groupby("gemm")["error"].median().reindex(GEMMS)
        found.append({
            **dict(zip(keys, key, strict=True)), "what": recipe(key[-1]),
            "run_ids": together(rows["run_ids"].unique()),
            "to_zero_pct": 100 * rows["to_zero"].max(),
            **{f"error_pct_{gemm}": 100 * error for gemm, error in errors.items()},
        })  # fmt: skip
    return pd.DataFrame(found)


def _hull(lows: pd.Series, highs: pd.Series) -> str:
    """Write the hull of intervals so that a table does not break it over two lines."""
    if lows.empty:
        return "–"
    return "\u00a0to\u00a0".join(
        "∞" if math.isinf(end) else f"{end:,.0f}" if end >= 10 else f"{end:.1f}" if end >= 1
        else f"{end:.2f}"
        for end in (lows.min(), highs.max())
    )  # fmt: skip
