"""Whether it matters how an effective batch comes about."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8study.analysis.losses import effective_batch_table, ways_table
from fp8study.report.cause_plots import effective_batch_figure
from fp8study.report.cause_sentences import effective_batch
from tests.factories import CPU, make_record, store
from tests.study_factories import make_effective_batch
from tests.table_factories import frame


def test_batches_are_counted_and_their_ways_named(tmp_path: Path) -> None:
    make_effective_batch(tmp_path)
    for precision in ("bf16", "fp8_rowwise"):
        record = make_record(
            study="effective-batch", num_gpus=2, micro_batch_size=4, precision=precision
        )
        store(tmp_path, "local", record)
    runs = frame(tmp_path).assign(margin_pct=0.5)
    batches = effective_batch_table(runs)
    found = set(zip(batches["effective_batch"], batches["way"], strict=True))
    ways = {(size, way) for size in (2, 4) for way in ("GPUs", "accumulation", "micro-batch")}
    assert found == ways | {(1, "one sequence"), (8, "GPUs and micro-batch")}
    assert set(batches["margin_pct"]) == {0.5}
    effective_batch_figure(batches, "").savefig(tmp_path / "batch.png")
    ways_apart = ways_table(runs)
    text = effective_batch(batches, ways_apart)
    assert "**8 × H200.** With a healthy optimizer FP8 learns at an effective" in text
    assert "**local" not in text  # one seed at one batch says nothing of batches
    assert "Two ways to the same effective batch are equivalent in 6 of 6 cases." in text
    failing = batches.assign(gap_pct=40.0)
    assert "FP8 fails to learn in 7 settings" in effective_batch(failing, ways_apart)


def test_a_way_that_differs_is_not_called_equivalent(tmp_path: Path) -> None:
    gaps = {"num_gpus": 0.05, "micro_batch_size": 0.0}
    for way, gap in gaps.items():
        for seed in range(4):
            for precision in ("bf16", "fp8_rowwise"):
                worse = (gap + 0.001 * seed) * (precision != "bf16")
                record = make_record(
                    study="effective-batch", run_id=f"{way}-{precision}-{seed}", seed=seed,
                    precision=precision, results={"loss_last20_mean": 5 + worse}, **{way: 2},
                )  # fmt: skip
                store(tmp_path, "local", record)
    row = ways_table(frame(tmp_path)).iloc[0]
    assert (row["way"], row["other_way"], row["num_pairs"]) == ("GPUs", "micro-batch", 4)
    assert row["difference_pct"] == pytest.approx(1.0)
    assert row["verdict"] == "different"


def test_a_way_of_which_a_seed_diverged_is_equivalent_to_none(tmp_path: Path) -> None:
    make_effective_batch(tmp_path)
    lost = {"status": "diverged", "results": {"loss_last20_mean": None}}
    for precision, end in (("bf16", {}), ("fp8_tensorwise", lost)):
        record = make_record(
            study="effective-batch", seed=7, num_gpus=2, precision=precision, **end
        )
        store(tmp_path, "reference/h200x8", record)
    ways = ways_table(frame(tmp_path))
    lone = ways[["way", "other_way"]].eq("GPUs").any(axis=1) & (ways["effective_batch"] == 2)
    assert lone.sum() == 2
    assert (ways["verdict"] == "diverged").equals(lone)


def test_emulated_batches_are_no_answer(tmp_path: Path) -> None:
    for precision in ("bf16", "fp8_rowwise"):
        record = make_record(study="effective-batch", precision=precision, machine=CPU)
        store(tmp_path, "local", record)
    batches = effective_batch_table(frame(tmp_path))
    assert len(batches) == 1
    assert "no records yet" in effective_batch(batches, ways_table(frame(tmp_path)))
