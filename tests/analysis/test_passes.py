"""The loss gap where each pass over a corpus ends."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fp8study.analysis.losses import loss_gap_table, pass_table
from fp8study.analysis.runs.frames import metrics_frame
from fp8study.core.records import load_runs
from fp8study.report import rows
from tests.factories import make_record, store
from tests.table_factories import frame

#: Steps in a run, and blocks in its corpus: passes end at the steps 40, 80 and 100.
STEPS, BLOCKS = 100, 40


def make_repeating(results: Path, seeds: int = 3, blocks: int = BLOCKS, **changes: Any) -> None:
    """FP8 is as good as BF16 for two passes, and 1 % worse from then on."""
    kept_out = 5
    for seed in range(seeds):
        for precision, cost in (("bf16", 0.0), ("fp8_rowwise", 0.01)):
            losses = [(5 - 0.01 * step + 0.1 * seed) * (1 + cost * (step > 80))
                      for step in range(1, STEPS + 1)]  # fmt: skip
            record = make_record(
                study="repeating", run_id=f"{precision}-{seed}-{blocks}", precision=precision,
                seed=seed, num_steps=STEPS, validation_sequences=kept_out, **changes,
                results={"loss_last20_mean": sum(losses[-20:]) / 20, "steps_completed": STEPS},
            )  # fmt: skip
            # A rest that fills no block is no part of any pass.
            record.data["num_train_tokens"] = (blocks + kept_out) * 4096 + 4000
            store(results, "reference/box", record, losses)


def passes(results: Path) -> pd.DataFrame:
    return pass_table(metrics_frame(load_runs(results)), frame(results))


def test_a_gap_that_comes_with_repetition_is_not_there_after_the_first_pass(tmp_path: Path) -> None:
    make_repeating(tmp_path)
    table = passes(tmp_path)
    assert table["step"].tolist() == [40, 80, 100]
    assert table["passes"].tolist() == [1, 2, STEPS / BLOCKS]
    assert table["gap_pct"].tolist() == pytest.approx([0, 0, 1])
    assert table["verdict"].tolist() == ["equivalent", "equivalent", "different"]
    assert set(table["num_pairs"]) == {3}
    gaps = loss_gap_table(frame(tmp_path))
    assert table["gap_pct"].iloc[-1] == pytest.approx(gaps["gap_pct"].iloc[0])


def test_seeds_that_are_left_of_a_divergence_are_not_judged(tmp_path: Path) -> None:
    make_repeating(tmp_path)
    for precision, end in (("bf16", "completed"), ("fp8_rowwise", "diverged")):
        alike = load_runs(tmp_path)[0].record
        config = alike.config | {"precision": precision, "seed": 7}
        record = dataclasses.replace(alike, run_id=f"{precision}-7", config=config, status=end)
        store(tmp_path, "reference/box", record)
    table = passes(tmp_path)
    assert table["num_pairs"].tolist() == [3] * 3
    assert table["verdict"].tolist() == ["diverged"] * 3


def test_passes_stand_side_by_side_and_the_end_comes_last(tmp_path: Path) -> None:
    make_repeating(tmp_path)
    table = passes(tmp_path)
    wide, layout = rows.by_pass(table)
    columns = layout.columns
    assert list(columns)[3:] == ["pass 1", "pass 2", "end"]
    (row,) = wide.to_dict("records")
    assert row["pass 2"] == "+0.00 ±\u00a00.00"
    assert row["end"] == "+1.00 ±\u00a00.00"
    assert set(columns) <= set(row)


@pytest.mark.parametrize(("seeds", "blocks"), [(2, BLOCKS), (3, 51)])
def test_too_few_pairs_or_passes_have_no_row(seeds: int, blocks: int, tmp_path: Path) -> None:
    make_repeating(tmp_path, seeds, blocks)
    table = passes(tmp_path)
    assert table.empty
    wide, layout = rows.by_pass(table)
    assert wide.empty
    assert "pass 1" not in layout.columns


def test_a_whole_number_of_passes_ends_once(tmp_path: Path) -> None:
    make_repeating(tmp_path, blocks=50)
    table = passes(tmp_path)
    assert table[["passes", "step"]].to_numpy().tolist() == [[1, 50], [2, 100]]
    assert list(rows.by_pass(table)[1].columns)[3:] == ["pass 1", "pass 2"]


def test_every_arm_is_judged_at_its_own_end(tmp_path: Path) -> None:
    make_repeating(tmp_path)
    make_repeating(tmp_path, blocks=25, learning_rate=1e-4)
    table = passes(tmp_path)
    ends = table[table["passes"] == table.groupby("arm_key")["passes"].transform("max")]
    assert sorted(ends["passes"]) == [2.5, 4.0]
    assert ends["gap_pct"].tolist() == pytest.approx([1, 1])
    assert ends["verdict"].tolist() == ["different"] * 2
