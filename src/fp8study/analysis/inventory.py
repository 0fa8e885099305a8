"""The tables that list rather than compare: origins, failures, data, and what others published."""

from __future__ import annotations

from pathlib import Path

import pandas as pd


def provenance_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Say, for each machine and study, where its numbers come from.

    Returns:
        One row per machine, study and installation: hardware, versions, commit, corpus, dates
        and how many runs ended in which status.
    """
    hardware = runs["gpu_name"].fillna(runs["cpu_name"])
    commit = runs["git_commit"].astype("object").map(lambda c: c[:10] if isinstance(c, str) else "")
    dirty = runs["git_dirty"].map(lambda flag: " + uncommitted changes" if flag is True else "")
    frame = runs.assign(hardware=hardware, commit=commit + dirty)
    keys = ["machine", "study", "hardware", "driver", "version_torch", "version_torchao", "commit"]
    keys += ["version_cuda", "version_transformers"]
    columns = [*keys, "first_run", "last_run", "num_runs", "statuses"]
    rows = []
    for values, group in frame.groupby(keys, dropna=False, sort=False):
        counts = group["status"].value_counts()
        rows.append(
            {
                **dict(zip(keys, values, strict=True)),
                "first_run": str(group["started_at"].min())[:16].replace("T", " "),
                "last_run": str(group["ended_at"].max())[:16].replace("T", " "),
                "num_runs": len(group),
                "statuses": ", ".join(f"{count} {status}" for status, count in counts.items()),
            }
        )
    return pd.DataFrame(rows, columns=columns)


def failures_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Every run that did not complete, with what it says of itself."""
    columns = ["machine", "study", "model", "num_gpus", "arm", "seed", "run_id"]
    columns += ["status", "steps_completed", "status_detail"]
    return runs.loc[runs["status"] != "completed", columns].reset_index(drop=True)


def published_table(path: Path) -> pd.DataFrame:
    """Figures that others published, tokens/s per GPU, with each recipe's lead over BF16.

    Args:
        path: ``published.csv``: source, setting, gpus, and one column per precision.

    Returns:
        The file with ``fp8_tensorwise_pct`` and ``fp8_rowwise_pct``, % over BF16, added.
    """
    table = pd.read_csv(path)
    for recipe in ("fp8_tensorwise", "fp8_rowwise"):
        table[f"{recipe}_pct"] = 100 * (table[recipe] / table["bf16"] - 1)
    return table


def data_table(runs: pd.DataFrame) -> pd.DataFrame:
    """How much of which corpus the runs of each study saw."""
    keys = ["machine", "study", "corpus", "corpus_sha", "vocab_size"]
    seen = runs[runs["num_tokens_seen"].notna()]
    hashes = seen["corpus_sha256"].map(lambda h: h[:10] if isinstance(h, str) else "")
    return (
        seen.assign(corpus_sha=hashes)
        .groupby(keys, sort=False, dropna=False)
        .agg(
            num_train_tokens=("num_train_tokens", "max"),
            tokens_seen_max=("num_tokens_seen", "max"),
            epochs_max=("epochs", "max"),
            num_seeds=("seed", "nunique"),
        )
        .reset_index()
    )
