"""Stored pairs and repeats of synthetic runs, and the frame of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fp8study.analysis.runs.frames import runs_frame
from fp8study.core.records import load_runs
from tests.factories import make_record, store


def frame(results: Path) -> pd.DataFrame:
    return runs_frame(load_runs(results))


def store_pair(results: Path, fp8: dict[str, Any], bf16: dict[str, Any] | None = None) -> None:
    """Store a BF16 and a tensorwise run, each with its own changes."""
    store(results, "local", make_record(run_id="bf16", **(bf16 or {})))
    changes = {"precision": "fp8_tensorwise"} | fp8
    store(results, "local", make_record(run_id="fp8", **changes))


def store_losses(
    results: Path, losses: Mapping[str, Sequence[float | None]], **changes: Any
) -> None:
    """Store runs of each precision that end at these losses, seed by seed; None: it diverged."""
    for precision, ends in losses.items():
        for seed, end in enumerate(ends):
            record = make_record(
                precision=precision, seed=seed, status="completed" if end else "diverged",
                results={"loss_last20_mean": end}, **changes,
            )  # fmt: skip
            store(results, "local", record)


def fp8_row(table: pd.DataFrame) -> pd.Series:
    (row,) = [row for _, row in table.iterrows() if row["precision"] != "bf16"]
    return row


def store_repeat(results: Path, precision: str, minute: int, value: float, **changes: Any) -> None:
    """Store a run of seed 0 that ended at `minute`, with a loss and a speed of `value`."""
    measured = {"loss_last20_mean": value, "tokens_per_second_per_gpu": value}
    record = make_record(
        precision=precision,
        # The order of names is the reverse of the order in time.
        run_id=f"{precision}-{9 - minute}",
        ended_at=f"2000-01-01T00:0{minute}:00+00:00",
        results=measured,
        study="document-a",
        **changes,
    )
    store(results, "local", record)
