"""The laws' constants: fitted to records by code, frozen in ``constants.json`` with their origin.

`scripts/freeze_laws.py` adds a freeze to that file. Records that came later, or were kept out, are
no part of it, so that they test it; earlier freezes stay, so that what tested them goes on doing
so. A freeze that makes other cells worse is withdrawn: it predicts nothing any more, and the page
of predictions still compares it. A test fits again, to the records that the newest names.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fp8study.analysis.laws.cells import Cell
from fp8study.core.records import RunRecord

_Constants = TypeVar("_Constants")
PATH = Path(__file__).with_name("constants.json")
#: Constants and a cell → by how much the law misses what was measured of it, relative.
Misses = Callable[[Mapping[str, float], Cell], Sequence[float]]
Runs = Sequence[tuple[str, RunRecord]]


@cache
def freezes() -> list[dict[str, Any]]:
    """Return every freeze, oldest first: ``records``, ``last_run_ended``, and the laws.

    ``withdrawn`` is true of those that are only kept to be compared; the newest is none of them.
    """
    content: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return list(content["freezes"])


def constants_of(
    law: type[_Constants], name: str, without: str | None = None, freeze: int = -1
) -> _Constants:
    """Return a law's constants: of a freeze, by default the newest.

    Of all its records, or of those `without` a model; of memory the newest alone knows these.

    Raises:
        ValueError: The freeze lacks one; where a fit begins is no result of it.
    """
    found = freezes()[freeze][name]
    values = {name: entry["value"] for name, entry in found["constants"].items()}
    if without is not None:
        values |= found["without"].get(without, {})
    missing = [each for each in inspect.signature(law).parameters if each not in values]
    if missing:
        raise ValueError(f"{PATH.name}: {name}: freeze {freeze} has no {', '.join(missing)}")
    return law(**values)


def fitted_to(name: str, record: RunRecord, freeze: int = -1) -> bool:
    """Whether a run (``machine/study/run_id`` and record) is one that a freeze is from."""
    found = freezes()[freeze]
    return record.ended_at <= found["last_run_ended"] and study_of(name) in found["records"]


def study_of(name: str) -> str:
    """Return ``machine/study`` of a run's ``machine/study/run_id``."""
    return name.rpartition("/")[0]


def knows(freeze: int, cell: Cell) -> bool:
    """Whether a freeze was fitted to a cell, or to some runs of it."""
    return any(fitted_to(*run, freeze=freeze) for run in cell.runs)


def unknowing(cell: Cell) -> int | None:
    """Return the newest freeze that was there before any knew the cell; None if the first did."""
    there = [n for n, freeze in enumerate(freezes()) if not freeze.get("withdrawn")]
    first = next((place for place, n in enumerate(there) if knows(n, cell)), len(there))
    return there[first - 1] if first else None


def provenance(runs: Runs) -> dict[str, Any]:
    """Say which runs a fit is from: how many of each machine and study, and the last one's end."""
    studies = Counter(study_of(name) for name, _ in runs)
    last = max(record.ended_at for _, record in runs)
    return {"last_run_ended": last, "records": dict(sorted(studies.items()))}


def fit(
    misses: Misses, start: Mapping[str, float], cells: Sequence[Cell], usual: float
) -> dict[str, float]:
    """Return the constants, none negative, at which the law misses the cells least.

    `usual` is the miss from which one pulls less than its square: now and then torch's compiler
    decides otherwise than it usually does, and one such cell must not move a constant.
    """
    # Half of the time that `fp8study plan` would take to start.
    from scipy.optimize import least_squares

    def residuals(values: Any) -> Any:
        constants = dict(zip(start, values, strict=True))
        return np.concatenate([misses(constants, cell) for cell in cells])

    scale = np.maximum(np.abs([*start.values()]), 1e-6)
    found = least_squares(
        residuals, [*start.values()], x_scale=scale, bounds=(0, np.inf), loss="soft_l1",
        f_scale=usual, max_nfev=40, ftol=1e-5,
    )  # fmt: skip
    return {name: float(f"{value:.6g}") for name, value in zip(start, found.x, strict=True)}


def fit_with_errors(
    misses: Misses, start: Mapping[str, float], cells: Sequence[Cell], usual: float
) -> dict[str, Any]:
    """Fit to all cells, and to those of all models but one.

    Returns:
        ``constants``: name → value and error, which is how far it moves, at most, without one
        model; ``without``: each model → the constants that the others give.
    """
    values = fit(misses, start, cells, usual)
    without = {model: fit(misses, values, rest, usual)
               for model, rest in leaving_out(cells).items()}  # fmt: skip
    constants = {
        name: {"value": value, "error": max(abs(other[name] - value) for other in without.values())}
        for name, value in values.items()
    }
    return {"constants": constants, "without": without}


def leaving_out(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Return, for each model, the cells of all the others; an untied twin is the same model."""
    every = list(cells)
    models = dict.fromkeys(model_of(cell) for cell in every)
    return {model: [cell for cell in every if model_of(cell) != model] for model in models}


def model_of(cell: Cell) -> str:
    return cell.config.model.removesuffix("-untied")
