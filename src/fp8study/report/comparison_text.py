"""Comparisons for reading on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from fp8study.analysis.arms import Ratio
from fp8study.analysis.compare import Comparison, RelativeComparison
from fp8study.report.words import number as write

#: Stands for what is not known.
NONE = "–"


def comparison_text(comparison: Comparison) -> str:
    """Return a table of the paired arms, with its notes and the arms without a partner."""
    rows = comparison.rows
    shared, numbers, listed = share_notes([row.notes for row in rows])
    table = [
        [
            f"{row.num_runs_a} | {row.num_runs_b}",
            number(row.tokens_per_second_per_gpu_a, "{:,.0f}"),
            number(row.tokens_per_second_per_gpu_b, "{:,.0f}"),
            estimate(row.speed_ratio),
            interval(row.speed_ratio),
            number(row.memory_ratio, "{:.3f}"),
            NONE if row.loss_difference is None else write(row.loss_difference, "+.4f"),
            marks,
        ]
        for row, marks in zip(rows, numbers, strict=True)
    ]
    headers = [
        "runs\nA|B", "tok/s/GPU\nA", "\nB", "\nB/A", "\n95 % CI", "memory\nB/A", "loss\nB−A",
        "\nnotes",
    ]  # fmt: skip
    arms = [row.arm for row in rows]
    parts = [*comparison.sides, "", plain_table(arms, table, headers, texts=(4, 7)), *listed]
    parts += [f"every arm: {note}" for note in shared]
    return "\n".join([*parts, *comparison.without_partner])


def relative_text(comparison: RelativeComparison) -> str:
    """Return the arms over their reference arms, then these ratios' change from a baseline."""
    rows = comparison.rows
    shared, numbers, listed = share_notes([row.notes for row in rows])
    here = [
        [
            str(row.num_runs),
            number(row.tokens_per_second_per_gpu, "{:,.0f}"),
            estimate(row.speed),
            interval(row.speed),
            number(row.memory, "{:.3f}"),
            marks,
        ]
        for row, marks in zip(rows, numbers, strict=True)
    ]
    headers = [
        "\nruns", "\ntok/s/GPU", "÷ refer-\nence", "\n95 % CI", "memory ÷\nreference",
        "\nnotes",
    ]  # fmt: skip
    arms = [row.arm for row in rows]
    parts = [*comparison.sides, f"reference arms: {comparison.reference}", ""]
    parts += [plain_table(arms, here, headers, texts=(3, 5)), *listed]
    parts += [f"every arm: {note}" for note in shared]
    parts += comparison.without_reference
    if len(comparison.sides) > 1:
        change = [
            [
                estimate(row.speed_baseline),
                estimate(row.change),
                interval(row.change),
                number(row.memory_baseline, "{:.3f}"),
            ]
            for row in rows
        ]
        headers = ["÷ reference in\nthe baseline", "\nchange", "\n95 % CI",
                   "memory ÷ reference\nin the baseline"]  # fmt: skip
        parts += [
            "",
            plain_table(arms, change, headers, texts=(2,)),
            "change: the ratio here over the baseline's. Its interval holds the spread between "
            "the runs of a session; two sessions can differ by more.",
        ]
    if comparison.device == "cpu":
        parts.append("No GPU: FP8 is emulated, so that no ratio here says anything of FP8's speed.")
    return "\n".join(parts)


def share_notes(
    notes: Sequence[tuple[str, ...]],
) -> tuple[list[str], list[str], list[str]]:
    """Number the notes of a table's rows, so that each is written once.

    Returns:
        The notes that all rows share, each row's numbers, and the numbered notes.
    """
    shared = [n for n in notes[0] if all(n in others for others in notes)] if notes else []
    known: dict[str, int] = {}
    numbers = []
    for own in notes:
        for note in own:
            if note not in shared:
                known.setdefault(note, len(known) + 1)
        numbers.append(" ".join(str(known[note]) for note in own if note in known))
    return shared, numbers, [f"[{position}] {note}" for note, position in known.items()]


def plain_table(
    arms: Sequence[str], rows: list[list[str]], headers: list[str], texts: Sequence[int]
) -> str:
    """Lay out a table with each arm's name on a line above its row; empty columns go.

    Args:
        arms: A name for each row; too long for a column.
        rows: Texts.
        headers: One for each column, of two lines.
        texts: Columns that stand to the left; the others are numbers.
    """
    kept = [i for i in range(len(headers)) if any(row[i] not in ("", NONE) for row in rows)]
    lines = tabulate(
        [[row[i] for i in kept] for row in rows],
        [headers[i] for i in kept],
        tablefmt="simple",
        disable_numparse=True,
        colalign=["left" if i in texts else "right" for i in kept],
    ).splitlines()
    head, body = lines[: -len(rows)], lines[-len(rows) :]
    named = [line for arm, row in zip(arms, body, strict=True) for line in (arm, f"  {row}")]
    return "\n".join([*(f"  {line}" for line in head), *named])


def number(value: float | None, form: str) -> str:
    """Write a number, or a dash where it is not known."""
    return NONE if value is None else form.format(value)


def estimate(ratio: Ratio | None) -> str:
    """Write a ratio without its interval."""
    return NONE if ratio is None else f"{ratio.estimate:.3f}"


def interval(ratio: Ratio | None) -> str:
    """Write a ratio's interval, or why there is none."""
    return NONE if ratio is None else ratio.interval_text()
