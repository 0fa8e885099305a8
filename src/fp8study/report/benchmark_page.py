"""``results/reference/BENCHMARKS.md``: the committed measurements, written from their records."""

from __future__ import annotations

import statistics
from pathlib import Path

import pandas as pd
from tabulate import tabulate

from fp8study.analysis.arms import arm_names
from fp8study.analysis.pairing import setting_label
from fp8study.analysis.peers import PeerComparison, PeerRecord, compare_with_peers, read_peers
from fp8study.analysis.speed import THEMES, VOID, measured_runs, theme_table
from fp8study.core.records import RunRecord, StoredRun, load_runs
from fp8study.report.words import count, escape

_INTRODUCTION = f"""# Benchmarks

Written by `make report` from the records beside this file; a test holds the two together.

A row is one arm: the median over its seeds and repeats, with the range in brackets where there are
several. A single run says nothing of its own error, and two calls on one machine can differ by more
than the repeats of one. `{VOID}` marks timings that the allocator may have made.
Arms that train part of their model, runs that shared a GPU, and CPUs are left out. Corpora are
named without their folders. Ratios to BF16 with their intervals are in the report; figures that
others published are not here.
"""


def benchmarks_path(results_dir: Path) -> Path:
    """Return where the page is kept."""
    return results_dir / "reference" / "BENCHMARKS.md"


def benchmarks_text(results_dir: Path) -> str:
    """Return the whole page.

    Args:
        results_dir: The folder that holds ``reference/``.

    Raises:
        UserError: A peer's record is broken.
    """
    stored = [run for run in load_runs(results_dir) if run.machine_label != "local"]
    runs = measured_runs(stored)
    parts = [_INTRODUCTION]
    if runs.empty:
        parts.append("No GPU records here yet.\n")
    for machine in sorted(runs["machine"].unique()):
        chosen = runs[runs["machine"] == machine]
        ours = [run for run in stored if run.machine_label == machine]
        by_id = {(run.record.study, run.record.run_id): run.record for run in ours}
        used = [by_id[key] for key in zip(chosen["study"], chosen["run_id"], strict=True)]
        parts.append(f"## {machine}: {_hardware(used[0])}\n")
        for theme in THEMES:
            table = theme_table(chosen, theme)
            if table.empty:
                continue
            there = chosen[chosen[list(theme.measures)].notna().any(axis=1)]
            keys = set(zip(there["study"], there["run_id"], strict=True))
            parts += [f"### {theme.title}\n", _markdown(_texts(table)) + "\n"]
            parts.append(_origins([r for r in used if (r.study, r.run_id) in keys]))
        parts += _peer_parts(ours)
    return "\n".join(parts)


def _hardware(record: RunRecord) -> str:
    facts = record.machine
    words = [
        f"{facts.get('gpu_memory_gib')} GiB" if facts.get("gpu_memory_gib") else None,
        f"{facts['power_limit_watts']:.0f} W" if facts.get("power_limit_watts") else None,
        f"{facts['gpu_link']} links" if facts.get("gpu_link") else None,
    ]
    known = ", ".join(word for word in words if word)
    number = facts.get("num_gpus_on_machine")
    return f"{f'{number} × ' if number else ''}{facts.get('gpu_name')}{f' ({known})' * bool(known)}"


def _texts(table: pd.DataFrame) -> dict[str, list[str]]:
    return {str(name): table[name].astype(str).tolist() for name in table.columns}


def _markdown(columns: dict[str, list[str]]) -> str:
    """Lay out a table; numbers to the right, and nothing of a record is taken for markup."""
    right = {"GPUs", "runs"}
    escaped = {name: [escape(str(v)) for v in values] for name, values in columns.items()}
    aligned = [
        "right" if name in right or all(v[:1].isdigit() for v in values) else "left"
        for name, values in columns.items()
    ]
    return tabulate(
        escaped, headers="keys", tablefmt="pipe", disable_numparse=True, colalign=aligned
    )


def _origins(records: list[RunRecord]) -> str:
    """Say, in a line per study and installation, what ran when, by which command."""
    groups: dict[tuple[str, str], list[RunRecord]] = {}
    for record in records:
        groups.setdefault((_command(record), _installation(record)), []).append(record)
    lines = []
    for (command, installation), group in sorted(groups.items()):
        days = sorted({record.started_at[:10] for record in group})
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        hardware = f"{_hardware(group[0])}, driver {group[0].machine.get('driver')}"
        number = count(len(group), "run")
        lines.append(f"- `{command}`: {number}, {when}; {hardware}; {installation}")
    return "\n".join(lines) + "\n"


def _command(record: RunRecord) -> str:
    corpus, tokenizer = str(record.data.get("corpus")), record.config.get("tokenizer")
    own_data = f" SET='corpus={corpus} tokenizer={tokenizer}'" if corpus[:5] == "text:" else ""
    return f"make reproduce STUDY={record.study}{own_data}"


def _installation(record: RunRecord) -> str:
    versions = {name: record.versions.get(name) for name in ("torch", "torchao", "accelerate")}
    versions |= {"transformers": record.versions.get("transformers")}
    versions |= {"CUDA": record.versions.get("cuda")}
    known = ", ".join(f"{name} {version or 'unknown'}" for name, version in versions.items())
    dirty = " with uncommitted changes" if record.git.get("dirty") else ""
    return f"{known}; commit {str(record.git.get('commit') or 'unknown')[:10]}{dirty}"


def _peer_parts(stored: list[StoredRun]) -> list[str]:
    """Return the section on other trainers, or nothing where no study has one."""
    parts = []
    folders = sorted({run.run_dir.parent for run in stored})
    for folder in folders:
        peers = read_peers(folder)
        if not peers:
            continue
        records = [run.record for run in stored if run.run_dir.parent == folder]
        pairs, alone = compare_with_peers(records, peers)
        parts.append(f"### Beside other trainers in the same call: {folder.name}\n")
        if pairs:
            parts.append(_markdown(_peer_columns(pairs)) + "\n")
            used = [record for pair in pairs for record in pair.arm.records]
            parts.append(_origins(list({r.run_id: r for r in used}.values())).rstrip("\n"))
        parts.append("\n".join(_peer_line(p, p in alone) for p in peers) + "\n")
    return parts


def _peer_columns(pairs: list[PeerComparison]) -> dict[str, list[str]]:
    names = arm_names({str(number): pair.arm for number, pair in enumerate(pairs)})
    columns: dict[str, list[str]] = {}
    for number, pair in enumerate(pairs):
        peer, ratio = pair.peer, pair.speed_ratio
        rates = pair.arm.rates
        row = {
            "ours": names[str(number)],
            "setting": setting_label(pair.arm.records[0].config),
            "peer": f"{peer.name} {peer.version}",
            "runs, ours and peer": f"{len(rates)} and {len(peer.rates)}",
            "tokens/s per GPU, ours": _middle(rates, "{:,.0f}"),
            "peer's": _middle(peer.rates, "{:,.0f}"),
            "ours ÷ peer": f"{ratio.estimate:.3f}" if ratio else "no timings that count",
            "95 % interval": ratio.interval_text() if ratio else "",
            "GiB reserved, ours": f"{pair.reserved_gib:.1f}" if pair.reserved_gib else "",
            "peer's GiB": _middle(peer.memory_peak_gib, "{:.1f}"),
        }
        for name, text in row.items():
            columns.setdefault(name, []).append(text)
    return columns


def _middle(values: list[float], form: str) -> str:
    return form.format(statistics.median(values)) if values else ""


def _peer_line(peer: PeerRecord, is_alone: bool) -> str:
    what = f"{peer.model} × {peer.num_gpus}, {peer.precision}, batch {peer.micro_batch_size}"
    ended = "" if peer.status == "completed" else f", {peer.status.replace('_', ' ')}"
    versions = ", ".join(f"{name} {peer.versions.get(name)}" for name in ("torch", "torchao"))
    alone = "; no arm of ours did the same" if is_alone else ""
    return (
        f"- {peer.name} {peer.version}, commit {(peer.commit or 'unknown')[:10]}, {what}{ended}: "
        f"`{peer.command}`, {peer.started_at[:10]}; {peer.machine.get('gpu_name')}; {versions}; "
        f"logs {', '.join(peer.log_files) or 'not kept'}{alone}"
    )
