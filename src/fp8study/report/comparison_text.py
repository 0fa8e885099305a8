"""Comparisons for reading on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from fp8study.analysis.arms import Ratio
from fp8study.analysis.compare import Comparison
from fp8study.core.records import MIN_PAIRS_FOR_INTERVAL
from fp8study.report.words import count, number

#: Stands for what is not known.
NONE = "–"
#: So many arms without a partner are each named.
_FEW = 4
Row = Mapping[str, Any]


def _number(key: str, spec: str) -> Callable[[Row], str]:
    return lambda row: NONE if row[key] is None else number(row[key], spec)


def _ratio(key: str) -> Callable[[Row], str]:
    return lambda row: NONE if row[key] is None else f"{row[key].estimate:.3f}"


def _interval(key: str) -> Callable[[Row], str]:
    return lambda row: NONE if row[key] is None else row[key].interval_text()


#: Heading, of two lines, → how its cell is written.
_OVER_BF16: dict[str, Callable[[Row], str]] = {
    "tok/s ÷ BF16's\nin A": _ratio("over_bf16_a"),
    "\nin B": _ratio("over_bf16_b"),
}
_FOLDERS: dict[str, Callable[[Row], str]] = {
    "runs\nA|B": lambda row: f"{row['num_runs_a']} | {row['num_runs_b']}",
    "tok/s/GPU\nA": _number("tokens_per_second_per_gpu_a", ",.0f"),
    "\nB": _number("tokens_per_second_per_gpu_b", ",.0f"),
    "\nB/A": _ratio("speed_ratio"),
    "\n95 % CI": _interval("speed_ratio"),
    "memory\nB/A": _number("memory_ratio", ".3f"),
    "loss B−A\nnats": _number("loss_difference", "+.4f"),
    "\nnotes": lambda row: row["marks"],
}
_RELATIVE: dict[str, Callable[[Row], str]] = {
    "\nruns": lambda row: str(row["num_runs"]),
    "\ntok/s/GPU": _number("tokens_per_second_per_gpu", ",.0f"),
    "÷ refer-\nence": _ratio("speed"),
    "\n95 % CI": _interval("speed"),
    "memory ÷\nreference": _number("memory", ".3f"),
    "\nnotes": lambda row: row["marks"],
}
_CHANGE: dict[str, Callable[[Row], str]] = {
    "÷ reference in\nthe baseline": _ratio("speed_baseline"),
    "\nchange": _ratio("change"),
    "\n95 % CI": _interval("change"),
    "memory ÷ reference\nin the baseline": _number("memory_baseline", ".3f"),
}


def comparison_text(found: Comparison) -> str:
    """Return a table of the arms, with its notes, the arms left out, and the baseline's table."""
    shared, marks, listed = share_notes([row["notes"] for row in found.rows])
    rows = [dict(row, marks=own) for row, own in zip(found.rows, marks, strict=True)]
    reference = [f"reference arms: {found.reference}"] if found.reference else []
    parts = [*found.sides, *reference, ""]
    if over := [row for row in rows if any(_to_bf16(row))]:
        parts += [_table(over, _OVER_BF16), ""]
    parts += [_table(rows, _RELATIVE if found.reference else _FOLDERS), *listed]
    parts += [*(f"every arm: {note}" for note in shared)]
    if not found.reference:
        parts.append("tok/s/GPU: geometric means over an arm's runs, of which B/A is the ratio")
    if any(ratio and ratio.is_within_blocks for row in rows for ratio in _to_bf16(row)):
        parts.append(
            "tok/s ÷ BF16's: the mean of the ratios of runs that share seed, repeat and GPUs, "
            f"where {MIN_PAIRS_FOR_INTERVAL} or more do"
        )
    parts += _counted(found.without_partner)
    if any(row.get("speed_baseline") for row in rows):
        parts += [
            "",
            _table(rows, _CHANGE),
            "change: the ratio here over the baseline's. Its interval holds the spread between "
            "the runs of a session; two sessions can differ by more.",
        ]
    if found.device == "cpu":
        parts.append("No GPU: FP8 is emulated, so that no ratio here says anything of FP8's speed.")
    return "\n".join(parts)


def _to_bf16(row: Row) -> list[Ratio | None]:
    return [row.get(f"over_bf16_{side}") for side in "ab"]


def _counted(lines: Sequence[str]) -> list[str]:
    """Return the lines about arms without a partner, or of more than `_FEW` only their numbers."""
    if len(lines) <= _FEW:
        return list(lines)
    kinds = Counter(line.partition(": ")[0] for line in lines)
    return [f"{kind}: {count(times, 'arm')}" for kind, times in kinds.items()]


def share_notes(
    notes: Sequence[tuple[str, ...]],
) -> tuple[list[str], list[str], list[str]]:
    """Number the notes of a table's rows, so that each is written once.

    Returns:
        The notes that all rows share, each row's numbers, and the numbered notes.
    """
    shared = [n for n in notes[0] if all(n in others for others in notes)] if notes else []
    listed = list(dict.fromkeys(n for own in notes for n in own if n not in shared))
    marks = [" ".join(str(listed.index(n) + 1) for n in own if n in listed) for own in notes]
    return shared, marks, [f"[{place}] {note}" for place, note in enumerate(listed, 1)]


def _table(rows: Sequence[Row], columns: Mapping[str, Callable[[Row], str]]) -> str:
    """Lay out a table with each arm's name on a line above its row; empty columns go."""
    cells = {heading: [write(row) for row in rows] for heading, write in columns.items()}
    kept = {h: column for h, column in cells.items() if {*column} - {"", NONE}}
    lines = tabulate(
        kept,
        headers="keys",
        tablefmt="simple",
        disable_numparse=True,
        colalign=["left" if h in ("\n95 % CI", "\nnotes") else "right" for h in kept],
    ).splitlines()
    head, body = lines[: -len(rows)], lines[-len(rows) :]
    named = [f"{row['arm']}\n  {line}" for row, line in zip(rows, body, strict=True)]
    return "\n".join([*(f"  {line}" for line in head), *named])
