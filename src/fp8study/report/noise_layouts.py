"""How the tables of `fp8study.analysis.noise_tables` are shown, and what is averaged for them."""

from __future__ import annotations

import math

import pandas as pd

from fp8study.report.page import Layout

_GROUP = "after {step} steps: {model} on {machine}, n = {num_seeds}"

CROSSING = Layout(
    {
        "what": ("comparison", ""),
        "ratio_pct": ("of sampling error, %", ".0f"),
        "ratio_range": ("intervals", ""),
        "systematic_pct": ("systematic, %", ".0f"),
        "crossing_batch": ("equal at batch", ",.0f"),
        "crossing_range": ("intervals", ""),
    },
    _GROUP,
)
SEEDS = Layout(
    {
        "seed": ("seed", "d"),
        "noise_scale": ("noise scale, sequences", ".2g"),
        "noise_scale_range": ("95 %", ""),
        "ratio_pct": ("of sampling error, %", ".1f"),
        "ratio_range": ("95 %", ""),
        "crossing_batch": ("equal at batch", ",.0f"),
        "crossing_range": ("95 %", ""),
    },
    "after {step} steps: {what}",
)
SCALE = Layout(
    {
        "step": ("steps", "d"),
        "noise_scale": ("noise scale, sequences", ".2g"),
        "noise_scale_range": ("intervals", ""),
        "noise_scale_tokens": ("tokens", ",.0f"),
    },
    "{model} on {machine}, n = {num_seeds}",
)
GRADIENT = Layout(
    {
        "what": ("comparison", ""),
        "relative_pct": ("relative error, %", ".1f"),
        "fp32_pct": ("v FP32, %", ".1f"),
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
    """Write the hull of several intervals so that a table does not break it over two lines."""
    return "\u00a0to\u00a0".join(_end(float(end)) for end in (low.min(), high.max()))


def _end(value: float) -> str:
    if math.isinf(value):
        return "∞"
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


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
                "ratio_range": _range(
                    100 * group["ratio_at_1_low"], 100 * group["ratio_at_1_high"]
                ),
                "systematic_pct": 100 * group["systematic_share"].median(),
                "crossing_batch": group["crossing_batch"].median(),
                "crossing_range": _range(group["crossing_batch_low"], group["crossing_batch_high"]),
            }
        )
    return pd.DataFrame(rows)


def by_seed(crossing: pd.DataFrame, scale: pd.DataFrame) -> pd.DataFrame:
    """One row a run and point: its noise scale, and the errors of the recipe it trained in.

    A run that trained in another precision is shown with the first FP8 recipe.
    """
    if crossing.empty:
        return crossing
    keys = ["run_id", "step"]
    fp8 = crossing[(crossing["scope"] == "all") & (crossing["precision"] != "bf16")]
    fp8 = fp8.assign(other=fp8["precision"] != fp8["trained"])
    fp8 = fp8.sort_values([*keys, "other"], kind="stable").drop_duplicates(keys)
    columns = ["noise_scale", "noise_scale_low", "noise_scale_high"]
    found = fp8.merge(scale[scale["scope"] == "all"][[*keys, *columns]], on=keys)
    for name, unit in (("noise_scale", 1), ("ratio_at_1", 100), ("crossing_batch", 1)):
        low, high = unit * found[f"{name}_low"], unit * found[f"{name}_high"]
        ends = [_range(low[[row]], high[[row]]) for row in found.index]
        found[f"{name}_range"] = pd.Series(ends, found.index, dtype="object")
    names = {"ratio_at_1_range": "ratio_range", "crossing_batch_range": "crossing_range"}
    found = found.rename(columns=names).assign(ratio_pct=100 * found["ratio_at_1"])
    return found.sort_values(["step", "seed"], kind="stable")


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
    table = table[table["scope"] == "all"]
    neighbour = table["precision"].eq("bf16") | table["reference"].eq("bf16")
    run = ["machine", "study", "run_id", "step", "precision"]
    fp32 = table[table["reference"] == "fp32"][[*run, "relative_error"]]
    fp32 = fp32.assign(fp32_pct=100 * fp32["relative_error"]).drop(columns="relative_error")
    chosen = table[neighbour].merge(fp32, on=run, how="left")
    by = chosen.groupby([*_PLACE, "what"], sort=False)
    found = by[[*columns, "fp32_pct"]].median().reset_index()
    return found.assign(
        num_seeds=by["seed"].nunique().to_numpy(),
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
    by = found.groupby(keys, sort=False)
    return by[columns].median().reset_index().assign(num_seeds=by["seed"].nunique().to_numpy())
