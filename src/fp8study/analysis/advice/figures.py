"""A figure of an advice: its value, where it is from, and how far it may be off."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fp8study.analysis.laws.cells import Cell

#: A row of the report's tables of leads or decisions, with the ids of its runs by precision.
Row = Mapping[str, Any]
MEASURED, PREDICTED, MODELLED = "measured", "predicted", "modelled"


@dataclass(frozen=True)
class Quantity:
    """A number, where it is from, and how far it may be off."""

    value: float
    kind: str
    """`MEASURED`, `PREDICTED` or `MODELLED`."""
    low: float | None = None
    high: float | None = None
    """A 95 % interval of what was measured; else what nine of ten predictions stay within."""
    run_ids: tuple[str, ...] = ()
    """``machine/study/run_id`` of what was measured."""

    def over(self, times: float) -> Quantity:
        """Return this lead, %, as one over what is `times` as fast."""

        def scaled(lead: float) -> float:
            return 100 * ((1 + lead / 100) / times - 1)

        low, high = (None if end is None else scaled(end) for end in (self.low, self.high))
        return replace(self, value=scaled(self.value), low=low, high=high)


def of_row(row: Row, is_fp8: bool) -> tuple[Quantity, Quantity | None, Quantity]:
    """Return tokens/s, FP8's lead and memory as a row of the report has them."""
    side = "" if is_fp8 else "_bf16"
    ids = tuple(row[f"ids{side}"])

    def quantity(name: str) -> Quantity:
        low, high = (row[f"{name}{side}_{end}"] for end in ("low", "high"))
        return Quantity(row[f"{name}{side}"], MEASURED, low, high, ids)

    lead = lead_of(row) if is_fp8 else None
    return quantity("tokens_per_second_per_gpu"), lead, quantity("memory_peak_gib")


def lead_of(row: Row) -> Quantity | None:
    """Return FP8's lead as a row of the report has it; None where no timing holds."""
    if math.isnan(row["lead_pct"]):
        return None
    low, high = (
        None if math.isnan(row[end]) else row[end] for end in ("ci_low_pct", "ci_high_pct")
    )
    return Quantity(row["lead_pct"], MEASURED, low, high, (*row["ids"], *row["ids_bf16"]))


def of_cell(cell: Cell, gib: Quantity) -> tuple[Quantity, Quantity]:
    """Return tokens/s and memory of runs that have no partner in their session."""
    rates, ids = [rate for _, rate in cell.rates], tuple(cell.ids)
    rate = Quantity(statistics.median(rates), MEASURED, min(rates), max(rates), ids)
    return rate, Quantity(cell.peak_gib, MEASURED, run_ids=ids) if cell.peak_gib else gib


def lead_apart(rate: Quantity, base: Quantity) -> Quantity:
    """Return FP8's lead of runs that are no pair: without an interval, as sessions differ."""
    ids = (*rate.run_ids, *base.run_ids)
    return Quantity(100 * (rate.value / base.value - 1), MEASURED, run_ids=ids)
