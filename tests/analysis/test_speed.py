"""Speeds: which runs pair, what a seed's repeats count for, and what voids a timing."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fp8study.analysis.losses import loss_gap_table
from fp8study.analysis.speed import MEMORY_FULL, document_a_table, throughput_table
from tests.factories import CPU, make_record, store
from tests.study_factories import make_quick, make_smoke
from tests.table_factories import fp8_row, frame, store_pair, store_repeat


def test_speedup_is_over_the_paired_bf16_run(tmp_path: Path) -> None:
    make_quick(tmp_path, seeds=3)
    table = throughput_table(frame(tmp_path))
    fp8 = table[table["precision"] != "bf16"]
    assert len(fp8) == 6
    strained = (fp8["model"] == "llama-3.1-8b") & (fp8["num_gpus"] == 1)
    assert fp8.loc[~strained, "speedup_pct"].to_numpy() == pytest.approx(20.0)
    assert fp8.loc[strained, "speedup_pct"].isna().all()
    assert set(table["num_runs"]) == {3}
    assert table.loc[table["precision"] == "bf16", "speedup_pct"].isna().all()


def test_speed_is_the_median_over_seeds(tmp_path: Path) -> None:
    for seed, speed in enumerate((1.0, 2.0, 900.0)):
        results = {"tokens_per_second_per_gpu": speed}
        store(tmp_path, "local", make_record(seed=seed, results=results))
    (row,) = throughput_table(frame(tmp_path)).to_dict("records")
    assert row["tokens_per_second_per_gpu"] == 2.0


@pytest.mark.parametrize(
    "difference",
    [
        {"seed": 1},
        {"learning_rate": 1e-3},
        {"micro_batch_size": 2},
        {"master_dtype": "bf16"},
        {"study": "other"},
        {"machine": {"gpu_name": "Another GPU"}},
        {"versions": {"torch": "2.12.0"}},
        {"versions": {"transformers": "6.0.0"}},
        {"data": {"corpus_sha256": "cd" * 32}},
        {"data": {"tokenizer_sha256": "cd" * 32}},
        {"status": "diverged"},
    ],
)
def test_no_partner_leaves_the_comparison_blank(difference: dict[str, Any], tmp_path: Path) -> None:
    store_pair(tmp_path, {}, difference)
    runs = frame(tmp_path)
    row = fp8_row(throughput_table(runs))
    assert pd.isna(row["speedup_pct"])
    assert row["note"] == "no BF16 partner"
    assert loss_gap_table(runs).empty


def test_another_model_of_the_same_name_is_no_partner(tmp_path: Path) -> None:
    store_pair(tmp_path, {})
    smaller = make_record(precision="fp8_tensorwise", run_id="fp8-smaller", seed=0)
    smaller.model["num_parameters"] = 1
    store(tmp_path, "local", smaller)
    gaps = loss_gap_table(frame(tmp_path))
    assert gaps["num_pairs"].tolist() == [1]
    speed = throughput_table(frame(tmp_path))
    assert sorted(speed["note"]) == ["", "", "no BF16 partner"]


@pytest.mark.parametrize(
    "fp8_only",
    [
        {"fp8_all_gather": True},
        {"optimizer_binding": "before_conversion"},
        {"skip": ["lm_head", "*.0.*"]},
        {"fp8_emulate": True},
    ],
)
def test_what_exists_for_fp8_only_does_not_spoil_a_pair(
    fp8_only: dict[str, Any], tmp_path: Path
) -> None:
    store_pair(tmp_path, fp8_only)
    assert fp8_row(throughput_table(frame(tmp_path)))["speedup_pct"] == pytest.approx(20)


def test_cpu_runs_get_no_speedup(tmp_path: Path) -> None:
    make_smoke(tmp_path)
    table = throughput_table(frame(tmp_path))
    assert len(table) == 6
    assert table["speedup_pct"].isna().all()
    assert table["note"].str.contains("CPU").all()
    store_pair(tmp_path, {"study": "document-a", "machine": CPU}, {"study": "document-a"})
    by_document = document_a_table(frame(tmp_path))
    on_cpu = by_document[by_document["device"] == "cpu"]
    assert on_cpu[["tokens_per_second_per_gpu", "speedup_pct"]].isna().all(axis=None)


@pytest.mark.parametrize(
    "strain",
    [
        {"memory_peak_gib": 130.0, "num_device_allocs": None},
        {"num_alloc_retries": 1},
        {"num_device_allocs": 4, "num_timed_steps": 60},
    ],
)
def test_nearly_full_memory_gives_no_speedup(strain: dict[str, Any], tmp_path: Path) -> None:
    store_pair(tmp_path, {}, {"results": strain})
    table = throughput_table(frame(tmp_path))
    assert table["note"].tolist() == [MEMORY_FULL] * 2
    assert pd.isna(fp8_row(table)["speedup_pct"])


def test_full_memory_is_no_strain_where_the_allocator_had_nothing_to_do(tmp_path: Path) -> None:
    still = {"memory_peak_gib": 130.0, "num_alloc_retries": 0, "num_device_allocs": 0}
    once_in_a_while = {"num_device_allocs": 3, "num_timed_steps": 60}
    store_pair(tmp_path, {"results": still}, {"results": still | once_in_a_while})
    row = fp8_row(throughput_table(frame(tmp_path)))
    assert (row["note"], row["speedup_pct"]) == ("", pytest.approx(20))


def test_the_speed_of_a_seed_is_the_median_over_its_repeats(tmp_path: Path) -> None:
    for repeat, (bf16, fp8) in enumerate(((5.0, 2.0), (4.0, 6.0), (3.0, 5.0))):
        store_repeat(tmp_path, "bf16", repeat, bf16, repeat=repeat)
        store_repeat(tmp_path, "fp8_rowwise", repeat, fp8, repeat=repeat)
    table = throughput_table(frame(tmp_path))
    assert table["num_runs"].tolist() == [3, 3]
    assert table["tokens_per_second_per_gpu"].tolist() == [4.0, 5.0]
    assert fp8_row(table)["speedup_pct"] == pytest.approx(25)


@pytest.mark.parametrize(
    ("held_up", "note", "speedup_pct"),
    [((), "", 0), ((1,), "", 25), ((0, 1, 2), MEMORY_FULL, math.nan)],
)
def test_repeats_that_the_allocator_held_up_do_not_count_beside_others(
    held_up: tuple[int, ...], note: str, speedup_pct: float, tmp_path: Path
) -> None:
    for repeat, fp8 in enumerate((6.0, 2.0, 4.0)):
        for precision, rate in (("bf16", 4.0), ("fp8_rowwise", fp8)):
            retries = 3 * (precision != "bf16" and repeat in held_up)
            record = make_record(precision=precision, repeat=repeat, run_id=f"{precision}-{repeat}")
            record.results.update({"tokens_per_second_per_gpu": rate, "num_alloc_retries": retries})
            store(tmp_path, "local", record)
    row = fp8_row(throughput_table(frame(tmp_path)))
    assert (row["note"], row["num_runs"]) == (note, 2 if len(held_up) == 1 else 3)
    assert row["speedup_pct"] == pytest.approx(speedup_pct, nan_ok=True)


def test_a_seed_that_the_allocator_held_up_leaves_the_arm_to_the_others(tmp_path: Path) -> None:
    for seed, precision in itertools.product(range(3), ("bf16", "fp8_rowwise")):
        is_void = seed == 1 and precision != "bf16"
        record = make_record(precision=precision, seed=seed, run_id=f"{precision}-{seed}")
        rate = 1.0 if is_void else 5.0 if precision != "bf16" else 4.0
        record.results.update({"tokens_per_second_per_gpu": rate, "num_alloc_retries": 3 * is_void})
        store(tmp_path, "local", record)
    row = fp8_row(throughput_table(frame(tmp_path)))
    assert (row["note"], row["num_runs"], row["speedup_pct"]) == ("", 2, pytest.approx(25))


def test_a_speed_ends_with_a_newer_divergence(tmp_path: Path) -> None:
    store_repeat(tmp_path, "bf16", 0, 4.0)
    store_repeat(tmp_path, "fp8_rowwise", 0, 5.0)
    assert len(throughput_table(frame(tmp_path))) == 2
    store_repeat(tmp_path, "fp8_rowwise", 1, 5.0, status="diverged")
    assert throughput_table(frame(tmp_path))["precision"].tolist() == ["bf16"]
