"""What is known of FP8's loss, from the report's table of loss gaps."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fp8study.analysis.laws.frozen import Runs
from fp8study.analysis.laws.shape import ModelShape, shape_of
from fp8study.core.presets import PRESETS


def read_loss_gaps(results: Path) -> pd.DataFrame:
    """Read the tables of loss gaps that are committed with the records, of unseen text first.

    ``loss`` says which: ``validation`` or ``training``.
    """
    tables = [
        pd.read_csv(path).assign(loss=loss)
        for loss, name in (("validation", "validation-gaps"), ("training", "loss-gaps"))
        for path in sorted(results.glob(f"reference/*/tables/{name}.csv"))
    ]
    return pd.concat(tables) if tables else pd.DataFrame()


def nearest_losses(
    table: pd.DataFrame, runs: Runs, shape: ModelShape, precision: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what is known of FP8's loss, nearest model first, and what that leaves open."""
    if len(table):
        table = table[(table["precision"] == precision) & ~table["stale"].astype(bool)]
        table = table[table["model"].isin(PRESETS) & table["gap_pct"].notna()]
        # Not arms that put other layers into FP8 than runs do by default.
        table = table[~table["arm"].str.contains("skips")]
    if table.empty:
        return (), (f"any loss: none of {precision} was compared with BF16",)
    sizes = {name: shape_of(name).num_parameters for name in table["model"].unique()}
    away = {name: abs(size - shape.num_parameters) for name, size in sizes.items()}
    table = table.assign(away=table["model"].map(away)).sort_values(
        ["num_pairs", "away"], ascending=[False, True], kind="stable"
    )
    near = table[table["away"] == table["away"].min()].head(1)
    rows = pd.concat([near, table.drop_duplicates("study")]).drop_duplicates(["study", "model"])
    evidence, longest = [], 0.0
    for _, row in rows.head(3).iterrows():
        seen = max(
            (record.data.get("num_tokens_seen") or 0 for _, record in runs
             if record.study == row["study"] and record.config.get("model") == row["model"]),
            default=0,
        ) / 1e6  # fmt: skip
        longest = max(longest, seen)
        gap = f"{row['gap_pct']:+.2f} %".replace("-", "−")
        evidence.append(
            f"{row['model']}, {seen:,.3g} million tokens in {row['epochs']:.1f} passes, "
            f"{row['loss']} loss: {gap} ({row['interval']}), {row['verdict']}; "
            f"{row['machine']}/{row['study']}"
        )
    uncovered = [f"training on more than {longest:,.3g} million tokens"]
    if shape.name not in sizes:
        uncovered.append(f"{shape.name} itself; the nearest is {near['model'].iloc[0]}")
    largest = max(sizes, key=lambda name: sizes[name])
    uncovered.append(f"models of more than {sizes[largest] / 1e9:.1f} billion weights")
    return tuple(evidence), tuple(uncovered)
