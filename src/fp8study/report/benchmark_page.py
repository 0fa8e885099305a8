"""``results/reference/BENCHMARKS.md``: the committed measurements, written from their tables."""

from __future__ import annotations

from pathlib import Path

from fp8study.analysis.peers import PeerRecord, read_peers
from fp8study.analysis.runs.frames import data_table, provenance_table
from fp8study.analysis.speed import MEMORY_FULL
from fp8study.core.errors import UserError
from fp8study.core.records import StoredRun, load_runs
from fp8study.report import layouts
from fp8study.report.export import TABLES
from fp8study.report.page import report_of
from fp8study.report.table import Layout, markdown
from fp8study.report.words import escape

_INTRODUCTION = f"""# Benchmarks

Written by `make report` from the records beside this file; a test holds the two together.

A row is one arm: the median over its seeds, of each over its repeats. "v BF16" is the median over
the seeds of FP8's figure over that of BF16 with the same seed: with one seed, a ratio of two
medians. (The report's leads pair the repeats too, within a session: see its rule, and
`leads.csv`.) Ratios to other trainers, and leads beside theirs, are of geometric means over
repeats, with Welch's intervals. A token's FLOPs are 6 for each weight of a linear layer, the loss
head's too, and attention's without a causal mask; MFU is over the dense BF16 peak of the GPU's
datasheet, in FP8 too. Two sessions on one machine can differ by more than the repeats of one.
Where it says "{MEMORY_FULL}" the rate was the allocator's and is left out. Arms that train part
of their model, runs that shared a GPU, and CPUs are left out. `make reproduce STUDY=…` runs a
study again. The same tables as CSV files are in each machine's `tables/`; figures that
others published are in the report.
"""
_RATES = ["tokens_per_second_per_gpu", "tflops_per_gpu", "mfu_bf16_peak_pct"]
SPEED = "Throughput and peak memory"
#: Title → the exported table that it shows, and how.
_SECTIONS: dict[str, tuple[str, Layout]] = {
    SPEED: ("throughput", layouts.THROUGHPUT),
    "Beside other trainers in the same session": ("peers", layouts.PEERS),
}


def benchmarks_path(results_dir: Path) -> Path:
    """Return where the page is kept."""
    return results_dir / "reference" / "BENCHMARKS.md"


def write_benchmarks(results_dir: Path) -> Path:
    """Write `benchmarks_text` to `benchmarks_path`, and return that.

    Raises:
        UserError: There are no committed results.
    """
    path = benchmarks_path(results_dir)
    if not path.parent.is_dir():
        raise UserError(f"results: there is no '{path.parent}'; run in a checkout")
    path.write_text(benchmarks_text(results_dir), encoding="utf-8")
    return path


def benchmarks_text(results_dir: Path) -> str:
    """Return the whole page.

    Raises:
        UserError: A peer's record is broken.
    """
    stored = [run for run in load_runs(results_dir) if _counts(run)]
    report = report_of(stored)
    parts = [_INTRODUCTION]
    tables = {title: TABLES[name](report) for title, (name, _) in _SECTIONS.items()}
    speed = report.with_warnings(tables[SPEED])
    full = speed["note"].str.contains(MEMORY_FULL)
    tables[SPEED] = speed.assign(**{name: speed[name].mask(full) for name in _RATES})
    # A folder of somebody's machine is no part of a corpus' name.
    named = report.runs["corpus"].str.replace(r"^text:.*/", "text:", regex=True)
    data = report.runs.assign(corpus=named)
    for machine in sorted(set(data["machine"])):
        runs = data[data["machine"] == machine]
        parts.append(f"## {_hardware([r for r in stored if r.machine_label == machine])}\n")
        for title, (_, layout) in _SECTIONS.items():
            table = tables[title]
            if len(chosen := table[table["machine"] == machine]):
                parts += [f"### {title}\n", markdown(chosen, layout)]
        for folder in sorted({r.run_dir.parent for r in stored if r.machine_label == machine}):
            parts += [_peer_line(peer) for peer in read_peers(folder)]
        parts += ["### Software and data\n", markdown(provenance_table(runs), layouts.PROVENANCE)]
        parts.append(markdown(data_table(runs), layouts.DATA))
    if len(parts) == 1:
        parts.append("No GPU records here yet.\n")
    return "\n".join(parts)


def _counts(run: StoredRun) -> bool:
    """Whether a run is committed, and had GPUs of its own for a model that it trained whole."""
    record = run.record
    return (
        run.machine_label != "local"
        and record.status == "completed"
        and record.machine.get("device") == "cuda"
        and (record.config.get("runs_per_gpu") or 1) == 1
        and not record.config.get("untrained")
        and not record.model.get("parameters_outside_optimizer_pct")
    )


def _hardware(stored: list[StoredRun]) -> str:
    facts = stored[0].record.machine
    words = [
        f"{facts.get('gpu_memory_gib')} GiB" if facts.get("gpu_memory_gib") else None,
        f"{facts['power_limit_watts']:.0f} W" if facts.get("power_limit_watts") else None,
        f"{facts['gpu_link']} links" if facts.get("gpu_link") else None,
    ]
    known = ", ".join(word for word in words if word)
    gpus = f"{facts.get('num_gpus_on_machine') or '?'} × {facts.get('gpu_name')}"
    return f"{stored[0].machine_label}: {gpus}{f' ({known})' if known else ''}"


def _peer_line(peer: PeerRecord) -> str:
    versions = ", ".join(f"{name} {peer.versions.get(name)}" for name in ("torch", "torchao"))
    return (
        f"- {escape(peer.name)} {escape(peer.version)}, commit {(peer.commit or 'unknown')[:10]}, "
        f"{escape(peer.model)} × {peer.num_gpus}, {peer.precision}, batch {peer.micro_batch_size}, "
        f"{peer.status.replace('_', ' ')}: `{peer.command}`, {peer.started_at[:10]}; {versions}; "
        f"logs {', '.join(peer.log_files) or 'not kept'}\n"
    )
