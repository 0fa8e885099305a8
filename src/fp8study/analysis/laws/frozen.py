"""The laws' constants: fitted to records by code, frozen in ``constants.json`` with their origin.

`scripts/freeze_laws.py` writes that file. Records that came later are no part of the fit, so that
they test it; a test fits again, to the records that the file names, and compares.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from fp8study.analysis.laws.cells import Cell
from fp8study.core.records import RunRecord

PATH = Path(__file__).with_name("constants.json")
#: Relative error from which a cell pulls less than its square: torch's compiler decides now and
#: then to keep less than it usually does, and one such cell must not move a constant.
_USUAL_ERROR = 0.002

#: Constants and a cell → what the law says of it, over what was measured, less one.
Misses = Callable[[Mapping[str, float], Cell], float]
Runs = Sequence[tuple[str, RunRecord]]


@cache
def frozen() -> dict[str, Any]:
    """Return the file's content: ``records``, ``last_run_ended``, and a mapping for each law."""
    content: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return content


def values_of(law: str) -> dict[str, float]:
    """Return a law's frozen constants by name."""
    return {name: entry["value"] for name, entry in frozen()[law].items()}


def fitted_to(name: str, record: RunRecord) -> bool:
    """Whether a run (``machine/study/run_id`` and record) is one that the constants are from."""
    is_old = record.ended_at <= frozen()["last_run_ended"]
    return is_old and name.rpartition("/")[0] in frozen()["records"]


def provenance(runs: Runs) -> dict[str, Any]:
    """Say which runs a fit is from: how many of each machine and study, and the last one's end."""
    studies = Counter(name.rpartition("/")[0] for name, _ in runs)
    last = max(record.ended_at for _, record in runs)
    return {"last_run_ended": last, "records": dict(sorted(studies.items()))}


def fit(misses: Misses, start: Mapping[str, float], cells: Sequence[Cell]) -> dict[str, float]:
    """Return the constants at which the law misses the cells least, all cells weighing the same."""

    def residuals(values: Any) -> Any:
        constants = dict(zip(start, values, strict=True))
        return np.array([misses(constants, cell) for cell in cells])

    scale = np.maximum(np.abs([*start.values()]), 1e-6)
    found = least_squares(
        residuals, [*start.values()], x_scale=scale, loss="soft_l1", f_scale=_USUAL_ERROR
    )
    return dict(zip(start, map(float, found.x), strict=True))


def fit_with_errors(
    misses: Misses, start: Mapping[str, float], cells: Sequence[Cell]
) -> dict[str, dict[str, float]]:
    """Fit, and give each constant its error: how far it moves, at most, without one model."""
    values = fit(misses, start, cells)
    others = [fit(misses, values, rest) for rest in leaving_out(cells).values()]
    return {
        name: {"value": value, "error": max((abs(o[name] - value) for o in others), default=0.0)}
        for name, value in values.items()
    }


def leaving_out(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Return, for each model, the cells of all the others; an untied twin is the same model."""
    every = list(cells)
    models = dict.fromkeys(model_of(cell) for cell in every)
    return {model: [cell for cell in every if model_of(cell) != model] for model in models}


def model_of(cell: Cell) -> str:
    return cell.config.model.removesuffix("-untied")
