from pathlib import Path

import pandas as pd
import pytest

from fp8study.analysis.runs.frames import metrics_frame
from fp8study.analysis.speed import occupancy_table
from fp8study.core.records import load_runs
from tests.factories import make_record, store
from tests.table_factories import frame


def _store(results: Path, seed: int, start: int, end: int, **changes: object) -> None:
    """Store a run on the 8-GPU machine: 60 steps of 0.1 s, the first of them 2 s of compilation."""
    record = make_record(
        seed=seed, study="sweep", results={"compile_seconds": 2.0}, **changes,
        started_at=f"2000-01-01T00:00:{start:02d}+00:00",
        ended_at=f"2000-01-01T00:00:{end:02d}+00:00",
    )  # fmt: skip
    store(results, "reference/box", record, [5.0] * 60)


def occupancy(results: Path) -> pd.DataFrame:
    return occupancy_table(frame(results), metrics_frame(load_runs(results)))


def test_gpu_time_counts_by_gpu_and_not_between_calls(tmp_path: Path) -> None:
    # Two runs overlap from second 0 to 15, the third comes after a break: 15 + 10 seconds.
    _store(tmp_path, 0, 0, 10)
    _store(tmp_path, 1, 5, 15, num_gpus=2)
    _store(tmp_path, 2, 40, 50)
    row = occupancy(tmp_path).iloc[0]
    assert (row["study"], row["num_runs"], row["num_gpus"]) == ("sweep", 3, 8)
    assert row["wall_minutes"] == pytest.approx(25 / 60)
    assert row["in_steps_pct"] == pytest.approx(100 * (4 + 2 * 4 + 4) / (25 * 8))


def test_a_run_holds_its_gpus_from_the_claim_to_its_end(tmp_path: Path) -> None:
    _store(tmp_path, 0, 0, 20, num_gpus=2)
    assert occupancy(tmp_path)["of_held_pct"].isna().all()
    startup = {"launch_seconds": 1.0, "imports_seconds": 3.0, "gpu_wait_seconds": 8.0}
    _store(tmp_path / "known", 0, 0, 20, num_gpus=2, instruments={"startup": startup})
    assert occupancy(tmp_path / "known")["of_held_pct"].item() == pytest.approx(100 * 4 / 8)


def test_runs_that_share_a_gpu_are_left_out(tmp_path: Path) -> None:
    _store(tmp_path, 0, 0, 10, runs_per_gpu=2)
    assert occupancy(tmp_path).empty


def test_a_run_that_logs_each_fifth_step_was_as_long_in_its_steps(tmp_path: Path) -> None:
    _store(tmp_path, 0, 0, 10)
    metrics = metrics_frame(load_runs(tmp_path))
    table = occupancy_table(frame(tmp_path), metrics[metrics["step"] % 5 == 0])
    assert table["in_steps_pct"].item() == pytest.approx(100 * 6 / (10 * 8))
