"""What the page of methods says of the records as a whole, and how the study is cited."""

from __future__ import annotations

import functools
from typing import Any

import pandas as pd
import yaml

from fp8study.analysis.runs.frames import ALL_STUDIES
from fp8study.core.files import project_root
from fp8study.report.page import Report
from fp8study.report.words import by_machine, count, escape, how_to_get


def records(runs: pd.DataFrame, costs: pd.DataFrame) -> str:
    """Say when the runs were made, on what, and what they held of their GPUs."""
    if runs.empty:
        return f"There are no records yet: {how_to_get()}."
    lines = []
    for machine, rows in by_machine(runs, with_gpus=True):
        first, last = rows["started_at"].min()[:10], rows["ended_at"].max()[:10]
        days = first if first == last else f"{first} to {last}"
        label = rows["machine"].iloc[0]
        folder = f", `results/reference/{label}`" if label != "local" else ""
        own = costs[(costs["machine"] == label) & (costs["study"] == ALL_STUDIES)]
        held = "".join(f", {hours:.2f} GPU-hours" for hours in own["gpu_hours"])
        done = int((rows["status"] == "completed").sum())
        state = f"{'all' if done == len(rows) else done} completed"
        versions = [
            f"{name} {' and '.join(map(escape, sorted(known)))}"
            for name in ("torch", "torchao", "CUDA")
            if len(known := rows[f"version_{name.lower()}"].dropna().unique())
        ]
        lines.append(
            f"- **{machine}**{folder}: {count(len(rows), 'run')}, {state}, {days}{held}; "
            f"{', '.join(versions)}."
        )
    if not (runs["device"] == "cuda").any():
        lines.append(f"\n**No GPU records yet:** {how_to_get()}.")
    return "\n".join(lines)


def limits(runs: pd.DataFrame) -> str:
    """Say how far the records reach."""
    gpu = runs[runs["device"] == "cuda"]
    if gpu.empty:
        return "- No run on a GPU yet: nothing here speaks of speed."
    models = [name for name in gpu["model"].dropna().unique() if "tiny-" not in name]
    shapes = ", ".join(map(escape, sorted(models)))
    lines = [
        f"- Models: {shapes}, mostly from random weights; at most "
        f"{count(gpu['num_gpus'].max(), 'GPU')} in one host.",
    ]
    if (runs["device"] == "cpu").any():
        lines.append("- On a CPU, FP8 is emulated: its timings mean nothing for GPUs.")
    return "\n".join(lines)


@functools.cache
def _citation_file() -> dict[str, Any]:
    file = project_root() / "CITATION.cff"
    return yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}


def repository_url() -> str:
    """Return where the repository is hosted, from CITATION.cff; empty if it does not say."""
    return str(_citation_file().get("repository-code") or "").rstrip("/")


def citation() -> str:
    """Say how to cite the study, from CITATION.cff."""
    cited = _citation_file()
    if not cited:
        return ""
    authors = ", ".join(str(author.get("name") or author) for author in cited.get("authors", []))
    parts = [authors, str(cited["title"]), f"version {cited['version']}"]
    parts += [str(cited["date-released"]), repository_url()]
    text = ". ".join(filter(None, parts)).replace("?.", "?")
    return f"To cite it: {escape(text)}. (`CITATION.cff`)"


def unreadable(report: Report) -> str:
    """Name the records that could not be read or judged, or say that all were."""
    if not report.unreadable:
        return "Every record could be read."
    lines = [f"- {escape(line)}" for line in report.unreadable]
    return (
        "Records that could not be read, or contradict one another or their folder:\n\n"
        + "\n".join(lines)
    )


def kept_in_bf16(runs: pd.DataFrame) -> str:
    """Say which layers the FP8 runs keep out of FP8, where the arms' names do not."""
    known = runs.dropna(subset="kept_in_bf16").drop_duplicates(["study", "kept_in_bf16"])
    if known.empty:
        return ""
    names = [
        f"{' and '.join(f'`{name}`' for name in str(kept).split())} ({', '.join(rows['study'])})"
        for kept, rows in known.groupby("kept_in_bf16", sort=False)
    ]
    rest = "elsewhere `lm_head`, unless an arm's name says otherwise"
    return f"Kept out of FP8: {'; '.join(names)}; {rest}."
