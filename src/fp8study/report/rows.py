"""The rows of tables that only the pages show, in the pages' words."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

import pandas as pd

from fp8study.analysis import instruments, stats
from fp8study.analysis.frames import run_path
from fp8study.analysis.pairing import together
from fp8study.core.hardware import GPU_PEAKS
from fp8study.core.records import StoredRun
from fp8study.report import layouts
from fp8study.report.page import Report
from fp8study.report.table import Layout
from fp8study.report.words import number, own_first, recipe, span

#: The checks of the pipeline itself, which ask nothing about FP8.
_CHECKS = ("adhoc", "smoke", "bench-cpu")
_POINT = ["machine", "study", "model", "step"]
_END = "end"
GEMMS = {"output": "forward", "grad_input": "input gradient", "grad_weight": "weight gradient"}


def questions(report: Report) -> pd.DataFrame:
    """Say what each study with runs asks and what its runs answer, the reader's own first."""
    asked = [
        (
            run.machine_label,
            run.record.study,
            run.record.judgement.get("question") or "",
            run_path(run),
        )
        for run in report.stored
        if run.record.study not in _CHECKS
    ]
    columns = ["machine", "study", "question", "run_ids"]
    groups = pd.DataFrame(asked, columns=columns).groupby(["machine", "study"], as_index=False)
    table = groups.agg(
        num_runs=("question", "size"), question=("question", "last"), run_ids=("run_ids", together)
    )
    speeds, gaps = report.throughput.dropna(subset="speedup_pct"), report.loss_gaps
    speeds, gaps = speeds[~speeds["stale"].astype(bool)], gaps[~gaps["stale"].astype(bool)]
    table["answer"] = [
        _answer(*(t[(t["machine"] == row["machine"]) & (t["study"] == row["study"])]
                  for t in (speeds, gaps)))
        for _, row in table.iterrows()
    ]  # fmt: skip
    return own_first(table)


def _answer(speeds: pd.DataFrame, gaps: pd.DataFrame) -> str:
    parts = []
    if len(speeds):
        parts.append(f"speed {span(speeds['speedup_pct'], '+.1f', ' %')}")
    tested = gaps[gaps["num_pairs"] >= stats.MIN_PAIRS_FOR_INTERVAL]
    for verdict, rows in tested.groupby("verdict", sort=False):
        parts.append(f"loss {verdict} in {len(rows)}: {span(rows['gap_pct'], '+.2f', ' %')}")
    if len(gaps) and tested.empty:
        parts.append("loss: too few seeds")
    return "; ".join(parts)


def warnings(stored: Sequence[StoredRun]) -> pd.DataFrame:
    """List what the runs of a machine warn of, and how many of which studies do."""
    found = [
        (run.machine_label, text, run.record.study, run_path(run))
        for run in stored
        for text in run.record.warnings
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


def peaks() -> pd.DataFrame:
    """The GPUs whose peak is known, in order of look-up."""
    return pd.DataFrame([dataclasses.asdict(peak) for peak in GPU_PEAKS])


def shares(kernels: pd.DataFrame) -> pd.DataFrame:
    """How much of the GEMMs was FP8, per study and precision; from `kernels_table`."""
    columns = {"share": "fp8_gemm_flops_pct", "expected": "fp8_expected_pct"}
    columns |= {"time": "fp8_gemm_time_pct"}

    def spans(values: pd.Series) -> str | None:
        known = values.dropna().astype(float)
        return span(known, ".1f") if len(known) else None

    groups = kernels.groupby(["machine", "study", "precision"], sort=False)
    table = groups[["num_runs"]].sum()
    table[[*columns]] = groups[[*columns.values()]].agg(spans)
    table["run_ids"] = groups["run_ids"].agg(together)
    table = table.reset_index()
    return table.assign(arm=table["precision"].map(recipe))


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
            ends = stats.median_interval(pairs, 0.95)
            row = {"machine": machine, "gpu_name": gpu, "num_pairs": len(pairs)}
            row |= {"interval": f"{number(ends.low, '+.2f')} to {number(ends.high, '+.2f')}"}
            rows.append(row | {"median_pct": statistics.median(pairs), "high_pct": ends.high})
    return pd.DataFrame(rows)


def rungs(ladder: pd.DataFrame) -> pd.DataFrame:
    """Medians of the noise ladder's rungs, the lowest first."""
    if ladder.empty:
        return ladder
    by = ladder.groupby(["machine", "study", "model", "rung"], sort=False)["difference_pct"]
    table = by.agg(num_pairs="size", median_pct="median").reset_index()
    return table.sort_values(["machine", "study", "model", "median_pct"], kind="stable")


def by_pass(table: pd.DataFrame) -> tuple[pd.DataFrame, Layout]:
    """Put the ends of an arm's passes, and of its run, beside each other.

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
    ends = sorted(dict.fromkeys(cells["end"]), key=lambda end: end == _END)  # the end comes last
    columns = dict(layouts.PASSES.columns) | {end: (end, "") for end in ends}
    groups = table.groupby(arm)
    rows = groups[["num_pairs", "passes"]].max().join(groups["run_ids"].agg(together)).join(wide)
    return rows.reset_index(), Layout(columns, layouts.PASSES.group)


def with_labels(table: pd.DataFrame) -> pd.DataFrame:
    """Add ``what``: a recipe or a comparison in words; FP8 is compared with BF16 unless said."""
    if table.empty:
        return table
    names = table["precision"].map(recipe).astype(object)
    if "reference" in table:
        names = names + table["reference"].map(lambda r: "" if r == "bf16" else f" v {r.upper()}")
    return table.assign(what=names.map(str))


def last_point(table: pd.DataFrame) -> pd.DataFrame:
    """Keep each run's last point, and the FP8 recipes."""
    if table.empty:
        return table
    last = table.groupby("run_id")["step"].transform("max")
    return table[(table["step"] == last) & (table["precision"] != "bf16")]


def crossings(table: pd.DataFrame) -> pd.DataFrame:
    """Precision error against sampling error: medians over seeds, and the hull of their CIs."""
    return _medians(
        table, ["what"],
        {"ratio_pct": ("ratio_at_1", 100), "crossing_batch": ("crossing_batch", 1),
         "systematic_pct": ("systematic_share", 100)},
        {"ratio_range": ("ratio_at_1", 100), "crossing_range": ("crossing_batch", 1)},
    )  # fmt: skip


def scales(table: pd.DataFrame) -> pd.DataFrame:
    """The noise scale: medians over seeds, and the hull of their CIs."""
    values = {name: (name, 1) for name in ("noise_scale", "noise_scale_tokens")}
    return _medians(table, [], values, {"noise_scale_range": ("noise_scale", 1)})


def gradients(table: pd.DataFrame) -> pd.DataFrame:
    """The error of one sequence's gradient: medians over seeds."""
    if table.empty:
        return table
    run = ["machine", "study", "run_id", "step", "precision", "scope"]
    fp32 = table[table["reference"] == "fp32"].set_index(run)["relative_error"].rename("fp32_error")
    neighbour = table["precision"].eq("bf16") | table["reference"].eq("bf16")
    values = {"relative_pct": "relative_error", "middle_pct": "median_error",
              "worst_pct": "worst_error", "fp32_pct": "fp32_error"}  # fmt: skip
    as_they_are = {name: (name, 1) for name in ("cosine", "sqnr_db", "loss_change")}
    percent = {name: (column, 100) for name, column in values.items()}
    return _medians(table[neighbour].join(fp32, on=run), ["what"], as_they_are | percent)


def gemm_errors(table: pd.DataFrame) -> pd.DataFrame:
    """The error of single GEMMs: medians over layers and seeds; the worse operand's shares."""
    if table.empty:
        return table
    worse = {
        kind: table[[name for name in table.columns if kind in str(name)]].max(axis=1)
        for kind in ("underflow", "saturat")
    }
    found = table.assign(gemm=table["product"].map(GEMMS), scope="all", **worse)
    values = {"relative_pct": ("error", 100), "sqnr_db": ("sqnr_db", 1),
              "underflow_pct": ("underflow", 100), "saturated_pct": ("saturat", 100)}  # fmt: skip
    return _medians(found, ["what", "gemm"], values)


def _medians(
    table: pd.DataFrame,
    keys: list[str],
    values: Mapping[str, tuple[str, float]],
    ranges: Mapping[str, tuple[str, float]] | None = None,
) -> pd.DataFrame:
    """Take medians over seeds at each point, over all parameters, by `keys`.

    `values` and `ranges`: new column → the column that it is the median of, or whose intervals it
    is the hull of, and a factor.
    """
    if table.empty:
        return table
    rows = []
    for key, group in table[table["scope"] == "all"].groupby([*_POINT, *keys], sort=False):
        row = dict(zip([*_POINT, *keys], key, strict=True))
        row["num_seeds"] = group["seed"].nunique()
        row["run_ids"] = together(group["run_ids"])
        row |= {new: unit * group[old].median() for new, (old, unit) in values.items()}
        for new, (old, unit) in (ranges or {}).items():
            row[new] = _hull([unit * group[f"{old}_low"].min(), unit * group[f"{old}_high"].max()])
        rows.append(row)
    return pd.DataFrame(rows)


def _hull(ends: Sequence[float]) -> str:
    """Write the ends of an interval so that a table does not break it over two lines."""
    return "\u00a0to\u00a0".join(
        "∞" if math.isinf(end) else f"{end:,.0f}" if end >= 10 else f"{end:.1f}" if end >= 1
        else f"{end:.2f}"
        for end in ends
    )  # fmt: skip
