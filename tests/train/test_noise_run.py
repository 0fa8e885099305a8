"""A run that pauses to measure noise, from its configuration to the tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8study.analysis.noise import tables as noise_tables
from fp8study.core.errors import UserError
from fp8study.core.records import StoredRun, read_metrics, read_record
from tests.train.tiny_runs import launch_tiny

SHORT = {"sequence_length": 32, "num_steps": 3, "num_warmup_steps": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "precision"), [("fsdp2", "fp8_rowwise_gw_hp"), ("none", "bf16")]
)
def test_a_run_with_pauses_trains_the_same_and_records_what_it_saw(
    strategy: str, precision: str, tmp_path: Path
) -> None:
    values = SHORT | {"strategy": strategy, "precision": precision}
    record = launch_tiny(tmp_path / "paused", noise_at_steps=[0, 3], noise_samples=4, **values)
    assert record.status == "completed"
    assert read_record(tmp_path / "paused/run.json").noise == record.noise
    assert [p["step"] for p in record.noise["points"]] == [0, 3]
    assert record.noise["emulated"] is True
    assert len(record.noise["sample_blocks"]) == 4

    # The pauses are in the times, so there are none; the training is not changed by them.
    assert record.results["num_timed_steps"] == 0
    assert record.results["tokens_per_second_per_gpu"] is None
    assert record.results["memory_peak_gib"] is None
    assert any("paused to measure noise" in line for line in record.warnings)
    assert not any(row["timed"] for row in read_metrics(tmp_path / "paused"))
    if strategy == "none":
        plain = launch_tiny(tmp_path / "plain", **values)
        assert plain.noise == {}
        assert plain.results["num_timed_steps"] == 2
        losses = [[row["loss"] for row in read_metrics(tmp_path / n)] for n in ("paused", "plain")]
        assert losses[0] == losses[1]

    runs = [StoredRun(record, tmp_path / "paused", "local")]
    crossing = noise_tables.over_runs(noise_tables.crossing_table, runs)
    assert len(crossing) == 2 * 2 * 4  # points, scopes, comparisons
    assert (crossing["crossing_batch"] > 10).all()  # nowhere near document A's 1 to 2
    steps = noise_tables.gradient_table(record.noise).groupby("step")["relative_error"].sum()
    assert steps[0] != steps[3]  # the weights have moved, and the shadows with them


def test_a_run_without_unseen_text_is_refused_before_it_starts(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("once upon a time there was a fox. " * 60)
    values = {"corpus": f"text:{text}", "noise_at_steps": [0], "noise_samples": 64}
    with pytest.raises(UserError, match=r"^noise_samples: 64 sequences that training does not see"):
        launch_tiny(tmp_path / "run", sequence_length=16, **values)
    assert not (tmp_path / "run").exists()
