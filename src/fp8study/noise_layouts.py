"""How the tables of `fp8study.noise_tables` are shown, and what is averaged for them."""

from __future__ import annotations

import pandas as pd

from fp8study.pages import Layout

_GROUP = "{model} on {machine}, {study}, after {step} steps"

CROSSING = Layout(
    {
        "what": ("comparison", ""),
        "num_seeds": ("seeds", "d"),
        "ratio_pct": ("of sampling error at batch 1, %", ".0f"),
        "systematic_pct": ("systematic part, %", ".0f"),
        "crossing_batch": ("equal at batch", ",.0f"),
        "crossing_range": ("over seeds, 95 %", ""),
    },
    _GROUP,
)
SCALE = Layout(
    {
        "num_seeds": ("seeds", "d"),
        "noise_scale": ("noise scale, sequences", ".2g"),
        "noise_scale_range": ("over seeds, 95 %", ""),
        "noise_scale_tokens": ("tokens", ",.0f"),
    },
    _GROUP,
)
GRADIENT = Layout(
    {
        "what": ("comparison", ""),
        "relative_pct": ("relative error, %", ".1f"),
        "cosine": ("cosine", ".4f"),
        "sqnr_db": ("SQNR, dB", ".1f"),
        "median_pct": ("median sequence, %", ".1f"),
        "worst_pct": ("worst, %", ".1f"),
        "loss_change": ("loss, nats", "+.4f"),
    },
    _GROUP,
)
PRODUCT = Layout(
    {
        "what": ("recipe", ""),
        "product": ("product", ""),
        "error_pct": ("relative error, %", ".2f"),
        "sqnr_db": ("SQNR, dB", ".1f"),
        "underflow_pct": ("underflow, %", ".3f"),
        "saturated_pct": ("saturated, %", ".3f"),
    },
    _GROUP,
)
_PLACE = ["machine", "study", "model", "step"]


def _range(low: pd.Series, high: pd.Series) -> str:
    ends = (float(low.min()), float(high.max()))
    return " to ".join(f"{end:,.0f}" if end >= 100 else f"{end:.3g}" for end in ends)


def crossings(table: pd.DataFrame) -> pd.DataFrame:
    """Medians over seeds, with the range of all their intervals."""
    if table.empty:
        return table
    rows = []
    keys = [*_PLACE, "what"]
    for values, group in table[table["scope"] == "all"].groupby(keys, sort=False):
        rows.append(
            dict(zip(keys, values, strict=True))
            | {
                "num_seeds": group["seed"].nunique(),
                "ratio_pct": 100 * group["ratio_at_1"].median(),
                "systematic_pct": 100 * group["systematic_share"].median(),
                "crossing_batch": group["crossing_batch"].median(),
                "crossing_range": _range(group["crossing_batch_low"], group["crossing_batch_high"]),
            }
        )
    return pd.DataFrame(rows)


def scales(table: pd.DataFrame) -> pd.DataFrame:
    """Medians over seeds of the noise scale, all parameters."""
    if table.empty:
        return table
    rows = []
    for values, group in table[table["scope"] == "all"].groupby(_PLACE, sort=False):
        rows.append(
            dict(zip(_PLACE, values, strict=True))
            | {
                "num_seeds": group["seed"].nunique(),
                "noise_scale": group["noise_scale"].median(),
                "noise_scale_range": _range(group["noise_scale_low"], group["noise_scale_high"]),
                "noise_scale_tokens": group["noise_scale_tokens"].median(),
            }
        )
    return pd.DataFrame(rows)


def gradients(table: pd.DataFrame) -> pd.DataFrame:
    """Medians over seeds of the gradient's error, all parameters."""
    if table.empty:
        return table
    columns = ["relative_error", "cosine", "sqnr_db", "median_error", "worst_error", "loss_change"]
    neighbour = table["precision"].eq("bf16") | table["reference"].eq("bf16")
    chosen = table[(table["scope"] == "all") & neighbour]
    found = chosen.groupby([*_PLACE, "what"], sort=False)[columns].median().reset_index()
    return found.assign(
        relative_pct=100 * found["relative_error"],
        median_pct=100 * found["median_error"],
        worst_pct=100 * found["worst_error"],
    )


def products(table: pd.DataFrame) -> pd.DataFrame:
    """Medians over layers and seeds of single products; the worse of both operands' shares."""
    if table.empty:
        return table
    shares = {
        kind: [name for name in table.columns if kind in str(name)]
        for kind in ("underflow", "saturat")
    }
    found = table.assign(
        error_pct=100 * table["error"],
        underflow_pct=100 * table[shares["underflow"]].max(axis=1),
        saturated_pct=100 * table[shares["saturat"]].max(axis=1),
        product=table["product"].map(
            {"output": "forward", "grad_input": "input gradient", "grad_weight": "weight gradient"}
        ),
    )
    columns = ["error_pct", "sqnr_db", "underflow_pct", "saturated_pct"]
    keys = [*_PLACE, "what", "product"]
    return found.groupby(keys, sort=False)[columns].median().reset_index()
