"""The laws held to account: every prediction beside what was measured.

A cell that the constants were first fitted to is predicted by what all other models give; one that
only a later fit knows, or none, by the newest that were frozen before; one on another GPU by what
other models give in the newest of all.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import pandas as pd

from fp8study.analysis.laws import memory, speed
from fp8study.analysis.laws.cells import Cell
from fp8study.analysis.laws.frozen import constants_of, freezes, knows, model_of, unknowing
from fp8study.analysis.laws.speed import HOST_PCT, LATE_PCT
from fp8study.analysis.laws.speed_constants import FITTED_GPU, SpeedConstants
from fp8study.analysis.laws.speed_fit import cell_pairs
from fp8study.analysis.runs.naming import setting_label
from fp8study.core.config import ResolvedConfig
from fp8study.core.hardware import find_peak
from fp8study.core.recipes import RECIPES

#: How a prediction was tested.
LEFT_OUT, KEPT_OUT, OTHER_GPU = "model left out", "kept from the fit", "another GPU"
#: The goals: FP8's lead is off by so much on average, and in nine of ten cells, points; beyond so
#: much, %, its sign is right; memory is off by so much, %.
MEAN_POINTS, MOST_POINTS, CLEAR_PCT, MEMORY_PCT = 3.0, 6.0, 5.0, 5.0
#: Fewer leads tell nothing of nine of ten.
FEWEST_LEADS = 10

LEAD_COLUMNS = [
    "test", "gpu_name", "model", "num_gpus", "precision", "label", "setting", "measured_pct",
    "predicted_pct", "error_points", "fitted_pct", "step_error_pct", "host_pct", "tokens",
    "run_ids",
]  # fmt: skip
MEMORY_COLUMNS = [
    "test", "gpu_name", "model", "num_gpus", "precision", "label", "setting", "measured_gib",
    "predicted_gib", "error_pct", "run_ids",
]  # fmt: skip


def wider(num_beyond: int) -> float:
    """Return how much wider an interval is beyond what was measured in so many things.

    As if each of them added an error of its own, as large as the law's, which add up as squares
    do; `fp8study.analysis.laws.beyond.beyond_table` holds that to what came out.
    """
    return math.sqrt(1 + num_beyond)


def test_of(cell: Cell) -> tuple[str, str | None, int]:
    """Return how a cell tests the laws: the test, and the model and the freeze of its constants.

    A cell of the first freeze, or of another GPU, is predicted without its model; one that a later
    freeze knows, or none, by the freeze before that.
    """
    if cell.gpu != FITTED_GPU:
        return OTHER_GPU, model_of(cell), -1
    freeze = unknowing(cell)
    return (LEFT_OUT, model_of(cell), -1) if freeze is None else (KEPT_OUT, None, freeze)


def is_seen(other: Cell, cell: Cell) -> bool:
    """Whether the constants that predict a cell, as `test_of` says, were fitted to another."""
    _, without, freeze = test_of(cell)
    return knows(freeze, other) and model_of(other) != without


def freeze_table(cells: Sequence[Cell]) -> pd.DataFrame:
    """Every freeze held to all leads, oldest first: how far it is off on average, points.

    ``known_points``: of the ``num_known`` cells that the first freeze knew, by each freeze's
    constants without their model; ``later_points``: of the others, the same where the freeze knew
    them, else by all its constants. ``state``: in use, earlier or withdrawn.
    """
    pairs = [(pair, knows(0, pair.fp8)) for pair in cell_pairs(cells)]
    rows = []
    for number, freeze in enumerate(freezes()):
        errors: dict[bool, list[float]] = {True: [], False: []}
        for pair, is_known in pairs:
            without = model_of(pair.fp8) if knows(number, pair.fp8) else None
            constants = constants_of(SpeedConstants, "speed", without, number)
            law, measured = pair.predicted_pct(constants), pair.lead_pct
            if law is not None and measured is not None:
                errors[is_known].append(abs(law - measured))
        state = "in use" if number + 1 == len(freezes()) else "earlier"
        rows.append({
            "freeze": number + 1, "state": "withdrawn" if freeze.get("withdrawn") else state,
            "num_records": sum(freeze["records"].values()),
            "num_known": len(errors[True]), "known_points": _mean(errors[True]),
            "num_later": len(errors[False]), "later_points": _mean(errors[False]),
        })  # fmt: skip
    return pd.DataFrame(rows)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def session_table(cells: Sequence[Cell]) -> pd.DataFrame:
    """How far FP8's lead in one setting moves from study to study: no law can be nearer than that.

    One row per pair that was run in several: ``spread_points``, the largest lead less the smallest,
    and ``host_pct`` as in `lead_table`.
    """
    rows = []
    for pair in cell_pairs(cells):
        leads, gpu = pair.leads_pct, find_peak(pair.fp8.gpu)
        if len(leads) > 1 and gpu is not None:
            law = speed.predicted_step(pair.fp8.config, pair.fp8.shape, gpu)
            spread = max(leads) - min(leads)
            rows.append({"spread_points": spread, "host_pct": law.host_pct})
    return pd.DataFrame(rows)


def lead_table(cells: Sequence[Cell]) -> pd.DataFrame:
    """FP8's lead as measured and as predicted, one row per pair; see `LEAD_COLUMNS`.

    ``predicted_pct`` is by constants that know nothing of the cell, as ``test`` says, and
    ``fitted_pct`` by the newest; ``step_error_pct`` is the FP8 step's, and ``host_pct`` what the
    host takes of the GPU's time in it, by the law; ``tokens`` are those of a GPU and pass.
    """
    rows = []
    for pair in cell_pairs(cells):
        cell, gpu = pair.fp8, find_peak(pair.fp8.gpu)
        constants = constants_of(SpeedConstants, "speed", *test_of(cell)[1:])
        predicted, measured = pair.predicted_pct(constants), pair.lead_pct
        if predicted is None or measured is None or cell.step_ms is None:
            continue
        law = speed.predicted_step(cell.config, cell.shape, gpu, constants)
        rows.append(_named(cell) | {
            "measured_pct": measured, "predicted_pct": predicted,
            "error_points": predicted - measured,
            "fitted_pct": pair.predicted_pct(constants_of(SpeedConstants, "speed")),
            "step_error_pct": 100 * (law.total / cell.step_ms - 1),
            "host_pct": law.host_pct,
            "tokens": cell.config.tokens_per_pass,
            "run_ids": " ".join(pair.fp8.ids + pair.bf16.ids),
        })  # fmt: skip
    return _ordered(rows, LEAD_COLUMNS)


def memory_table(cells: Sequence[Cell]) -> pd.DataFrame:
    """Peak memory as recorded and as predicted, one row per cell; see `MEMORY_COLUMNS`."""
    rows = []
    for cell in cells:
        if cell.peak_gib is None:
            continue
        constants = constants_of(memory.MemoryConstants, "memory", *test_of(cell)[1:])
        law = memory.predicted_memory(cell.config, cell.shape, constants).total
        rows.append(_named(cell) | {
            "measured_gib": cell.peak_gib, "predicted_gib": law,
            "error_pct": 100 * (law / cell.peak_gib - 1), "run_ids": " ".join(cell.ids),
        })  # fmt: skip
    return _ordered(rows, MEMORY_COLUMNS)


def _named(cell: Cell) -> dict[str, object]:
    config = cell.config
    return {
        "test": test_of(cell)[0], "gpu_name": cell.gpu, "model": config.model,
        "num_gpus": config.num_gpus, "precision": config.precision, "label": label_of(config),
        "setting": setting_label(config.to_dict()),
    }  # fmt: skip


def label_of(config: ResolvedConfig) -> str:
    """Name a precision, and on several GPUs how tensorwise weights are gathered."""
    recipe = RECIPES[config.precision]
    if recipe.gathers_in_fp8 and config.num_gpus > 1 and config.strategy == "fsdp2":
        return f"{recipe.label}, {'FP8' if config.fp8_all_gather else 'BF16'} all-gather"
    return recipe.label


def _ordered(rows: list[dict[str, object]], columns: list[str]) -> pd.DataFrame:
    table = pd.DataFrame(rows, columns=columns)
    return table.sort_values(columns[:7], kind="stable").reset_index(drop=True)


def lead_verdicts(table: pd.DataFrame) -> pd.DataFrame:
    """Hold FP8's predicted lead to its goals, one row per test of `lead_table`.

    ``mean_points`` and ``most_points`` (nine of ten cells are within it) are errors without their
    sign; ``num_wrong_side`` counts leads beyond ±`CLEAR_PCT` whose sign is predicted wrong;
    ``host_points`` and ``gpu_points`` are the means where the host is busy for more than `HOST_PCT`
    of the GPU's time (``num_host`` cells), and elsewhere; ``off_models`` and ``off_tokens`` are the
    models and most tokens of the cells that are off by more than `MOST_POINTS`.
    """
    rows = []
    for test, group in table.groupby("test", sort=False):
        errors = group["error_points"].abs()
        clear = group["measured_pct"].abs() > CLEAR_PCT
        wrong = clear & (group["measured_pct"] * group["predicted_pct"] < 0)
        mean, most = float(errors.mean()), float(errors.quantile(0.9, interpolation="higher"))
        met = mean <= MEAN_POINTS and most <= MOST_POINTS and not wrong.any()
        worst = group.iloc[int(errors.argmax())]
        busy = group["host_pct"] > HOST_PCT
        rows.append({
            "off_models": list(group["model"][errors > MOST_POINTS]),
            "off_tokens": group["tokens"][errors > MOST_POINTS].max(),
            "num_host": int(busy.sum()), "host_points": float(errors[busy].mean()),
            "gpu_points": float(errors[~busy].mean()),
            "test": test, "num_cells": len(group), "mean_points": mean, "most_points": most,
            "num_clear": int(clear.sum()), "num_wrong_side": int(wrong.sum()), "is_met": met,
            "worst": f"{worst['model']} × {worst['num_gpus']}, {worst['setting']}",
            "worst_points": float(worst["error_points"]),
        })  # fmt: skip
    return pd.DataFrame(rows)


def memory_verdicts(table: pd.DataFrame) -> pd.DataFrame:
    """Hold predicted memory to its goal, one row per test of `memory_table`."""
    rows = []
    for test, group in table.groupby("test", sort=False):
        errors = group["error_pct"].abs()
        worst = group.iloc[int(errors.argmax())]
        rows.append({
            "test": test, "num_cells": len(group), "mean_pct": float(errors.mean()),
            "num_missed": int((errors > MEMORY_PCT).sum()),
            "is_met": bool((errors <= MEMORY_PCT).all()),
            "worst": f"{worst['model']} × {worst['num_gpus']}, {worst['setting']}",
            "worst_pct": float(worst["error_pct"]),
        })  # fmt: skip
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class LawErrors:
    """How far the laws were off in one test: a row of `lead_verdicts` and one of `memory_verdicts`.

    Points of FP8's lead and % of memory, on average but for ``most_points``; None: nothing to test.
    """

    test: str
    num_leads: int
    mean_points: float | None
    most_points: float | None
    num_memory: int
    mean_pct: float | None
    num_missed: int
    gpus: tuple[str, ...]
    """Whose leads they are, as `fp8study.core.hardware.GpuPeak.name_part`."""


def law_errors(leads: pd.DataFrame, memory_: pd.DataFrame) -> list[LawErrors]:
    """Return how far the laws were off, test by test, from `lead_table` and `memory_table`."""
    sides = (lead_verdicts(leads), "num_leads"), (memory_verdicts(memory_), "num_memory")
    names = [field.name for field in fields(LawErrors)]
    found: dict[str, dict[str, Any]] = {}
    for verdicts, num in sides:
        for row in verdicts.rename(columns={"num_cells": num}).to_dict("records"):
            known = {name: row[name] for name in names if name in row and not pd.isna(row[name])}
            nothing = {name: 0 if name.startswith("num") else None for name in names}
            found[row["test"]] = found.get(row["test"], nothing) | known
    for test in found:
        peaks = map(find_peak, leads.loc[leads["test"] == test, "gpu_name"].unique())
        found[test]["gpus"] = tuple(dict.fromkeys(peak.name_part for peak in peaks if peak))
    return [LawErrors(**each) for each in found.values()]


@dataclass(frozen=True)
class NineOfTen:
    """Within what nine of ten predictions were: leads, points, and steps, %."""

    sure: tuple[float, float]
    """Where the GPU decides."""
    late: tuple[float, float]
    """Where the host is busy for more than `LATE_PCT` of the GPU's time."""

    @property
    def is_known(self) -> bool:
        """Whether predictions were tested in both cases."""
        return not any(map(math.isnan, (*self.sure, *self.late)))

    def at(self, host_pct: float) -> tuple[float, float]:
        """Return those where the host is busy for so much, % of the GPU's time.

        Between `HOST_PCT` and `LATE_PCT` they grow evenly, as neighbours are known alike.
        """
        share = min(max((host_pct - HOST_PCT) / (LATE_PCT - HOST_PCT), 0.0), 1.0)
        lead, step = (
            sure + share * (late - sure) for sure, late in zip(self.sure, self.late, strict=True)
        )
        return lead, step


def nine_of_ten(leads: pd.DataFrame, of_fitted_gpu: bool) -> NineOfTen:
    """Return within what nine of ten predictions of `lead_table` are, for `FITTED_GPU` or others.

    Where these have leads enough, they say it by themselves. NaN where there is none at all.
    """
    alike = leads[leads["test"].eq(OTHER_GPU) != of_fitted_gpu]
    found = []
    for low, high in ((-1.0, HOST_PCT), (LATE_PCT, math.inf)):
        own, every = (each[each["host_pct"].between(low, high)] for each in (alike, leads))
        there = own if len(own) >= FEWEST_LEADS else every
        lead, step = there[["error_points", "step_error_pct"]].abs().quantile(0.9)
        found.append((float(lead), float(step)))
    return NineOfTen(*found)


def constants_table() -> pd.DataFrame:
    """The frozen constants: law, name, value and error."""
    return pd.DataFrame([
        {"law": law, "constant": name, **entry}
        for law in ("memory", "speed") for name, entry in freezes()[-1][law]["constants"].items()
    ])  # fmt: skip
