"""What the records say of speed and memory, and how little that rests on.

Each function returns Markdown. The words follow the sign of the numbers, and what is not there
yet is said together with the command that would make it.
"""

from __future__ import annotations

import pandas as pd

from fp8study.analysis.frames import MIXED
from fp8study.analysis.speed import MEMORY_FULL
from fp8study.report.page import Report
from fp8study.report.words import (
    by_machine,
    count,
    escape,
    how_to_get,
    number,
    recipe,
)


def machines(report: Report) -> str:
    """List the machines, the reader's own first, each with its number of runs."""
    if report.runs.empty:
        return f"**There are no records yet:** {how_to_get('quick')}."
    lines = []
    for machine, rows in by_machine(report.runs):
        done = int((rows["status"] == "completed").sum())
        cpu = ", FP8 emulated on its CPU" if (rows["device"] == "cpu").any() else ""
        lines.append(f"- **{machine}**{cpu}: {count(len(rows), 'run')}, {done} completed.")
    if not (report.runs["device"] == "cuda").any():
        lines.append(f"\n**No GPU records yet:** {how_to_get('quick')}.")
    return "\n".join(lines)


def unreadable(report: Report) -> str:
    """Name the records that could not be read, or say that all were."""
    if not report.unreadable:
        return "Every record could be read."
    lines = [f"- {escape(line)}" for line in report.unreadable]
    return "Records that could not be read:\n\n" + "\n".join(lines)


def _healthy(report: Report) -> pd.DataFrame:
    """The FP8 arms on GPUs that train every parameter and have a BF16 partner.

    Single switches of the tuned path are left out: nobody would set just one.
    """
    table = report.throughput[report.throughput["path"] != MIXED]
    alone = table["note"].str.contains("no BF16 partner")
    chosen = (table["device"] == "cuda") & (table["precision"] != "bf16") & ~alone
    return table[chosen & ~table["stale"].fillna(False).astype(bool)]


def speed(report: Report) -> str:
    """Say for each machine how fast FP8 was, by model, recipe and way of running."""
    table = _healthy(report)
    if table["speedup_pct"].dropna().empty:
        return (
            "**Speed: no answer yet.** No FP8 run on a GPU has a BF16 partner that differs in "
            f"precision alone: {how_to_get('quick')}."
        )
    kind = table["setting"].map(lambda s: "eager" if "eager" in s else "compiled")
    table = table.assign(how=kind.where(table["path"] != "tuned", kind + ", tuned path"))
    parts = []
    for machine, rows in by_machine(table):
        lines = [
            f"- {escape(model)}, {escape(recipe(precision))}, {how}: {_leads(group)}"
            for (how, model, precision), group in rows.groupby(["how", "model", "precision"])
        ]
        head = f"**Speed on {machine}.** Tokens/s against BF16, medians of paired ratios:"
        parts.append("\n".join([head, "", *lines, "", _judged_too(rows, report.loss_gaps)]))
    return "\n\n".join(parts)


def _leads(group: pd.DataFrame) -> str:
    """Write the lowest and the highest lead, and where they were measured."""
    compared = group.dropna(subset="speedup_pct").sort_values("speedup_pct", kind="stable")
    ends = [_lead(row) for _, row in compared.iloc[[0, -1]].iterrows()] if len(compared) else []
    if len({where for _, where in ends}) == 1:
        ends = [(" to ".join(dict.fromkeys(pct for pct, _ in ends)), ends[0][1])]
    parts = [" to ".join(f"{pct} {where}" for pct, where in ends)] if ends else []
    if full := len(group) - len(compared):
        parts.append(f"{full} not compared, memory nearly full")
    return "; ".join(parts)


def _lead(row: pd.Series) -> tuple[str, str]:
    batch = next(part for part in str(row["setting"]).split(", ") if part.startswith("batch"))
    where = f"({count(int(row['num_gpus']), 'GPU')}, {batch})"
    return f"{number(float(row['speedup_pct']), '+.1f')} %", where


def _judged_too(rows: pd.DataFrame, gaps: pd.DataFrame) -> str:
    """Say how many arms that were faster have a loss that could be judged."""
    faster = rows[rows["speedup_pct"] >= 0.05]
    if faster.empty:
        return ""
    known = gaps.loc[gaps["verdict"].isin(["equivalent", "different"]), "arm_key"]
    judged = int(faster["arm_key"].isin(known).sum())
    return (
        f"Of {count(len(faster), 'faster arm')}, {judged or 'none'} "
        f"{'have' if judged > 1 else 'has'} a conclusive loss verdict in the same setting."
    )


def kept_in_bf16(report: Report, study: str = "") -> str:
    """Say which layers the FP8 runs keep out of FP8, where the arms' names do not."""
    runs = report.runs[report.runs["study"].fillna("").str.startswith(study)]
    known = runs.dropna(subset="kept_in_bf16").drop_duplicates(["study", "kept_in_bf16"])
    if known.empty:
        return ""
    names = [
        f"{' and '.join(f'`{name}`' for name in str(kept).split())} ({', '.join(rows['study'])})"
        for kept, rows in known.groupby("kept_in_bf16", sort=False)
    ]
    rest = "" if study else "; elsewhere `lm_head`, unless an arm's name says otherwise"
    return f"Kept out of FP8: {'; '.join(names)}{rest}."


def limits(report: Report) -> str:
    """Say how little the answers rest on, machine by machine."""
    if report.runs.empty:
        return "- There is nothing to limit yet: no records."
    lines = [f"- **{name}:** {_thin(report, rows)}" for name, rows in by_machine(report.runs)]
    if (report.runs["device"] == "cpu").any():
        lines.append("- On a CPU, FP8 is emulated: its timings mean nothing for GPUs.")
    steps = report.runs["num_steps"].max()
    if pd.notna(steps):
        lines.append(
            f"- No run is longer than {int(steps):,} steps. Nothing here speaks of a full "
            "pre-training run, of evaluation scores, or of late instabilities."
        )
    return "\n".join(lines)


def _thin(report: Report, runs: pd.DataFrame) -> str:
    machine = runs["machine"].iloc[0]
    arms, gaps = (t[t["machine"] == machine] for t in (_healthy(report), report.loss_gaps))
    compared = arms[arms["speedup_pct"].notna()]
    gaps = gaps[~gaps["stale"].fillna(False).astype(bool)]
    known = {
        f"of {count(len(compared), 'speed comparison')} on one run an arm": (
            compared["num_runs"] == 1
        ).sum(),
        f"of {count(len(gaps), 'loss comparison')} on fewer than three seeds, without interval": (
            gaps["num_pairs"] < 3
        ).sum(),
        "speed comparisons left out, memory nearly full": (
            arms["note"].str.contains(MEMORY_FULL).sum()
        ),
        "runs with a warning, see [Methods](methods.qmd#sec-warnings)": (
            runs["num_warnings"] > 0
        ).sum(),
        "runs not completed, see [Methods](methods.qmd#sec-failures)": (
            runs["status"] != "completed"
        ).sum(),
    }
    return "; ".join(f"{number} {what}" for what, number in known.items() if number) + "."
