"""How numbers become verdicts, written once for all claims."""

from __future__ import annotations

import dataclasses

import pandas as pd

from fp8study.analysis.claims.finding import Claim, Figure, Finding, Verdict
from fp8study.analysis.losses import with_pairs
from fp8study.analysis.runs.pairing import DIVERGED
from fp8study.core.words import listed


def by_share(share: float) -> Verdict:
    """Judge what is claimed of all cells by the share of them in which it holds, 0 to 1."""
    if share == 1:
        return Verdict.REPRODUCED
    return Verdict.PARTLY if share >= 0.5 else Verdict.CONTRADICTED


def by_parts(*parts: object) -> Verdict:
    """Judge a claim of several parts by which of them hold."""
    return by_share(1.0 if all(parts) else 0.5 if any(parts) else 0.0)


def by_rows(
    claim: Claim, rows: pd.DataFrame, values: pd.Series, holds: pd.Series, **words: object
) -> Finding:
    """Judge a claim by the share of rows in which it holds.

    Its reason has ``{holds}`` for "7 of 17"; where that is neither none nor all, medians of the
    `values` by model follow.
    """
    if rows.empty:
        return claim.open(**words)
    holds = holds.astype(bool)
    verdict, figure = by_share(float(holds.mean())), spread(values)
    found = claim.found(verdict, figure, rows, holds=out_of(holds), **words)
    if holds.nunique() == 1 and "model" in rows and rows["model"].nunique() > 1:
        return found  # of every model the same
    return dataclasses.replace(found, why=found.why + by_model(rows, values, claim.spec))


def by_model(rows: pd.DataFrame, values: pd.Series, spec: str) -> str:
    """List the medians of several models, the smallest model first, or name the only one."""
    if "model" not in rows:
        return ""
    table = rows[["model"]].assign(value=values.astype(float), size=rows.get("num_parameters", 0))
    medians = table.sort_values("size").groupby("model", sort=False)["value"].median()
    if len(medians) == 1:
        return f"; all with {medians.index[0]}"
    if medians.nunique() == 1:
        return ""
    return f"; medians: {', '.join(f'{m} {value:{spec}}' for m, value in medians.items())}"


def out_of(holds: pd.Series) -> str:
    return f"{holds.sum()} of {len(holds)}"


def ends(values: pd.Series, spec: str = "+.2f") -> str:
    """Write the smallest and the largest value, or the one that they are written as."""
    return " to ".join(dict.fromkeys(format(end, spec) for end in (values.min(), values.max())))


def spread(values: pd.Series) -> Figure:
    """Return the median of several settings, with the smallest and the largest."""
    numbers = values.astype(float)
    middle, low, high = (float(f) for f in (numbers.median(), numbers.min(), numbers.max()))
    return Figure(middle) if low == high else Figure(middle, low, high, f"range of {len(numbers)}")


def mean_gap(gaps: pd.DataFrame) -> Figure | None:
    """Return the gap of the one arm, with its interval, or the spread over several.

    Nothing of arms that diverged: they have none.
    """
    gaps = gaps[gaps["gap_pct"].notna()]
    if gaps.empty:
        return None
    if len(gaps) != 1:
        return spread(gaps["gap_pct"])
    columns = ["gap_pct", "gap_pct_low_95", "gap_pct_high_95"]
    value, low, high = gaps[columns].astype(float).iloc[0]
    return Figure(value, low, high, "95 % CI")


def equal_losses(claim: Claim, gaps: pd.DataFrame, **words: object) -> Finding:
    """Judge the claim that losses are those of BF16, from rows of loss gaps.

    It is reproduced where all are shown equivalent, and partly where some are: what is undecided
    is no support. Too few pairs decide nothing.
    """
    paired = with_pairs(gaps)
    if paired.empty:
        return claim.open()
    same = paired["verdict"] == "equivalent"
    apart = paired["verdict"].isin(["different", DIVERGED])
    verdict = by_parts(same.any(), same.all())
    if not (same | apart).any():
        verdict = Verdict.UNDECIDED
    kinds = {"equivalent": same, "different": apart, "undecided": ~same & ~apart}
    counts = ", ".join(f"{rows.sum()} {kind}" for kind, rows in kinds.items() if rows.any())
    words |= {"counts": counts, "margin": paired["margin_pct"].max()}
    return claim.found(verdict, mean_gap(paired), paired, **words)


def on_gpus(arms: pd.DataFrame) -> str:
    """Say on how many GPUs arms ran: on 1, 2 and 4 GPUs; nothing where there is no arm."""
    numbers = sorted({int(number) for number in arms["num_gpus"]})
    noun = "GPU" if numbers == [1] else "GPUs"
    return f"on {listed(numbers)} {noun}" if numbers else ""
