"""How numbers become verdicts, written once for all claims."""

from __future__ import annotations

import pandas as pd

from fp8study.analysis.claims.finding import Figure, Finding, Verdict, undecided
from fp8study.analysis.pairing import DIVERGED, together
from fp8study.analysis.stats import MIN_PAIRS_FOR_INTERVAL


def by_share(share: float) -> Verdict:
    """Judge what is claimed of all cases by the share of them in which it holds, 0 to 1."""
    if share == 1:
        return Verdict.REPRODUCED
    return Verdict.PARTLY if share >= 0.5 else Verdict.CONTRADICTED


def by_parts(*parts: object) -> Verdict:
    """Judge a claim of several parts by which of them hold."""
    return by_share(1.0 if all(parts) else 0.5 if any(parts) else 0.0)


def behind(*tables: pd.DataFrame) -> tuple[str, ...]:
    """Name the runs that the rows of tables rest on."""
    columns = ("run_ids", "run_ids_before")
    texts = [table[name] for table in tables for name in columns if name in table]
    return tuple(together(pd.concat(texts)).split()) if texts else ()


def of_cells(holds: pd.Series, why: str, figure: Figure, runs: tuple[str, ...]) -> Finding:
    """Judge by the share of cells in which a claim holds."""
    return Finding(by_share(float(holds.mean())), why, figure, runs)


def spread(what: str, values: pd.Series, unit: str = "", spec: str = ".1f") -> Figure:
    """Return the median of several settings, with the smallest and the largest."""
    numbers = values.astype(float)
    if len(numbers) == 1:
        return Figure(what, float(numbers.iloc[0]), unit, spec=spec)
    median, low, high = (float(f) for f in (numbers.median(), numbers.min(), numbers.max()))
    return Figure(what, median, unit, low, high, f"range of {len(numbers)}", spec)


def mean_gap(what: str, gaps: pd.DataFrame) -> Figure:
    """Return the gap of the one arm, with its interval, or the spread over several."""
    if len(gaps) != 1:
        return spread(what, gaps["gap_pct"], "%", "+.2f")
    columns = ["gap_pct", "gap_pct_low_95", "gap_pct_high_95"]
    value, low, high = gaps[columns].astype(float).iloc[0]
    return Figure(what, value, "%", low, high, "95 % CI", "+.2f")


def with_pairs(gaps: pd.DataFrame) -> pd.DataFrame:
    """Keep the arms that an interval can be given of, or that diverged."""
    return gaps[(gaps["num_pairs"] >= MIN_PAIRS_FOR_INTERVAL) | (gaps["verdict"] == DIVERGED)]


def equal_losses(gaps: pd.DataFrame) -> Finding:
    """Judge the claim that losses are those of BF16, from rows of loss gaps."""
    paired = with_pairs(gaps)
    runs = behind(paired)
    same = paired["verdict"] == "equivalent"
    apart = paired["verdict"].isin(["different", DIVERGED])
    if not (same | apart).any():
        return undecided(
            f"of {count(len(gaps), 'setting')} none has pairs enough to tell a gap from none", runs
        )
    margin = f"{paired['margin_pct'].max():g}"
    why = (
        f"of {count(len(paired), 'setting')} with three pairs or more, equivalent to BF16 at "
        f"±{margin} %: {same.sum()}, different: {apart.sum()}, "
        f"undecided: {(~same & ~apart).sum()}"
    )
    verdict = by_parts(same.any(), not apart.any())
    if not same.any():
        verdict = Verdict.CONTRADICTED
    return Finding(verdict, why, mean_gap("loss gap", paired[same | apart]), runs)


def named(values: pd.Series, spec: str = "+.1f", unit: str = " %") -> str:
    """List medians by model, the smallest model first in the order that they come."""
    return ", ".join(f"{name} {value:{spec}}{unit}" for name, value in values.items())


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
