"""What the page of methods says of the records as a whole, and how the study is cited."""

from __future__ import annotations

import functools
from typing import Any

import pandas as pd
import yaml

from fp8study.analysis.frames import ALL_STUDIES
from fp8study.core.files import project_root
from fp8study.report.words import by_machine, count, escape, how_to_get


def records(runs: pd.DataFrame, costs: pd.DataFrame) -> str:
    """Say when the runs were made, on what, and what they held of their GPUs."""
    if runs.empty:
        return f"There are no records yet: {how_to_get()}."
    lines = []
    for machine, rows in by_machine(runs):
        first, last = rows["started_at"].min()[:10], rows["ended_at"].max()[:10]
        days = first if first == last else f"{first} to {last}"
        own = costs[(costs["machine"] == rows["machine"].iloc[0]) & (costs["study"] == ALL_STUDIES)]
        held = "".join(f", {hours:.2f} GPU-hours" for hours in own["gpu_hours"])
        done = int((rows["status"] == "completed").sum())
        lines.append(f"- **{machine}**: {count(len(rows), 'run')}, {done} completed, {days}{held}.")
    return "\n".join(lines)


def limits(runs: pd.DataFrame) -> str:
    """Say how far the records reach."""
    gpu = runs[runs["device"] == "cuda"]
    if gpu.empty:
        return "- No run on a GPU yet: nothing here speaks of speed."
    shapes = ", ".join(map(escape, sorted(gpu["model"].dropna().unique())))
    lines = [
        f"- Models: {shapes}, from random weights. GPUs: "
        f"{', '.join(map(escape, sorted(gpu['gpu_name'].dropna().unique())))}, at most "
        f"{gpu['num_gpus'].max()} in one host.",
        f"- No run is longer than {int(gpu['num_steps'].max()):,} steps: nothing here speaks of "
        "evaluation scores or of late instabilities.",
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
    return f"To cite it: {escape('. '.join(filter(None, parts)))}. (`CITATION.cff`)"
