"""How the loss gap of FP8 moves as a run goes over its corpus again.

In the first pass the loss of a step is on text that the model has never seen; later it is also a
matter of what the model remembers. A gap that begins with the second pass is another finding than
one that begins with the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from fp8study.analysis import stats
from fp8study.analysis.gaps import gap_curves
from fp8study.core.studies import LOSS_MARGIN_PCT

_PLACE = ["machine", "study", "model", "num_gpus", "setting", "arm", "precision", "arm_key"]
PASS_COLUMNS = [
    *_PLACE, "passes", "step", "num_pairs", "gap_pct", "low_95", "high_95", "margin_pct", "verdict",
]  # fmt: skip


def pass_table(
    metrics: pd.DataFrame, runs: pd.DataFrame, margins: Mapping[str, float] | None = None
) -> pd.DataFrame:
    """Judge the healthy loss gap on GPUs where each pass over the corpus ends, and at the end.

    Args:
        metrics: From `fp8study.analysis.tables.metrics_frame`.
        runs: From `fp8study.analysis.tables.runs_frame`.
        margins: As `fp8study.analysis.tables.loss_gap_table`.

    Returns:
        The columns of `PASS_COLUMNS`, of arms that trained for two passes or more and have three
        pairs: ``passes`` over the corpus until ``step``, ``gap_pct`` the mean over seeds of the
        gaps there (means of the last 20 logged steps, in % of the BF16 loss), with the interval
        and the verdict of `fp8study.analysis.stats.judged`.
    """
    arms: dict[str, list[tuple[pd.Series, pd.Series]]] = {}
    for pair, gap in gap_curves(metrics, runs):
        if _passes(pair, int(pair["steps_completed"])) >= 2:
            arms.setdefault(pair["arm_key"], []).append((pair, gap))
    rows = []
    for pairs in arms.values():
        if len(pairs) < stats.MIN_PAIRS_FOR_INTERVAL:
            continue
        first = pairs[0][0]
        place: dict[str, Any] = {name: first[name] for name in _PLACE}
        margin = (margins or {}).get(str(first["study"]), LOSS_MARGIN_PCT)
        for passes, step in _ends(first):
            gaps = [float(gap.loc[:step].iloc[-1]) for _, gap in pairs if gap.index[0] <= step]
            if gaps:
                row = place | {"passes": passes, "step": step, "num_pairs": len(gaps)}
                row |= {"gap_pct": sum(gaps) / len(gaps), "margin_pct": margin}
                rows.append(row | stats.judged(gaps, margin))
    return pd.DataFrame(rows, columns=PASS_COLUMNS)


def _passes(run: pd.Series, num_steps: int) -> float:
    """Return how often the whole blocks of its corpus were trained on; NaN if it is not known."""
    blocks = run["num_train_tokens"] // run["sequence_length"]
    blocks -= 0 if pd.isna(run["validation_sequences"]) else run["validation_sequences"]
    per_step = run["num_gpus"] * run["micro_batch_size"] * run["gradient_accumulation_steps"]
    known = not pd.isna(blocks) and not pd.isna(per_step) and blocks > 0
    return float(num_steps * per_step / blocks) if known else math.nan


def _ends(run: pd.Series) -> list[tuple[float, int]]:
    """Return the last step that lies wholly in each pass, and the last of all."""
    num_steps = int(run["steps_completed"])
    last = _passes(run, num_steps)
    whole = [(float(n), math.floor(n * num_steps / last + 1e-9)) for n in range(1, int(last) + 1)]
    return [end for end in whole if end[1] < num_steps] + [(last, num_steps)]
