"""The tables of the report: every number that it shows is computed here from run records.

A run whose optimizer holds stale parameters keeps the words "stale optimizer (x % of parameters
not trained)" in its ``arm`` in every table, so that it is never taken for an FP8 speed-up or
loss gap. CPU runs emulate FP8: they get no speed-up at all.
"""

from __future__ import annotations

import pandas as pd

from fp8study.analysis.frames import METRIC_COLUMNS, RUN_COLUMNS, metrics_frame, runs_frame
from fp8study.analysis.inventory import (
    data_table,
    failures_table,
    provenance_table,
    published_table,
)
from fp8study.analysis.losses import LOSS_GAP_COLUMNS, loss_gap_table
from fp8study.analysis.pairing import (
    DIVERGED,
    FAILURE_STUDIES,
    MEMORY_LIMIT_SHARE,
    newest_per_seed,
    paired_losses,
    shorten_arms,
)
from fp8study.analysis.speed import MEMORY_FULL, throughput_table
from fp8study.core.studies import LOSS_MARGIN_PCT

__all__ = [
    "DIVERGED",
    "FAILURE_STUDIES",
    "LOSS_GAP_COLUMNS",
    "LOSS_MARGIN_PCT",
    "MEMORY_FULL",
    "MEMORY_LIMIT_SHARE",
    "METRIC_COLUMNS",
    "RUN_COLUMNS",
    "data_table",
    "document_a_table",
    "failures_table",
    "loss_gap_table",
    "metrics_frame",
    "paired_losses",
    "provenance_table",
    "published_table",
    "runs_frame",
    "shorten_arms",
    "throughput_table",
]


def document_a_table(runs: pd.DataFrame, study: str = "document-a") -> pd.DataFrame:
    """The arms of document A's single-GPU failure, with what their optimizers did not train.

    Args:
        runs: From `runs_frame`, or a selection of it.
        study: Beginning of the names of the studies to show.

    Returns:
        One row per machine and arm of those studies; empty if there is none.
    """
    chosen = newest_per_seed(runs[runs["study"].fillna("").str.startswith(study)])
    columns = ["parameters_outside_optimizer_pct", "loss_start", "loss_last20_mean"]
    identity = ["machine", "device", "study", "model", "master_dtype", "precision", "arm", "stale"]
    chosen = chosen[(chosen["status"] == "completed") & chosen["loss_last20_mean"].notna()]
    groups = chosen.groupby("arm_key", sort=False)
    table = groups[identity].first()
    table["num_runs"] = groups.size()
    table["masters"] = table["master_dtype"].str.upper()
    table[columns] = groups[columns].mean()
    speed = throughput_table(chosen).set_index("arm_key")
    for name in (
        "tokens_per_second_per_gpu", "memory_peak_gib", "speedup_pct", "memory_change_pct",
    ):  # fmt: skip
        table[name] = pd.to_numeric(speed[name].reindex(table.index), errors="coerce")
    # A CPU's tokens per second with emulated FP8 say nothing; leave nothing to be quoted.
    table.loc[table["device"] == "cpu", "tokens_per_second_per_gpu"] = float("nan")
    rank = (table["precision"] != "bf16").astype(int) + table["stale"].fillna(False).astype(int)
    table = table.assign(_rank=rank)
    table = table.sort_values(["machine", "study", "model", "master_dtype", "_rank", "arm"])
    return table.drop(columns="_rank").reset_index()
