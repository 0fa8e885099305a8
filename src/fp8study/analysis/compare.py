"""Two folders of results side by side, arm by arm."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8study.analysis.arms import Arm, arm_names, differing, group_arms, read_folder
from fp8study.analysis.differences import arm_caveats, machine_differences, same_data, side_line
from fp8study.analysis.ratios import Ratio, ratio_of
from fp8study.core.config import FIELD_NAMES, completed
from fp8study.core.errors import UserError, nearest

#: So many differing fields are named where an arm has no partner.
_MOST_FIELDS = 3


@dataclass(frozen=True)
class ArmComparison:
    """One arm in two folders, A and B."""

    arm: str
    num_runs_a: int
    """Runs whose timings count."""
    num_runs_b: int
    tokens_per_second_per_gpu_a: float | None
    """Median over the runs whose timings count."""
    tokens_per_second_per_gpu_b: float | None
    speed_ratio: Ratio | None
    """B ÷ A of tokens per second and GPU; None where a side has no timings that count."""
    memory_ratio: float | None
    """B ÷ A of the largest peak memory."""
    loss_difference: float | None
    """B − A of the final training loss, nats per token, mean over the seeds in both; None
    without a common seed or on other data."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Two folders of results."""

    sides: tuple[str, str]
    """A line about each folder."""
    rows: tuple[ArmComparison, ...]
    without_partner: tuple[str, ...]
    """A line for each arm that is in one folder only."""


def compare_folders(a: Path, b: Path, ignored: Sequence[str] = ()) -> Comparison:
    """Pair the arms of two folders and compare each pair.

    Args:
        a: A folder of results, a run's folder, or a ``run.json``.
        b: The one to be judged.
        ignored: Fields in which paired arms may differ.

    Raises:
        UserError: A folder without records, an unknown field, or no arm that is in both.
    """
    check_fields(ignored, "--ignore")
    records = read_folder(a, "A"), read_folder(b, "B")
    arms_a, arms_b = (group_arms(found, ignored) for found in records)
    names = arm_names(arms_b | arms_a)
    common = [key for key in arms_a if key in arms_b]
    lonely = [
        f"only in {side}: {names[key]}{_nearest_arm(arm, others, other)}"
        for side, ours, other, others in (("A", arms_a, "B", arms_b), ("B", arms_b, "A", arms_a))
        for key, arm in ours.items()
        if key not in others
    ]
    if not common:
        raise UserError(
            f"B: '{b}' shares no arm with '{a}': {lonely[0]}; name the fields that may differ, "
            "as --ignore num_steps"
        )
    return Comparison(
        sides=(side_line("A", str(a), records[0]), side_line("B", str(b), records[1])),
        rows=tuple(_row(names[key], arms_a[key], arms_b[key], ignored) for key in common),
        without_partner=tuple(lonely),
    )


def check_fields(names: Sequence[str], option: str) -> None:
    """Refuse what is no field of a configuration.

    Raises:
        UserError: With the nearest field.
    """
    for name in names:
        if name not in FIELD_NAMES:
            raise UserError(
                f"{option}: '{name}' is no field{nearest(name, FIELD_NAMES)}; "
                f"known: {', '.join(FIELD_NAMES)}"
            )


def _nearest_arm(arm: Arm, others: dict[str, Arm], side: str) -> str:
    """Say in what an arm differs from the other folder's arm that is most like it."""
    fields = min((differing(arm, other) for other in others.values()), key=len, default=[])
    more = f" and {len(fields) - _MOST_FIELDS} more" if len(fields) > _MOST_FIELDS else ""
    return f" (nearest in {side} differs in {', '.join(fields[:_MOST_FIELDS])}{more})"


def _row(name: str, a: Arm, b: Arm, ignored: Sequence[str]) -> ArmComparison:
    notes = machine_differences(a.records, b.records)
    for field in ignored:
        ours, theirs = (_values_of(field, arm) for arm in (a, b))
        if ours != theirs:
            notes.append(f"{field} {ours} → {theirs}")
    notes += arm_caveats("A", a) + arm_caveats("B", b)
    seeds = sorted(a.losses.keys() & b.losses.keys())
    loss = None
    if not same_data(a.records, b.records):
        notes.append("other or unknown data: no loss compared")
    elif seeds:
        loss = statistics.mean(b.losses[seed] - a.losses[seed] for seed in seeds)
    elif a.losses and b.losses:
        notes.append("no common seed: no loss compared")
    return ArmComparison(
        arm=name,
        num_runs_a=len(a.rates),
        num_runs_b=len(b.rates),
        tokens_per_second_per_gpu_a=median(a.rates),
        tokens_per_second_per_gpu_b=median(b.rates),
        speed_ratio=ratio_of([b.rates], [a.rates]),
        memory_ratio=quotient(b.memory_peak_gib, a.memory_peak_gib),
        loss_difference=loss,
        notes=tuple(notes),
    )


def _values_of(field: str, arm: Arm) -> str:
    return " / ".join(sorted({str(completed(r.config).get(field)) for r in arm.records}))


def median(values: list[float]) -> float | None:
    """Return the median, or None of nothing."""
    return statistics.median(values) if values else None


def quotient(above: float | None, below: float | None) -> float | None:
    """Divide, where both are known."""
    return above / below if above is not None and below else None
