"""The page of runs: what every number of the other pages was made from, run by run."""

from __future__ import annotations

import hashlib
import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from IPython.display import Markdown

from fp8study.analysis.runs.frames import run_path
from fp8study.analysis.runs.pairing import ordered
from fp8study.core.audit_rules import cautions, problems, without_hidden_products
from fp8study.core.config import completed
from fp8study.core.records import RunRecord, StoredRun
from fp8study.report.method_sentences import repository_url
from fp8study.report.page import Report
from fp8study.report.rows import warning_texts
from fp8study.report.table import raw, run_key
from fp8study.report.words import count, escape, in_words, machine_name, no_gpu_records, number

#: What a run's line says first: result → its format and unit.
_HEADLINE = {
    "tokens_per_second_per_gpu": (",.0f", "tokens/s per GPU"),
    "loss_last20_mean": (".4f", "nats"),
}
_RESULTS = {
    "steps_completed": (",.0f", "steps"),
    "step_time_ms_median": (".1f", "ms a step"),
    "tflops_per_gpu": (".0f", "TFLOP/s per GPU"),
    "memory_peak_gib": (".1f", "GiB at the peak"),
    "energy_joule_per_token": (".4f", "J per token"),
    "validation_loss": (".4f", "nats on validation text"),
}
_LOSSES = ("loss_last20_mean", "validation_loss")
_VERSIONS = ("torch", "torchao", "transformers", "cuda", "fp8study")
#: Points of a loss curve: more than its pixels show would only weigh.
_POINTS = 32
_WIDTH, _HEIGHT = 192, 48  # as report/report.css shows it


def runs_text(report: Report) -> Markdown:
    """List every run by machine, study and arm, each under its name in ``run_ids``."""
    stored = {run_path(run): run for run in report.stored}
    rows = ordered(report.runs)
    places = rows.groupby(["machine", "study"], sort=False)
    own_first = sorted(places, key=lambda place: place[0][0] != "local")
    sections = [_study(group, stored) for _, group in own_first]
    return Markdown("\n\n".join(sections) or no_gpu_records())


@dataclass(frozen=True)
class Shown:
    """The runs of a study, and what is said of each."""

    stored: Mapping[str, StoredRun]
    varied: Sequence[str]
    made_by: bool
    """Whether runs differ in what made them."""


def _study(rows: pd.DataFrame, stored: Mapping[str, StoredRun]) -> str:
    machine, study = rows[["machine", "study"]].iloc[0]
    runs = [stored[name] for name in rows["run_ids"]]
    varied = varied_fields([_config(run.record) for run in runs])
    questions = [run.record.judgement.get("question") for run in runs]
    made = {_software(run.record) for run in runs}
    shown = Shown(stored, varied, made_by=len(made) > 1)
    arms = [_arm(group, shown) for _, group in rows.groupby("arm_key", sort=False)]
    names = ", ".join(f"`{name}`" for name in varied) or "nothing but time"
    differ = f" that differ in {names}" * (len(runs) > 1)
    by = "" if shown.made_by else f" Made by {escape(made.pop())}."
    return "\n\n".join([
        f"## {escape(study)} on {escape(machine_name(machine))}",
        " ".join(escape(q) for q in list(filter(None, questions))[-1:]),
        f"{count(len(runs), 'run')}{differ}.{by}",
        raw(html="\n".join(arms)).data,
    ])  # fmt: skip


def varied_fields(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the fields in which configurations differ, in the order of the first."""
    fields = dict.fromkeys(name for config in configs for name in config)
    values = {name: {json.dumps(config.get(name)) for config in configs} for name in fields}
    return [name for name in fields if len(values[name]) > 1]


def _arm(rows: pd.DataFrame, shown: Shown) -> str:
    first = rows.iloc[0]
    gpus = "" if pd.isna(first["num_gpus"]) else count(first["num_gpus"], "GPU")
    named = [text for text in (first["model"], gpus, first["setting"]) if text]
    runs = [_run(shown.stored[path], path, shown) for path in rows["run_ids"]]
    title = html.escape(in_words(f"{first['arm']}: {', '.join(map(str, named))}"))
    return f'<section class="arm"><h3>{title}</h3>\n' + "\n".join(runs) + "</section>"


def _run(run: StoredRun, path: str, shown: Shown) -> str:
    record = run.record
    config, results = _config(record), record.results
    if record.machine.get("device") == "cpu":  # where FP8 is emulated, speeds say nothing of it
        results = {name: results.get(name) for name in _LOSSES}
    is_timed = bool(record.config.get("timed_seconds"))  # as many steps as fitted
    results = {n: v for n, v in results.items() if not (is_timed and n in _LOSSES)}
    again = f", repeat {record.config['repeat']}" if record.config.get("repeat") else ""
    seen = [f"seed {record.config.get('seed')}{again}", *_numbers(results, _HEADLINE)]
    seen += ["timed: its loss compares with none"] * is_timed
    seen += [record.status] if record.status != "completed" else []
    seen += [count(len(record.warnings), "warning")] if record.warnings else []
    lines = {
        "Differs in": ", ".join(f"{name} {_value(config.get(name))}" for name in shown.varied),
        "Results": ", ".join(_numbers(results, _RESULTS)),
        "Ended": f"{record.status} {record.ended_at}"
        + (f": {record.status_detail}" if record.status_detail else ""),
        "Audit": _verdict(record),
        "Warnings": "; ".join(warning_texts(record)),
        "Made by": _software(record) if shown.made_by else "",
    }
    parts = [f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in lines.items() if text]
    parts.append(f"<dt>Record</dt><dd>{_record(run)}</dd>")
    curve = "" if is_timed else _curve(run)
    return (
        f'<details class="run" id="{path}" data-key="{run_key(path)}">'
        f"<summary>{html.escape(', '.join(seen))}</summary>"
        f"{curve}<dl>{''.join(parts)}</dl></details>"
    )


def _numbers(values: Mapping[str, Any], known: Mapping[str, tuple[str, str]]) -> list[str]:
    return [
        f"{number(values[name], spec)} {unit}"
        for name, (spec, unit) in known.items()
        if values.get(name) is not None
    ]


def _config(record: RunRecord) -> dict[str, Any]:
    """Return a configuration with the fields that came after it: they are no difference."""
    return completed(record.config, record.machine.get("device"))


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _verdict(record: RunRecord) -> str:
    audit = without_hidden_products(record.audit, record.config)
    if not audit:
        return "none in this record"
    planted = [f"{n} weights left out of the optimizer on purpose"
               for n in [audit.get("num_planted")] if n]  # fmt: skip
    return "; ".join([*problems(audit), *cautions(audit), *planted]) or "healthy"


def _software(record: RunRecord) -> str:
    machine, git = record.machine, record.git
    parts = [str(machine.get("gpu_name") or machine.get("cpu_name"))]
    parts += [f"{name} {record.versions[name]}" for name in _VERSIONS if record.versions.get(name)]
    dirty = " with uncommitted changes" if git.get("dirty") else ""
    return ", ".join([*parts, f"commit {str(git.get('commit') or 'unknown')[:12]}{dirty}"])


def _record(run: StoredRun) -> str:
    place = "" if run.machine_label == "local" else "reference/"
    path, url_path = (
        html.escape(f"results/{place}{part}")
        for part in (f"{run.machine_label}/{run.record.study}/{run.record.run_id}", run_path(run))
    )
    file = run.run_dir / "run.json"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file.exists() else "unknown"
    url = html.escape(repository_url())
    link = f'<a href="{url}/tree/HEAD/{url_path}">{path}</a>' if url and place else path
    return f"{link}; SHA-256 of run.json {digest}…"


def _curve(run: StoredRun) -> str:
    """Draw the logged losses as a small line, or nothing where there are too few."""
    logged = zip(run.metrics.get("step", ()), run.metrics.get("loss", ()), strict=True)
    known = [(step, loss) for step, loss in logged if loss is not None and math.isfinite(loss)]
    points = known[:: math.ceil(len(known) / _POINTS) or 1]
    if len(points) < 2:
        return ""
    steps, losses = zip(*points, strict=True)
    across = _WIDTH / (steps[-1] - steps[0] or 1)
    down = (_HEIGHT - 4) / ((max(losses) - min(losses)) or 1)
    line = " ".join(
        f"{(step - steps[0]) * across:.0f},{2 + (max(losses) - loss) * down:.0f}"
        for step, loss in points
    )
    said = f"Loss as logged, from {losses[0]:.2f} to {known[-1][1]:.2f} over {steps[-1]} steps"
    return (
        f'<svg role="img" aria-label="{said}" viewBox="0 0 {_WIDTH} {_HEIGHT}">'
        f'<polyline points="{line}"/></svg>'
    )
