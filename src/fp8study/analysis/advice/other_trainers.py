"""What FP8 gave another trainer, on the GPUs nearest to those that are asked about."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fp8study.analysis.laws.shape import ModelShape, shape_of
from fp8study.core.words import count, number

#: A lead of a model more than twice as large, or less than half, says little.
_ALIKE = 1.0


def over_slow_links(links: pd.DataFrame) -> str:
    """Say FP8's leads without NVLink, from `fp8study.analysis.scale.links_table`."""
    told = [
        f"{row['model']} {number(row['measured_pct'], '+.1f')} % ({count(row['num_gpus'], 'GPU')}, "
        f"{row['path']}, batch {row['micro_batch_size']})"
        for row in links.to_dict("records")
    ]
    return f"FP8's lead on H200s without NVLink: {', '.join(told)}" if told else ""


def other_trainers(
    leads: pd.DataFrame, shape: ModelShape, num_gpus: int, tokens_per_gpu: int
) -> str:
    """Say by how much FP8 made each other trainer faster, of the model nearest in size.

    Args:
        leads: Rows of `peer_table`; ``peer_lead_pct`` is the trainer's FP8 over its own BF16, %.
        shape: The model that is asked about.
        num_gpus: On how many GPUs; of each trainer the nearest number is told.
        tokens_per_gpu: Of an optimizer step; then the nearest step.

    Returns:
        A line; empty where no model of half to twice the weights was timed.
    """
    if leads.empty:
        return ""
    sizes = leads["model"].map(lambda model: shape_of(model).num_parameters)
    away = np.log2(sizes / shape.num_parameters).abs()
    near = leads[(away <= _ALIKE) & (away == away.min())]
    off = np.log2(near["num_gpus"] / num_gpus).abs()
    size = np.log2(near["tokens_per_gpu"] / tokens_per_gpu).abs()
    near = near.assign(off=off, size=size).sort_values(["off", "size"], kind="stable")
    told = [
        f"{row.peer} {number(row.peer_lead_pct, '+.1f')} % ({count(row.num_gpus, 'GPU')}, "
        f"{row.tokens_per_gpu:,.0f} tokens each, {row.machine})"
        for row in near.drop_duplicates("peer").itertuples()
    ]
    if not told:
        return ""
    return f"FP8's lead in other trainers with {near['model'].iloc[0]}: {', '.join(told)}"
