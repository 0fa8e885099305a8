"""The findings of the report in words, written from the tables.

Each function returns Markdown. The words follow the sign of the numbers, and what is not there
yet is said together with the command that would make it.
"""

from __future__ import annotations

import pandas as pd

from fp8study import tables
from fp8study.pages import Report

#: A share of a gap that counts as all of it, given the noise of single runs.
NEARLY_ALL = 0.9


def escape(text: str) -> str:
    """Make a text from a record safe inside Markdown."""
    for mark in "\\`*_[]<>$|":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())


def how_to_get(study: str) -> str:
    """Say which command makes the records of a study."""
    return f"run `make reproduce STUDY={study}` on a machine with NVIDIA GPUs"


def no_gpu_records(study: str = "quick") -> str:
    """Say that there is nothing from a GPU, as plain text for tables and figures."""
    return f"No GPU records here yet: {how_to_get(study).replace('`', '')}."


def machines(report: Report) -> str:
    """List the machines, each with its device and number of runs."""
    if report.runs.empty:
        return f"**There are no records yet:** {how_to_get('quick')}."
    lines = []
    for machine, group in report.runs.groupby("machine", sort=False):
        names = [str(name) for name in group["gpu_name"].dropna().unique()]
        names += ["CPU, FP8 emulated"] if (group["device"] == "cpu").any() else []
        devices = ", ".join(names) or "device unknown"
        done = int((group["status"] == "completed").sum())
        lines.append(
            f"- **{escape(str(machine))}** ({escape(devices)}): {_count(len(group), 'run')}, "
            f"{done} completed."
        )
    text = "\n".join(lines)
    if report.gpu_runs.empty:
        text += f"\n\n**No GPU records yet:** {how_to_get('quick')}."
    return text


def unreadable(report: Report) -> str:
    """Name the records that could not be read, or say that all were."""
    if not report.unreadable:
        return "Every record could be read."
    lines = [f"- {escape(line)}" for line in report.unreadable]
    return "Records that could not be read:\n\n" + "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def compared(pct: float) -> str:
    """Put a relative difference in speed into words that follow its sign."""
    if abs(pct) < 0.05:
        return "as fast as BF16"
    return f"{abs(pct):.1f} % {'faster' if pct > 0 else 'slower'} than BF16"


def _speedups(report: Report) -> pd.DataFrame:
    """The fair comparisons: on a GPU, with a BF16 partner, and with every parameter trained."""
    table = report.throughput
    chosen = table["speedup_pct"].notna() & (table["device"] == "cuda")
    table = table[chosen & ~table["stale"].fillna(False).astype(bool)]
    # The main question first, document A's special setting last.
    return table.sort_values("study", key=lambda s: s.str.startswith("document-a"), kind="stable")


def speed_summary(report: Report) -> str:
    """Say in how many settings FP8 was faster, and by how much."""
    rows = _speedups(report)
    if rows.empty:
        return (
            "**Speed: no answer yet.** No FP8 run on a GPU has a BF16 partner that differs in "
            f"precision alone: {how_to_get('quick')}."
        )
    pct = rows["speedup_pct"].astype(float)
    faster, slower = int((pct >= 0.05).sum()), int((pct <= -0.05).sum())
    low, high = f"{pct.min():+.1f}", f"{pct.max():+.1f}"
    spread = f"{high} %" if low == high else f"{low} % to {high} %"
    return (
        f"**Speed: FP8 was faster than BF16 in {faster} and slower in {slower} of "
        f"{_count(len(rows), 'comparison')}** ({spread}), as follows. Runs with a stale optimizer "
        "are not among them."
    )


def speed_details(report: Report) -> str:
    """One line for each model, setting and recipe, with the GPU counts side by side."""
    keys = ["machine", "gpu_name", "study", "model", "setting", "arm"]
    lines = []
    for values, group in _speedups(report).groupby(keys, sort=False, dropna=False):
        machine, gpu, study, model, setting, arm = (escape(str(v)) for v in values)
        results = [
            f"{compared(row['speedup_pct'])} on {_count(int(row['num_gpus']), 'GPU')}"
            + (" (memory nearly full, so not a fair comparison)" if "memory" in row["note"] else "")
            for _, row in group.sort_values("num_gpus").iterrows()
        ]
        runs = sorted({int(n) for n in group["num_runs"]})
        seeds = f"{runs[0]}" if len(runs) == 1 else f"{runs[0]} to {runs[-1]}"
        lines.append(
            f"- {model}, {arm} ({study} on {machine}, {gpu}; {setting}; "
            f"n = {seeds} per arm): {'; '.join(results)}."
        )
    return "\n".join(lines)


def loss_summary(report: Report) -> str:
    """Say what the paired losses allow one to say."""
    gaps = report.loss_gaps
    gaps = gaps[~gaps["stale"].fillna(False).astype(bool)]
    gpu, cpu = gaps[gaps["device"] == "cuda"], gaps[gaps["device"] == "cpu"]
    if gaps.empty:
        return f"**Loss: no answer yet.** No FP8 run has a BF16 partner: {how_to_get('quick')}."
    parts = [_loss_sentence(gpu, "on GPUs") if len(gpu) else "**Loss:** no pair on GPUs yet."]
    if len(cpu):
        parts.append(_loss_sentence(cpu, "on CPUs with emulated FP8"))
    return " ".join(parts)


def _loss_sentence(gaps: pd.DataFrame, where: str) -> str:
    pct = gaps["gap_pct"].astype(float)
    worst = gaps.iloc[int(pct.abs().to_numpy().argmax())]
    tested = gaps[gaps["gap_pct_low_90"].notna()]
    text = (
        f"**Loss {where}:** in {_count(len(gaps), 'comparison')} FP8's final training loss differs "
        f"from BF16's by {pct.min():+.2f} % to {pct.max():+.2f} % (+: worse); the largest gap is "
        f"{escape(str(worst['model']))}, {escape(str(worst['arm']))}, "
        f"{escape(str(worst['setting']))}. "
    )
    if tested.empty:
        return text + (
            "No comparison has the three seeds that an interval needs, so none shows that FP8 and "
            "BF16 are the same, or that they differ."
        )
    counts = tested["verdict"].value_counts()
    verdicts = ", ".join(f"{counts.get(v, 0)} {v}" for v in ("equivalent", "different"))
    return text + (
        f"Of the {len(tested)} with three seeds or more, at a margin of "
        f"±{tables.LOSS_MARGIN_PCT} %: {verdicts}, {counts.get('undecided', 0)} undecided."
    )


def document_a(report: Report) -> str:
    """Say what became of document A's single-GPU failure."""
    table = tables.document_a_table(report.document_a)
    if table.empty:
        return f"**Document A's failure: no records yet:** {how_to_get('document-a')}."
    parts = ["All arms ran on a CPU, with FP8 emulated."] if _on_cpu(table) else []
    for master, arms in table.groupby("master_dtype", sort=True):
        stale = _loss(arms[arms["stale"].astype(bool)])
        healthy = arms[~arms["stale"].astype(bool)]
        fp8 = _loss(healthy[healthy["precision"] != "bf16"])
        bf16 = _loss(healthy[healthy["precision"] == "bf16"])
        parts.append(_arms(str(master).upper(), bf16, fp8))
        if stale is not None:
            share = arms.loc[arms["stale"].astype(bool), "parameters_outside_optimizer_pct"].max()
            parts.append(_stale(float(share), stale, fp8, bf16))
    low, high = int(table["num_runs"].min()), int(table["num_runs"].max())
    parts.append(f"(n = {low if low == high else f'{low} to {high}'} per arm.)")
    return " ".join(part for part in parts if part)


def _on_cpu(table: pd.DataFrame) -> bool:
    return bool((table["device"] == "cpu").all())


def _loss(arms: pd.DataFrame) -> float | None:
    return float(arms["loss_last20_mean"].mean()) if len(arms) else None


def _arms(master: str, bf16: float | None, fp8: float | None) -> str:
    if bf16 is None or fp8 is None:
        return ""
    return (
        f"With {master} masters and every parameter in the optimizer, the last 20 steps' loss is "
        f"{bf16:.2f} in BF16 and {fp8:.2f} in FP8 ({fp8 - bf16:+.3f})."
    )


def _stale(share: float, stale: float, fp8: float | None, bf16: float | None) -> str:
    amount = "an unknown share" if pd.isna(share) else f"{share:.1f} %"
    text = (
        f"With the optimizer made before the conversion, as document A does, {amount} of the "
        f"parameters are outside the optimizer and the loss is {stale:.2f}."
    )
    if fp8 is None or bf16 is None:
        return f"{text} An arm to compare it with is missing."
    if stale - bf16 < 0.02 * bf16:
        return f"{text} That is no higher than BF16's: the failure did not appear here."
    closed = (stale - fp8) / (stale - bf16)
    gap = f"Of its gap of {stale - bf16:.2f} to BF16, {100 * closed:.1f} % goes away"
    if closed >= NEARLY_ALL:
        reason = "so the stale optimizer made the failure, not FP8's precision"
    elif closed >= 0.5:
        reason = "so the stale optimizer made most of the failure, but not all"
    else:
        reason = "so the stale optimizer does not explain the failure"
    return f"{text} {gap} when the optimizer is made after the conversion, {reason}."


def limits(report: Report) -> str:
    """Say how little the answers rest on."""
    rows, gaps = _speedups(report), report.loss_gaps
    lines = []
    if len(rows):
        single = int((rows["num_runs"] == 1).sum())
        lines.append(
            f"- {single} of {_count(len(rows), 'speed comparison')} "
            f"{'rests' if single == 1 else 'rest'} on one run per arm. Repeat before you rely on "
            "a difference of a few per cent."
        )
    if len(gaps):
        single = int((gaps["num_pairs"] < 3).sum())
        lines.append(
            f"- {single} of {_count(len(gaps), 'loss comparison')} "
            f"{'has' if single == 1 else 'have'} fewer than three seeds and so no interval."
        )
    full = int(rows["note"].str.contains("memory").sum()) if len(rows) else 0
    if full:
        lines.append(
            f"- In {_count(full, 'speed comparison')} an arm nearly filled the GPU's memory; "
            "time in the allocator may pass for a speed-up."
        )
    lost = int((report.runs["status"] != "completed").sum())
    if lost:
        lines.append(f"- {_count(lost, 'run')} did not complete: see [Methods](methods.qmd).")
    if len(report.cpu_runs):
        lines.append(
            "- Runs on a CPU emulate FP8. They test the pipeline; their timings mean nothing for "
            "GPUs, and no speed-up is computed from them."
        )
    steps = report.runs["num_steps"].max()
    if pd.notna(steps):
        lines.append(
            f"- No run is longer than {int(steps):,} steps. Nothing here speaks of a full "
            "pre-training run, of evaluation scores, or of late instabilities."
        )
    return "\n".join(lines) or "- There is nothing to limit yet: no records."


def epochs(report: Report) -> str:
    """Say whether the data were repeated."""
    seen = report.runs["epochs"].dropna()
    if seen.empty:
        return "No record says how much of its corpus it saw."
    if seen.max() <= 1:
        return f"No run saw its corpus more than once (at most {seen.max():.2f} passes)."
    repeated = int((seen > 1).sum())
    return (
        f"{_count(repeated, 'run')} saw its corpus more than once (at most {seen.max():.1f} "
        "passes): a low loss there is partly memory. Pairs are still fair, since both arms saw "
        "the same data."
    )
