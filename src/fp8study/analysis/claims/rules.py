"""How numbers become verdicts, written once for all claims."""

from __future__ import annotations

import pandas as pd

from fp8study.analysis.claims.finding import Figure, Finding, Verdict, undecided
from fp8study.analysis.pairing import DIVERGED, together
from fp8study.analysis.stats import MIN_PAIRS_FOR_INTERVAL


def by_share(share: float) -> Verdict:
    """Judge what is claimed of all cells by the share of them in which it holds, 0 to 1."""
    if share == 1:
        return Verdict.REPRODUCED
    return Verdict.PARTLY if share >= 0.5 else Verdict.CONTRADICTED


def by_parts(*parts: object) -> Verdict:
    """Judge a claim of several parts by which of them hold."""
    return by_share(1.0 if all(parts) else 0.5 if any(parts) else 0.0)


def judged_by_rows(
    rows: pd.DataFrame,
    values: pd.Series,
    holds: pd.Series,
    words: str,
    what: str,
    missing: str,
    unit: str = "%",
    spec: str = ".1f",
) -> Finding:
    """Judge a claim by the share of rows in which it holds.

    Args:
        rows: Of arms or runs, with what `behind` and `by_model` look at.
        values: What was measured in each row.
        holds: Whether the claim holds there.
        words: The reason, with ``{}`` for "7 of 17"; medians by model are added.
        what: Name of the values.
        missing: The reason where there is no row.
        unit: Of the values.
        spec: How they are written.
    """
    if rows.empty:
        return undecided(missing)
    why = words.format(f"{holds.astype(bool).sum()} of {len(rows)}") + by_model(rows, values, spec)
    figure = spread(what, values, unit, spec)
    return Finding(by_share(float(holds.astype(bool).mean())), why, figure, behind(rows))


def by_model(rows: pd.DataFrame, values: pd.Series, spec: str) -> str:
    """List the medians of several models, the smallest model first."""
    if "model" not in rows or rows["model"].nunique() < 2:
        return ""
    table = rows[["model"]].assign(value=values.astype(float), size=rows.get("num_parameters", 0))
    medians = table.sort_values("size").groupby("model", sort=False)["value"].median()
    if medians.nunique() == 1:
        return ""
    return f"; medians: {', '.join(f'{m} {value:{spec}}' for m, value in medians.items())}"


def behind(*tables: pd.DataFrame) -> tuple[str, ...]:
    """Name the runs that the rows of tables rest on."""
    columns = ("run_ids", "run_ids_before")
    texts = [table[name] for table in tables for name in columns if name in table]
    return tuple(together(pd.concat(texts)).split()) if texts else ()


def spread(what: str, values: pd.Series, unit: str = "", spec: str = ".1f") -> Figure:
    """Return the median of several settings, with the smallest and the largest."""
    numbers = values.astype(float)
    middle, low, high = (float(f) for f in (numbers.median(), numbers.min(), numbers.max()))
    if low == high:
        return Figure(what, middle, unit, spec=spec)
    return Figure(what, middle, unit, low, high, f"range of {len(numbers)}", spec)


def ends(values: pd.Series) -> str:
    """Write the smallest and the largest gap, or the one that they are written as."""
    return " to ".join(dict.fromkeys(f"{value:+.2f}" for value in (values.min(), values.max())))


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
    same = paired["verdict"] == "equivalent"
    apart = paired["verdict"].isin(["different", DIVERGED])
    why = (
        f"settings with three pairs or more, at ±{paired['margin_pct'].max():g} %: "
        f"{same.sum()} equivalent, {apart.sum()} different, {(~same & ~apart).sum()} undecided"
    )
    if not (same | apart).any():
        return undecided(why if len(paired) else "no setting has three pairs", behind(paired))
    verdict = by_parts(same.any(), not apart.any()) if same.any() else Verdict.CONTRADICTED
    return Finding(verdict, why, mean_gap("loss gap", paired[same | apart]), behind(paired))


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
