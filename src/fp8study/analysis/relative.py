"""Arms as ratios to a reference arm of the same call, beside the ratios of a baseline.

Rates of another machine, or of another day on this one, say little about a change to the code. The
ratio of two arms that ran one after the other says more, and its change against a baseline's ratio
is what tells a regression from a slower machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8study.analysis.arms import Arm, arm_key, arm_names, group_arms, read_folder
from fp8study.analysis.compare import check_fields, median, quotient
from fp8study.analysis.differences import arm_caveats, machine_differences, side_line
from fp8study.analysis.ratios import Ratio, ratio_of
from fp8study.core.config import completed
from fp8study.core.errors import UserError
from fp8study.core.fields import varying

#: Fields that follow from another one, and may differ where that one does.
_FOLLOWERS = {"precision": varying("pair"), "path": varying("switch")}


@dataclass(frozen=True)
class RelativeArm:
    """One arm of a call, over the call's reference arm."""

    arm: str
    num_runs: int
    """Runs of the arm whose timings count."""
    tokens_per_second_per_gpu: float | None
    """Median; the only absolute rate, to be compared with nothing."""
    speed: Ratio | None
    """Tokens per second, over the reference arm's."""
    speed_baseline: Ratio | None
    """The same in the baseline."""
    change: Ratio | None
    """``speed`` over ``speed_baseline``: below 1 the arm has lost ground."""
    memory: float | None
    """Peak memory, over the reference arm's."""
    memory_baseline: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class RelativeComparison:
    """A call, and a baseline where there is one."""

    sides: tuple[str, ...]
    """A line about each folder, the baseline's first."""
    reference: str
    """The fields that make an arm the reference."""
    rows: tuple[RelativeArm, ...]
    without_reference: tuple[str, ...]
    """A line for each arm of the call that has no reference arm."""
    device: str


def compare_relative(
    baseline: Path | None, here: Path, reference: Mapping[str, Any]
) -> RelativeComparison:
    """Divide every arm by its reference arm, and that by the baseline's.

    Args:
        baseline: A folder of results; None for the call alone.
        here: The call to be judged.
        reference: Field → its value in the reference arm, which is equal to the arm in all other
            fields but those that follow from these.

    Raises:
        UserError: A folder without records, an unknown field, or no arm with a reference arm.
    """
    check_fields(list(reference), "--reference")
    wanted = {name: completed(reference)[name] for name in reference}
    records = read_folder(here, "B")
    ours, sides = group_arms(records), [side_line("B", str(here), records)]
    theirs: dict[str, Arm] = {}
    if baseline is not None:
        found = read_folder(baseline, "A")
        theirs = group_arms(found)
        sides.insert(0, side_line("A", str(baseline), found))
    names = arm_names(theirs | ours)
    rows, lonely = [], []
    for key, arm in ours.items():
        if _is_reference(arm, wanted):
            continue
        base = _reference_of(arm, ours, wanted)
        if base is None:
            lonely.append(f"no reference arm, or several: {names[key]}")
            continue
        rows.append(_row(names[key], arm, base, theirs.get(key), theirs, wanted))
    words = ", ".join(f"{name}={value}" for name, value in wanted.items())
    if not rows:
        raise UserError(
            f"--reference: '{words}' is the reference of no arm in '{here}'; give fields in which "
            "its arms differ, as precision=bf16"
        )
    device = str(records[0].machine.get("device"))
    return RelativeComparison(tuple(sides), words, tuple(rows), tuple(lonely), device)


def _is_reference(arm: Arm, wanted: Mapping[str, Any]) -> bool:
    return all(arm.config.get(name) == value for name, value in wanted.items())


def _reference_of(arm: Arm, arms: Mapping[str, Arm], wanted: Mapping[str, Any]) -> Arm | None:
    """Return the one reference arm that equals `arm` in all that is not asked about."""
    free = {*wanted, *(field for name in wanted for field in _FOLLOWERS.get(name, ()))}

    def rest(config: Mapping[str, Any]) -> str:
        return arm_key({name: value for name, value in config.items() if name not in free})

    found = [
        other
        for other in arms.values()
        if _is_reference(other, wanted) and rest(other.config) == rest(arm.config)
    ]
    return found[0] if len(found) == 1 else None


def _row(
    name: str,
    arm: Arm,
    base: Arm,
    old_arm: Arm | None,
    theirs: Mapping[str, Arm],
    wanted: Mapping[str, Any],
) -> RelativeArm:
    notes = arm_caveats("B", arm) + arm_caveats("B, reference", base)
    notes += machine_differences(base.records, arm.records)
    old_base = _reference_of(old_arm, theirs, wanted) if old_arm else None
    old_speed = change = old_memory = None
    if old_arm and old_base:
        notes += arm_caveats("A", old_arm) + arm_caveats("A, reference", old_base)
        notes += machine_differences(old_arm.records, arm.records)
        old_speed = ratio_of([old_arm.rates], [old_base.rates])
        change = ratio_of([arm.rates, old_base.rates], [base.rates, old_arm.rates])
        old_memory = quotient(old_arm.memory_peak_gib, old_base.memory_peak_gib)
    elif theirs:
        notes.append("not in the baseline")
    return RelativeArm(
        arm=name,
        num_runs=len(arm.rates),
        tokens_per_second_per_gpu=median(arm.rates),
        speed=ratio_of([arm.rates], [base.rates]),
        speed_baseline=old_speed,
        change=change,
        memory=quotient(arm.memory_peak_gib, base.memory_peak_gib),
        memory_baseline=old_memory,
        notes=tuple(dict.fromkeys(notes)),
    )
