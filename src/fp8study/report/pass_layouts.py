"""How the page on quality shows gaps by pass over the corpus."""

from __future__ import annotations

import pandas as pd

from fp8study.report.page import Layout
from fp8study.report.words import count, escape, how_to_get, signed

_PLACE = ["machine", "study", "model", "num_gpus", "setting"]
_END = "end"


def side_by_side(table: pd.DataFrame) -> pd.DataFrame:
    """Put an arm's passes beside each other, as text.

    Args:
        table: From `fp8study.analysis.losses.pass_table`.

    Returns:
        A row per arm: where and what it is, its pairs, its ``passes``, and a column for the end of
        each pass and of the run with the mean gap and half of its 95 % interval, in %.
    """
    arm = [*_PLACE, "arm", "arm_key"]
    cells = table.assign(
        column=[_column(passes) for passes in table["passes"]],
        cell=[_cell(*row) for row in table[["gap_pct", "low_95", "high_95"]].to_numpy()],
    )
    wide = cells.pivot_table(index=arm, columns="column", values="cell", aggfunc="first")
    return table.groupby(arm)[["num_pairs", "passes"]].max().join(wide).reset_index()


def layout(table: pd.DataFrame) -> Layout:
    """Return the columns that `side_by_side` gives to these passes."""
    ends = dict.fromkeys(_column(passes) for passes in sorted(set(table["passes"])))
    in_order = sorted(ends, key=lambda end: end == _END)  # the end comes last
    columns = {"arm": ("precision", ""), "num_pairs": ("pairs", "d"), "passes": ("passes", ".1f")}
    return Layout(
        columns | {end: (end, "") for end in in_order}, "{model}, {study} on {machine}: {setting}"
    )


def _column(passes: float) -> str:
    return f"pass {passes:.0f}" if passes == int(passes) else _END


def _cell(gap: float, low: float, high: float) -> str:
    return f"{signed(gap, 2)} ±\u00a0{(high - low) / 2:.2f}"


def first_and_last(table: pd.DataFrame) -> str:
    """Say what the gaps were after one pass, and what they are at the end.

    Args:
        table: From `fp8study.analysis.losses.pass_table`.
    """
    if table.empty:
        return (
            "No arm with three pairs on a GPU trained for two passes over its corpus: "
            f"{how_to_get('loss-parity')}."
        )
    lines = []
    for (machine, study, model), rows in table.groupby(["machine", "study", "model"], sort=False):
        ends = rows.groupby("arm_key")["passes"].transform("max")
        last = rows[rows["passes"] == ends]
        low, high = (f"{end:.1f}" for end in (last["passes"].min(), last["passes"].max()))
        parts = [
            f"after the first pass {_judged(rows[rows['passes'] == 1])}",
            f"after {low if low == high else f'{low} to {high}'} passes {_judged(last)}",
        ]
        lines.append(
            f"- **{escape(str(model))}** ({escape(str(study))} on {escape(str(machine))}): "
            f"{'; '.join(parts)}."
        )
    return "\n".join(lines)


def _judged(rows: pd.DataFrame) -> str:
    low, high = signed(rows["gap_pct"].min(), 2), signed(rows["gap_pct"].max(), 2)
    verdicts = rows["verdict"].value_counts()
    said = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items())
    span = f"a gap of {low} %" if low == high else f"gaps of {low} % to {high} %"
    return f"{span} ({count(len(rows), 'arm')}: {said})"
