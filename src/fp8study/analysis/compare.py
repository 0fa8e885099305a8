"""Two folders of results side by side, arm by arm, or as ratios to an arm of their own.

Rates of another machine, or of another day on this one, say little about a change to the code. The
ratio of two arms that ran one after the other says more, and its change against a baseline's ratio
is what tells a regression from a slower machine (`compare_relative`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8study.analysis.arms import (
    Arm,
    Ratio,
    arm_caveats,
    arm_names,
    differing,
    differing_fields,
    geometric_mean,
    group_arms,
    machine_differences,
    ratio_of,
    read_folder,
    same_data,
    side_line,
)
from fp8study.core.config import FIELD_NAMES, completed, read_field
from fp8study.core.errors import UserError, nearest
from fp8study.core.field_types import shown
from fp8study.core.fields import varying
from fp8study.core.path.switches import RETIRED
from fp8study.core.records import MIN_PAIRS_FOR_INTERVAL

#: So many differing fields are named where an arm has no partner.
_MOST_FIELDS = 3
#: So many are written as options to paste; arms that differ in more are not of one question.
_MOST_OPTIONS = 12
#: What may be ignored: arms may be told apart by a field that only older records have.
_IGNORABLE = (*FIELD_NAMES, *RETIRED)
#: Fields that follow from another one, and may differ where that one does.
_FOLLOWERS = {
    "precision": varying("pair"), "path": varying("switch"), "num_gpus": ("strategy",),
}  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Folders of results, arm by arm."""

    sides: tuple[str, ...]
    """A line about each folder."""
    rows: tuple[dict[str, Any], ...]
    """One for each arm that can be compared; ratios are `fp8study.analysis.arms.Ratio`."""
    without_partner: tuple[str, ...]
    """A line for each arm that cannot."""
    reference: str = ""
    """The fields that make an arm the reference, where ratios are to one."""
    device: str = ""


def compare_folders(a: Path, b: Path, ignored: Sequence[str] = ()) -> Comparison:
    """Pair the arms of two folders and compare each pair.

    Args:
        a: A folder of results, a run's folder, or a ``run.json``.
        b: The one to be judged.
        ignored: Fields in which paired arms may differ.

    Returns:
        Rows of the ``arm``; of each side, ``_a`` and ``_b``, its speed ``over_bf16``, the ratio
        that says something of another machine; ``num_runs`` whose timings count and
        their geometric mean ``tokens_per_second_per_gpu``; ``speed_ratio`` (of these means) and
        ``memory_ratio`` (of the largest peaks), B ÷ A; ``loss_difference``, B − A of the final
        training loss, nats per token, mean over the seeds that did as many steps in both, None
        without such a seed or on other data; ``notes``.

    Raises:
        UserError: A folder without records, an unknown field, or no arm that is in both.
    """
    _check_fields(ignored, "--ignore", _IGNORABLE)
    records = read_folder(a, "A"), read_folder(b, "B")
    arms_a, arms_b = (group_arms(found, ignored) for found in records)
    names = arm_names(arms_b | arms_a)
    alone = [
        f"only in {side}: {names[key]}{_nearest_arm(arm, others, other)}"
        for side, ours, other, others in (("A", arms_a, "B", arms_b), ("B", arms_b, "A", arms_a))
        for key, arm in ours.items()
        if key not in others
    ]
    bf16 = {"precision": "bf16"}
    bases = [_with_references(arms, bf16) for arms in (arms_a, arms_b)]
    rows = tuple(
        {"arm": names[key]}
        | {f"over_bf16_{side}": _speed(of.get(key)) for side, of in zip("ab", bases, strict=True)}
        | _compared(arm, arms_b[key], ignored)
        for key, arm in arms_a.items()
        if key in arms_b
    )
    if not rows:
        raise UserError(
            f"B: '{b}' shares no arm with '{a}': {_how_to_pair(arms_a, arms_b, names, ignored)}"
        )
    sides = side_line("A", str(a), records[0]), side_line("B", str(b), records[1])
    return Comparison(sides, rows, tuple(alone))


def _speed(pair: tuple[Arm, Arm | None] | None) -> Ratio | None:
    """Return an arm's rate over its reference's, if it has one."""
    return ratio_of(*_over(pair[0], pair[1])) if pair and pair[1] else None


def _check_fields(names: Sequence[str], option: str, known: Sequence[str] = FIELD_NAMES) -> None:
    for name in names:
        if name not in known:
            raise UserError(
                f"{option}: '{name}' is no field{nearest(name, known)}; "
                f"known: {', '.join(FIELD_NAMES)}"
            )


def _nearest_arm(arm: Arm, others: Mapping[str, Arm], side: str) -> str:
    """Say in what an arm differs from the other folder's arm that is most like it."""
    fields = min((differing(arm, other) for other in others.values()), key=len, default=[])
    more = f" and {len(fields) - _MOST_FIELDS} more" if len(fields) > _MOST_FIELDS else ""
    return f" (nearest in {side} differs in {', '.join(fields[:_MOST_FIELDS])}{more})"


def _how_to_pair(
    ours: Mapping[str, Arm], theirs: Mapping[str, Arm], names: Mapping[str, str],
    ignored: Sequence[str],
) -> str:  # fmt: skip
    """Name the arm of A that is most like one of B, and write the options that pair the two.

    All fields are written, as ignoring one does not free those that follow from it.
    """
    pairs = (
        (k, differing_fields(one, other)) for k, one in ours.items() for other in theirs.values()
    )
    key, fields = min(pairs, key=lambda pair: len(pair[1]))
    remedy = ", as in --ignore precision"
    if 0 < len(fields) <= _MOST_OPTIONS and {*fields} <= {*_IGNORABLE}:
        remedy = ": " + " ".join(f"--ignore {name}" for name in dict.fromkeys([*ignored, *fields]))
    who = f"{names[key]}{_nearest_arm(ours[key], theirs, 'B')}"
    return f"only in A: {who}; name each field that may differ{remedy}"


def _compared(a: Arm, b: Arm, ignored: Sequence[str]) -> dict[str, Any]:
    notes = machine_differences(a.records, b.records)
    for field in ignored:
        ours, theirs = (
            " / ".join(sorted({str(completed(r.config).get(field)) for r in arm.records}))
            for arm in (a, b)
        )
        if ours != theirs:
            notes.append(f"{field} {ours} → {theirs}")
    notes += arm_caveats("A", a) + arm_caveats("B", b)
    apart = (b.losses - a.losses).dropna()
    loss = None
    if not same_data(a.records, b.records):
        notes.append("other or unknown data: no loss compared")
    elif len(apart):
        loss = float(apart.mean())
    elif len(a.losses) and len(b.losses):
        notes.append("no common seed and number of steps: no loss compared")
    return {
        "num_runs_a": len(a.rates),
        "num_runs_b": len(b.rates),
        "tokens_per_second_per_gpu_a": geometric_mean(a.rates),
        "tokens_per_second_per_gpu_b": geometric_mean(b.rates),
        "speed_ratio": ratio_of([b.rates], [a.rates]),
        "memory_ratio": _quotient(b.memory_peak_gib, a.memory_peak_gib),
        "loss_difference": loss,
        "notes": tuple(notes),
    }


def _quotient(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def compare_relative(baseline: Path | None, here: Path, reference: Mapping[str, Any]) -> Comparison:
    """Divide every arm by its reference arm, and that by the baseline's.

    Args:
        baseline: A folder of results; None for the session alone.
        here: The session to be judged.
        reference: Field → its value in the reference arm, which is equal to the arm in all other
            fields but those that follow from these.

    Returns:
        Rows of the ``arm``, its ``num_runs`` whose timings count and their geometric mean
        ``tokens_per_second_per_gpu`` (to be compared with nothing); ``speed`` and ``memory`` over
        the reference arm's, speed within blocks where both ran on the same GPUs;
        ``speed_baseline`` and ``memory_baseline``, the same in the baseline; ``change``, the one
        over the other: below 1 the arm has lost ground; ``notes``.

    Raises:
        UserError: A folder without records, an unknown field, or no arm with a reference arm.
    """
    wanted = _checked_reference(reference)
    records = read_folder(here, "B")
    arms, sides = group_arms(records), [side_line("B", str(here), records)]
    old_arms: dict[str, Arm] = {}
    if baseline is not None:
        found = read_folder(baseline, "A")
        old_arms = group_arms(found)
        sides.insert(0, side_line("A", str(baseline), found))
    names, theirs = arm_names(old_arms | arms), _with_references(old_arms, wanted)
    rows, alone = [], []
    for key, (arm, base) in _with_references(arms, wanted).items():
        if base is None:
            alone.append(_without_reference(arm, names[key], arms, wanted))
            continue
        notes = arm_caveats("B", arm) + arm_caveats("B, reference", base)
        notes += machine_differences(base.records, arm.records)
        row = {
            "arm": names[key],
            "num_runs": len(arm.rates),
            "tokens_per_second_per_gpu": geometric_mean(arm.rates),
            "speed": ratio_of(*_over(arm, base)),
            "memory": _quotient(arm.memory_peak_gib, base.memory_peak_gib),
        } | dict.fromkeys(("speed_baseline", "change", "memory_baseline"))
        old, old_base = theirs.get(key, (None, None))
        if old and old_base:
            notes += arm_caveats("A", old) + arm_caveats("A, reference", old_base)
            notes += machine_differences(old.records, arm.records)
            (above, below), (old_above, old_below) = _over(arm, base), _over(old, old_base)
            row |= {
                "speed_baseline": ratio_of(old_above, old_below),
                "change": ratio_of([*above, *old_below], [*below, *old_above]),
                "memory_baseline": _quotient(old.memory_peak_gib, old_base.memory_peak_gib),
            }
        elif old_arms:
            notes.append("not in the baseline")
        rows.append(row | {"notes": tuple(dict.fromkeys(notes))})
    words = ", ".join(f"{name}={shown(value)}" for name, value in wanted.items())
    if not rows:
        raise UserError(f"--reference: {_why_none(list(arms.values()), wanted, words, here)}")
    device = str(records[0].machine.get("device"))
    return Comparison(tuple(sides), tuple(rows), tuple(alone), words, device)


def _checked_reference(reference: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values as records have them; fields and values that no arm can have are refused.

    Each value is judged by itself: most switches need others, which the arms have.

    Raises:
        UserError: There is one.
    """
    _check_fields(list(reference), "--reference")
    values = {}
    for name, value in reference.items():
        if name in varying("folder"):
            raise UserError(
                f"--reference: '{name}' tells runs of one arm apart, not arms; give another field, "
                "as precision=bf16"
            )
        try:
            read = read_field(name, value)
        except UserError as error:
            raise UserError(f"--reference: {error}") from None
        values[name] = list(read) if isinstance(read, tuple) else read
    return {name: completed(values)[name] for name in values}


def _is_reference(arm: Arm, wanted: Mapping[str, Any]) -> bool:
    return all(arm.config.get(name) == value for name, value in wanted.items())


def _free(wanted: Mapping[str, Any]) -> set[str]:
    """Return the fields in which an arm may differ from its reference."""
    return {*wanted, *(field for name in wanted for field in _FOLLOWERS.get(name, ()))}


def _without_reference(
    arm: Arm, name: str, arms: Mapping[str, Arm], wanted: Mapping[str, Any]
) -> str:
    """Say that an arm has no reference arm, and what is nearest, or that it has several."""
    found = [other for other in arms.values() if _is_reference(other, wanted)]
    apart = [differing(arm, other, _free(wanted)) for other in found]
    if [] in apart:
        return f"several reference arms: {name}"
    least = ", ".join(min(apart, key=len)[:_MOST_FIELDS]) if apart else ""
    return f"no reference arm: {name}{f' (nearest differs in {least})' if least else ''}"


def _why_none(arms: Sequence[Arm], wanted: Mapping[str, Any], words: str, here: Path) -> str:
    """Say why no arm of a folder has a reference arm, and what would help."""
    found = [arm for arm in arms if _is_reference(arm, wanted)]
    if not found:
        there = (
            f"{name} is {' or '.join(sorted({shown(arm.config.get(name)) for arm in arms}))}"
            for name, value in wanted.items()
            if not any(arm.config.get(name) == value for arm in arms)
        )
        return (
            f"no arm in '{here}' has {words}: {', '.join(there) or 'only some of it'} there; give "
            "what one of them has"
        )
    if len(found) == len(arms):
        others = [n for n in arms[0].config if len({repr(arm.config.get(n)) for arm in arms}) > 1]
        remedy = "a folder with other arms, too"
        if others:
            remedy = f"another field in which they differ: {', '.join(others[:_MOST_FIELDS])}"
        return f"all arms in '{here}' have {words}; give {remedy}"
    fields = min(
        (differing(arm, base, _free(wanted)) for arm in arms for base in found if arm not in found),
        key=len,
    )
    return (
        f"no other arm in '{here}' equals one with {words} in all else: it differs in "
        f"{', '.join(fields[:_MOST_FIELDS])}; give that field, too"
        if fields
        else f"several arms in '{here}' have {words}; give more fields, so that one is left"
    )


def _over(arm: Arm, base: Arm) -> tuple[list[list[float]], list[list[float]]]:
    """Return what makes an arm's ratio to its reference: groups above the line and below it.

    Where at least `MIN_PAIRS_FOR_INTERVAL` repeats of both ran on the same GPUs, the ratios within
    these blocks, else both groups of rates.
    """
    own, other = arm.blocks_on_gpus, base.blocks_on_gpus
    ratios = [own[block] / other[block] for block in own if block in other]
    if len(ratios) >= MIN_PAIRS_FOR_INTERVAL:
        return [ratios], []
    return [arm.rates], [base.rates]


def _with_references(
    arms: Mapping[str, Arm], wanted: Mapping[str, Any]
) -> dict[str, tuple[Arm, Arm | None]]:
    """Return the other arms, each with the one reference arm that equals it in all else."""
    free, found = _free(wanted), {}
    for key, arm in arms.items():
        held = {name: value for name, value in arm.config.items() if name not in free}
        alike = [
            other
            for other in arms.values()
            if _is_reference(other, wanted) and held.items() <= other.config.items()
        ]
        if not _is_reference(arm, wanted):
            found[key] = (arm, alike[0] if len(alike) == 1 else None)
    return found
