"""What the pages of the report share: finding the records, loading them, showing tables."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import html
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from IPython.display import HTML

from fp8study.analysis.frames import metrics_frame, runs_frame
from fp8study.analysis.instruments import instruments_frame
from fp8study.analysis.losses import loss_gap_table
from fp8study.analysis.pairing import shorten_arms
from fp8study.analysis.speed import throughput_table
from fp8study.core.cache import kept
from fp8study.core.errors import UserError
from fp8study.core.hardware import GPU_PEAKS
from fp8study.core.records import StoredRun, load_runs

#: Names the results folder, if it is not the one beside the report.
RESULTS_VARIABLE = "FP8STUDY_RESULTS"
#: What to write for a value that no record holds.
MISSING = "–"
#: The format of a count that is worth a column only if some row has any.
IF_ANY = "if any"


@dataclass(frozen=True)
class Layout:
    """How a table is shown."""

    columns: Mapping[str, tuple[str, str]]
    """Column → its heading and its format; without a format it is text. A column that is empty
    throughout is left out."""
    group: str = ""
    """Template of the line over rows that share it, from the names of columns: what two rows have
    in common is said once, and the numbers keep their place on the screen."""


_GROUP = "{model}, {study} on {machine}: {setting}"
_ARM = {"num_gpus": ("GPUs", "d"), "arm": ("precision", "")}
_ARM_RUNS = {**_ARM, "num_runs": ("runs", "d")}

THROUGHPUT = Layout(
    {
        **_ARM_RUNS,
        "tokens_per_second_per_gpu": ("tokens/s per GPU", ",.0f"),
        "tflops_per_gpu": ("TFLOP/s per GPU", ".0f"),
        "mfu_bf16_peak_pct": ("MFU, % of dense BF16 peak", ".1f"),
        "bf16_peak_tflops": ("that peak", ".0f"),
        "speedup_pct": ("v BF16, %", "+.1f"),
        "note": ("note", ""),
    },
    _GROUP,
)
MEMORY = Layout(
    {
        **_ARM_RUNS,
        "memory_peak_gib": ("peak memory per GPU, GiB", ".1f"),
        "memory_change_pct": ("v BF16, %", "+.1f"),
    },
    _GROUP,
)
STARTUP = Layout(
    {
        **_ARM_RUNS,
        "startup_launch_seconds": ("process, s", ".1f"),
        "startup_imports_seconds": ("imports, s", ".1f"),
        "startup_device_seconds": ("device, s", ".1f"),
        "startup_model_seconds": ("model, s", ".1f"),
        "startup_sharding_seconds": ("sharding, s", ".1f"),
        "startup_rest_seconds": ("rest, s", ".1f"),
        "startup_seconds": ("start-up in all, s", ".1f"),
        "first_step_seconds": ("first step, s", ".1f"),
        "compile_seconds": ("compilation, s", ".1f"),
    },
    _GROUP,
)
SWITCHES = Layout(
    {
        "setting": ("setting", ""),
        "num_runs": ("runs", "d"),
        "tokens_per_second_per_gpu": ("tokens/s per GPU", ",.0f"),
        "gain_pct": ("v plain, %", "+.1f"),
        "memory_peak_gib": ("peak memory, GiB", ".1f"),
        "memory_change_pct": ("v plain, %", "+.1f"),
        "loss_gap_pct": ("loss v plain, %", "+.2f"),
        "verdict": ("verdict", ""),
    },
    "{model}, GPUs: {num_gpus}, {precision}, {study} on {machine}; plain: {setting_plain}",
)
PEERS = Layout(
    {
        "arm": ("precision", ""),
        "num_runs": ("runs", "d"),
        "tokens_per_second_per_gpu": ("tokens/s per GPU", ",.0f"),
        "range": ("range", ""),
        "peer_tokens_per_second_per_gpu": ("peer", ",.0f"),
        "peer_range": ("range", ""),
        "ratio": ("ours ÷ peer", ".3f"),
        "ratio_interval": ("95 % interval", ""),
        "reserved_gib": ("GiB", ".1f"),
        "peer_reserved_gib": ("peer", ".1f"),
    },
    "{model}, GPUs: {num_gpus}, {study} on {machine}; ours: {setting}; peer: {peer}, "
    "{num_peer_runs} runs",
)
OCCUPANCY = Layout(
    {
        "study": ("study", ""),
        "num_runs": ("runs", "d"),
        "num_gpus": ("GPUs", "d"),
        "wall_minutes": ("wall time, min", ".1f"),
        "in_steps_pct": ("in training steps, % of GPU time", ".1f"),
        "of_held_pct": ("of the time GPUs were held", ".1f"),
    },
    "{machine}",
)
CPU_RUNS = Layout(
    {
        "num_gpus": ("processes", "d"),
        "arm": ("precision (emulated)", ""),
        "num_runs": ("runs", "d"),
        "startup_seconds": ("start-up, s", ".1f"),
    },
    _GROUP,
)
LOSS_GAP = Layout(
    {
        "arm": ("precision", ""),
        "pairs": ("pairs", ""),
        "epochs": ("passes", ".1f"),
        "loss_bf16": ("BF16 loss", ".3f"),
        "gap_pct": ("FP8's gap, %", "+.2f"),
        "interval": ("its interval, %", ""),
        "p_holm": ("p, Holm", ".1g"),
        "judged": ("verdict", ""),
    },
    _GROUP + ", GPUs: {num_gpus}; margin ±{margin_pct} %",
)
DOCUMENT_A = Layout(
    {
        "arm": ("precision", ""),
        "num_runs": ("runs", "d"),
        "parameters_outside_optimizer_pct": ("parameters outside the optimizer, %", ".1f"),
        "loss_start": ("loss, first step", ".2f"),
        "loss_last20_mean": ("loss, last 20 steps", ".3f"),
        "tokens_per_second_per_gpu": ("tokens/s", ",.0f"),
        "speedup_pct": ("v BF16, %", "+.1f"),
        "memory_peak_gib": ("peak memory, GiB", ".1f"),
    },
    "{model} on {machine}, {masters} masters",
)
DATA = Layout(
    {
        "corpus": ("corpus", ""),
        "corpus_sha": ("SHA-256", ""),
        "vocab_size": ("vocabulary", ",d"),
        "num_train_tokens": ("tokens", ",d"),
        "tokens_seen_max": ("most seen in a run", ",d"),
        "epochs_max": ("passes", ".2f"),
        "num_seeds": ("seeds", "d"),
    },
    "{study} on {machine}",
)
PROVENANCE = Layout(
    {
        "hardware": ("hardware", ""),
        "driver": ("driver", ""),
        "version_torch": ("torch", ""),
        "version_torchao": ("torchao", ""),
        "version_transformers": ("transformers", ""),
        "commit": ("commit", ""),
    },
    "{study} on {machine}, {first_run} to {last_run}: {statuses}",
)
PEAKS = Layout(
    {
        "name_part": ("GPU", ""),
        "bf16_tflops": ("BF16", "g"),
        "fp8_tflops": ("FP8", "g"),
        "memory_tb_per_s": ("memory, TB/s", "g"),
        "source": ("source", ""),
    }
)
PUBLISHED = Layout(
    {
        "setting": ("setting", ""),
        "gpus": ("GPUs", ""),
        "bf16": ("BF16", ",.0f"),
        "fp8_tensorwise": ("FP8 tensorwise", ",.0f"),
        "fp8_tensorwise_pct": ("v BF16, %", "+.1f"),
        "fp8_rowwise": ("FP8 rowwise", ",.0f"),
        "fp8_rowwise_pct": ("v BF16, %", "+.1f"),
    },
    "{source}",
)
FAILURES = Layout(
    {
        "model": ("model", ""),
        **_ARM,
        "seed": ("seed", "d"),
        "status": ("status", ""),
        "steps_completed": ("steps", "d"),
        "status_detail": ("what it says", ""),
    },
    "{study} on {machine}",
)


@dataclass(frozen=True)
class Report:
    """Everything that a page shows is taken from here."""

    runs: pd.DataFrame
    """From `fp8study.analysis.frames.runs_frame`, with short names of arms."""
    metrics: pd.DataFrame
    """From `fp8study.analysis.frames.metrics_frame`."""
    throughput: pd.DataFrame
    """From `fp8study.analysis.speed.throughput_table`."""
    loss_gaps: pd.DataFrame
    """From `fp8study.analysis.losses.loss_gap_table`."""
    validation_gaps: pd.DataFrame
    """The same for the validation loss."""
    instruments: pd.DataFrame
    """From `fp8study.analysis.instruments.instruments_frame`."""
    stored: Sequence[StoredRun]
    """The records themselves, for what no frame holds."""
    unreadable: tuple[str, ...]
    """One line for each record that could not be read or judged, set aside ones included."""

    @property
    def gpu_runs(self) -> pd.DataFrame:
        """The runs on a GPU."""
        return self.runs[self.runs["device"] == "cuda"]

    @property
    def cpu_runs(self) -> pd.DataFrame:
        """The runs on a CPU, whose FP8 is emulated."""
        return self.runs[self.runs["device"] == "cpu"]

    @property
    def document_a(self) -> pd.DataFrame:
        """Document A's arms on the one machine that holds the most of them, GPUs first."""
        runs = self.runs[self.runs["study"].fillna("").str.startswith("document-a")]
        if runs.empty:
            return runs
        places = runs.groupby(["machine", "study", "model"]).agg(
            gpu=("device", lambda devices: (devices == "cuda").any()), arms=("arm_key", "nunique")
        )
        best = places.sort_values(["gpu", "arms"], ascending=False, kind="stable").index[0]
        chosen = (runs[["machine", "study", "model"]] == list(best)).all(axis=1)
        return runs[chosen]


def find_results(start: Path | None = None) -> Path:
    """Return the results folder: `RESULTS_VARIABLE`, or ``results`` in the nearest parent.

    Args:
        start: Where to look from; none: the current folder.

    Raises:
        UserError: The variable names no folder, or no parent holds ``results``.
    """
    named = os.environ.get(RESULTS_VARIABLE)
    if named:
        if not Path(named).is_dir():
            raise UserError(f"{RESULTS_VARIABLE}: {named!r} is not a folder; correct or unset it")
        return Path(named)
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / "results").is_dir():
            return folder / "results"
    raise UserError(
        f"results: none found in {here} or above; render from the checkout or set "
        f"{RESULTS_VARIABLE}"
    )


def load_report(results_dir: Path | None = None) -> Report:
    """Read all records and compute the tables that several pages use; once, while no file changes.

    Args:
        results_dir: Holds ``local/`` and ``reference/``; none: `find_results`.
    """
    folder = (results_dir or find_results()).resolve()
    files = [*folder.rglob("run*.json"), *folder.rglob("metrics.jsonl*")]
    stats = ((path, path.stat()) for path in files)
    return _load(folder, frozenset((path, stat.st_mtime_ns, stat.st_size) for path, stat in stats))


@functools.lru_cache(maxsize=1)
def _load(folder: Path, state: frozenset[tuple[Path, int, int]]) -> Report:
    """Load the report of a folder whose files are in this `state`; other processes keep theirs."""
    name = f"report-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    return kept(name, (path for path, *_ in state), lambda: _read_report(folder))


def _read_report(folder: Path) -> Report:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        report = report_of(load_runs(folder))
    told = [str(item.message) for item in caught if item.category is UserWarning]
    aside = [f"set aside: {p}" for p in sorted(folder.glob("local/*/*/run.corrupt*.json"))]
    return dataclasses.replace(report, unreadable=(*told, *aside))


def report_of(stored: Sequence[StoredRun], unreadable: tuple[str, ...] = ()) -> Report:
    """Compute what several pages use from records that are read already.

    Args:
        stored: From `fp8study.core.records.load_runs`, or a selection of it.
        unreadable: One line for each record that could not be read.
    """
    runs = shorten_arms(runs_frame(stored))
    return Report(
        runs=runs,
        metrics=metrics_frame(stored),
        throughput=throughput_table(runs),
        loss_gaps=loss_gap_table(runs),
        validation_gaps=loss_gap_table(runs, "validation_loss"),
        instruments=instruments_frame(stored, runs),
        stored=stored,
        unreadable=unreadable,
    )


def show(table: pd.DataFrame, layout: Layout, empty: str) -> HTML:
    """Format a table for a page.

    Args:
        table: Numbers, from a function of `fp8study.analysis`.
        layout: Its columns, and what its rows are grouped by.
        empty: The sentence to show if there are no rows.
    """
    if table.empty:
        return _html([f"<tr><td>{html.escape(empty)}</td></tr>"])
    columns = {
        name: (heading, spec)
        for name, (heading, spec) in layout.columns.items()
        if any(_cell(value, spec) != MISSING for value in table[name])
    }
    head = "".join(_td(heading, spec, "th") for heading, spec in columns.values())
    lines = []
    last_group = ""
    for row in table.to_dict("records"):
        known = {str(key): MISSING if _is_missing(value) else value for key, value in row.items()}
        group = layout.group.format(**known)
        if group != last_group:
            title = f"<strong>{html.escape(group)}</strong>"
            span = f'colspan="{len(columns)}" style="text-align: left;"'
            lines.append(f"<tr><td {span}>{title}</td></tr>")
            last_group = group
        cells = (_td(_cell(row[name], spec), spec) for name, (_, spec) in columns.items())
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return _html(lines, f"<thead><tr>{head}</tr></thead>")


#: A word of more characters may be broken: the name of a layer would push a table off the page.
_LONGEST_WORD = 20


def _html(lines: list[str], head: str = "") -> HTML:
    # The class is pandas' own: renderers know how to treat it.
    body = "\n".join(lines)
    return HTML(f'<table class="dataframe">\n{head}\n<tbody>\n{body}\n</tbody>\n</table>')


def _td(text: str, spec: str, tag: str = "td") -> str:
    side = "right" if spec else "left"
    style = f"text-align: {side};"
    if any(len(word) > _LONGEST_WORD for word in text.split()):
        style += " overflow-wrap: anywhere; min-width: 9em;"
    return f'<{tag} style="{style}">{html.escape(text)}</{tag}>'


def _is_missing(value: object) -> bool:
    return value is None or value is pd.NA or value != value or value == ""


def _cell(value: object, spec: str) -> str:
    if _is_missing(value) or (spec == IF_ANY and value == 0):
        return MISSING
    spec = ".0f" if spec == IF_ANY else spec
    text = format(value, spec).replace("-", "\u2212") if spec else str(value)
    return "∞" if text == "inf" else text


def peaks_table() -> pd.DataFrame:
    """The GPUs whose peak is known, in order of look-up."""
    return pd.DataFrame([dataclasses.asdict(peak) for peak in GPU_PEAKS])
