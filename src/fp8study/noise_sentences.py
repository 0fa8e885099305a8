"""What was measured about noise and precision, in words that follow the numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from scipy.stats import binom

from fp8study import noise_tables as tables
from fp8study.formats import BF16, E4M3, E5M2, running_sum
from fp8study.frames import PRECISION_LABELS
from fp8study.records import StoredRun
from fp8study.words import count, how_to_get

_STUDY = "precision-noise"


def measured(stored: Sequence[StoredRun]) -> list[StoredRun]:
    """Return the runs that measured noise with real FP8 products, else the emulated ones."""
    found = [run for run in stored if run.record.noise and run.record.status == "completed"]
    real = [run for run in found if not run.record.noise.get("emulated")]
    return real or found


def _missing() -> str:
    return f"**Precision noise: no records yet:** {how_to_get(_STUDY)}."


def _range(values: pd.Series, spec: str) -> str:
    low, high = format(values.min(), spec), format(values.max(), spec)
    return low if low == high else f"{low} to {high}"


def fp8_rows(stored: Sequence[StoredRun]) -> pd.DataFrame:
    """Return the crossings of all FP8 recipes against BF16, over all parameters."""
    table = tables.over_runs(tables.crossing_table, stored)
    if table.empty:
        return table
    return table[(table["precision"] != "bf16") & (table["scope"] == "all")]


def answer(stored: Sequence[StoredRun]) -> str:
    """Say whether FP8's error is near the sampling noise at an effective batch of one."""
    table = fp8_rows(stored)
    if table.empty:
        return _missing()
    share, crossing = 100 * table["ratio_at_1"], table["crossing_batch"]
    seeds, points = table["seed"].nunique(), table["step"].nunique()
    text = (
        f"At an effective batch of 1, the error that FP8 adds to a gradient is "
        f"{_range(share, '.0f')} % of its sampling noise ({count(points, 'point')} of training, "
        f"{count(table['precision'].nunique(), 'recipe')}, {count(seeds, 'seed')}). "
    )
    finite = crossing[crossing < math.inf]
    if finite.empty:
        return text + "No systematic part of it was seen, so the two never change places."
    text += (
        f"They would be equal at effective batches of {_range(finite, '.0f')} sequences; "
        f"the lowest end of any 95 % interval is {table['crossing_batch_low'].min():.0f}. "
    )
    if table["crossing_batch_low"].min() > 2:
        text += (
            "So 1 or 2 is nowhere near it, and the order is the other way round: sampling noise "
            "falls with the batch and the systematic part of FP8's error does not, so precision "
            "matters relatively more in *large* batches."
        )
    else:
        text += "So a batch of 1 or 2 cannot be told apart from it here."
    return _emulated_note(stored) + text


def _emulated_note(stored: Sequence[StoredRun]) -> str:
    if all(run.record.noise.get("emulated") for run in stored):
        return "**FP8 is emulated in all of these runs.** "
    return ""


def scale(stored: Sequence[StoredRun]) -> str:
    """Say how large the gradient noise scale is along the training."""
    table = tables.over_runs(tables.scale_table, stored)
    if table.empty:
        return _missing()
    whole = table[table["scope"] == "all"]
    parts = [
        f"{_range(rows['noise_scale'], '.2g')} sequences after {step} steps"
        for step, rows in whole.groupby("step", sort=True)
    ]
    return f"The noise scale B_simple is {'; '.join(parts)}."


def variance_law(stored: Sequence[StoredRun]) -> str:
    """Say whether the variance of a mean falls as one over the number of sequences (A15)."""
    table = tables.over_runs(tables.inverse_law_table, stored)
    if table.empty:
        return _missing()
    whole = table[table["scope"] == "all"]
    ratio = whole["ratio_to_inverse_law"]
    above = int((ratio > whole["ratio_to_inverse_law_high"]).sum())
    below = int((ratio < whole["ratio_to_inverse_law_low"]).sum())
    number, outside = len(whole), above + below
    text = (
        f"Variance of means over 2 to {whole['largest_batch'].max()} sequences, times their "
        f"number, is {_range(ratio, '.2f')} of a single one's (mean over batches and points; "
        f"{count(number, 'run')}). Its sequences come in random order, so 1/N should hold, and "
        f"{number - outside} of {number} lie where 95 % of random orders do. "
    )
    if not outside:
        return text + "So it falls as 1/N as far as can be seen, as document A says."
    where = "above (neighbours resemble each other)" if above else "below"
    where = "on either side" if above and below else where
    chance = float(binom.sf(outside - 1, number, 0.05))
    if chance >= 0.05:
        return (
            text + f"The rest lie {where}; chance alone leaves that many outside in "
            f"{100 * chance:.0f} of 100 such tests. So this does not speak against 1/N, which is "
            "what document A says."
        )
    return text + f"The rest lie {where}, and they are more than chance leaves outside."


def formats() -> str:
    """Say what the formats' rounding errors are, and what sums in them give (A21, A22)."""
    errors = ", ".join(
        f"{f.name} {100 * f.worst_relative_error():.3g} %" for f in (E4M3, E5M2, BF16)
    )
    sums = ", ".join(
        f"{name} {running_sum(0.001, 1000, accumulator):.3g}"
        for name, accumulator in (("E4M3", E4M3), ("E5M2", E5M2), ("BF16", BF16), ("FP32", None))
    )
    return (
        f"The worst relative error of rounding a normal number: {errors}. A sum of 1,000 times "
        f"0.001, accumulated in: {sums}. Both are exact and need no run; matrix products "
        "accumulate in higher precision than their factors have, so no such sum occurs in them."
    )


def last_point(table: pd.DataFrame) -> pd.DataFrame:
    """Keep each run's last point, and the FP8 recipes."""
    if table.empty:
        return table
    last = table.groupby("run_id")["step"].transform("max")
    return table[(table["step"] == last) & (table["precision"] != "bf16")]


def with_labels(table: pd.DataFrame) -> pd.DataFrame:
    """Add ``what``: a comparison, or a recipe, in words."""
    if table.empty:
        return table
    names = table["precision"].map(lambda p: PRECISION_LABELS.get(p, p))
    if "reference" in table:
        names = names + " v " + table["reference"].str.upper()
    return table.assign(what=names.map(str))
