"""The time to a loss that FP8 saves, and its gap by batch at one loss."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fp8study.analysis.matched import LEAST_POINTS, equal_time_table, matched_loss_table, steps_to
from fp8study.core.records import RunRecord
from tests.claim_factories import FP8, Frames, run


def timed(precision: str, seed: int, step_ms: float, ends: list[float]) -> RunRecord:
    """A run of 100 steps, whose first compiles; held-out losses fall straight between `ends`."""
    curve = {"step": [*range(1, 101)], "step_time_ms": [60_000.0] + [step_ms] * 99}
    at = [25 * (n + 1) for n in range(len(ends))]
    steps = [round(100 * (n + 1) / LEAST_POINTS) for n in range(LEAST_POINTS)]
    scored = [{"step": step, "loss": float(np.interp(step, at, ends))} for step in steps]
    return run(precision, seed=seed, study="check-loss", curve=curve,
               results={"validation_losses": scored, "loss_last20_mean": ends[-1]})  # fmt: skip


def races(*fp8_ends: list[float], step_ms: float = 80.0) -> Frames:
    """Seeds whose BF16 run takes 100 ms a step."""
    return Frames(
        record
        for seed, ends in enumerate(fp8_ends)
        for record in (timed("bf16", seed, 100.0, [6, 5, 4, 3]), timed(FP8[0], seed, step_ms, ends))
    )


def raced(frames: Frames) -> Any:
    (row,) = equal_time_table(frames.stored, frames.runs, frames.metrics).to_dict("records")
    return row


def test_equal_curves_save_what_a_step_saves() -> None:
    row = raced(races(*[[6, 5, 4, 3]] * 3))
    assert (row["num_pairs"], row["loss"]) == (3, 3)
    assert (row["seconds_bf16"], row["seconds"]) == pytest.approx((10, 8))
    assert row["saved_pct"] == pytest.approx(20)
    assert len(row["run_ids"].split()) == 6


def test_a_loss_that_falls_slower_takes_back_what_is_saved() -> None:
    # FP8 ends at 3.5, where BF16 was half way between its last two points.
    row = raced(races(*[[6, 5, 4, 3.5]] * 3))
    assert row["loss"] == 3.5
    assert row["seconds_bf16"] == pytest.approx(8.75)
    assert row["saved_pct"] == pytest.approx(100 * (1 - 8 / 8.75))
    slower = raced(races(*[[6, 5, 4, 3.5]] * 3, step_ms=100.0))
    assert slower["saved_pct"] < 0


def test_the_interval_is_over_seeds_and_two_have_none() -> None:
    row = raced(races([6, 5, 4, 3], [6, 5, 4, 3.1], [6, 5, 4, 3.2]))
    assert row["low_95"] < row["saved_pct"] < row["high_95"]
    assert math.isnan(raced(races([6, 5, 4, 3], [6, 5, 4, 3]))["low_95"])


def test_a_run_that_shares_its_gpu_or_scores_seldom_has_no_race() -> None:
    frames = races([6, 5, 4, 3])
    for stored in frames.stored:
        stored.record.config["runs_per_gpu"] = 2
    assert equal_time_table(frames.stored, frames.runs, frames.metrics).empty
    frames = races([6, 5, 4, 3])
    for stored in frames.stored:
        del stored.record.results["validation_losses"][0]
    assert equal_time_table(frames.stored, frames.runs, frames.metrics).empty


def test_a_loss_is_reached_between_points_or_never() -> None:
    assert steps_to([10, 20], [5, 3], 4) == 15
    assert steps_to([10, 20], [5, 3], 6) == 10
    assert math.isnan(steps_to([10, 20], [5, 3], 2))


def grown(slope: float, late: float = 0.0) -> Frames:
    """Batches 1, 4 and 16 by three seeds: the gap grows with each doubling, or with progress.

    A larger batch sees more text in a step, and comes further.
    """
    records = []
    for seed, batch in ((seed, batch) for seed in range(3) for batch in (1, 4, 16)):
        step = np.arange(1, 401)
        loss = 9 - np.log(1 + step * batch**0.5) + 0.01 * seed
        gap = slope * math.log2(batch) + late * (9 - loss) + 0.001 * seed
        for precision, values in (("bf16", loss), (FP8[0], loss * (1 + gap / 100))):
            curve = {"step": step.tolist(), "loss": values.tolist()}
            ended = {"loss_last20_mean": float(values[-20:].mean()), "steps_completed": 400}
            records.append(run(precision, seed=seed, study="batch-growth", num_steps=400,
                               micro_batch_size=batch, results=ended, curve=curve))  # fmt: skip
    return Frames(records)


def test_a_gap_that_grows_with_the_batch_is_told_from_one_that_grows_with_progress() -> None:
    frames = grown(slope=0.05)
    table = matched_loss_table(frames.metrics, frames.runs)
    assert table["effective_batch"].tolist() == [1, 4, 16]
    assert table["slope_points"].to_list() == pytest.approx([0.05] * 3, abs=1e-3)
    assert table["gap_pct"].to_list() == pytest.approx([0.001, 0.101, 0.201], abs=1e-3)
    assert table["step"].is_monotonic_decreasing
    assert table["num_pairs"].tolist() == [3, 3, 3]
    confounded = grown(slope=0.0, late=0.02)
    late = matched_loss_table(confounded.metrics, confounded.runs)
    # At each run's own end the gaps are 0.03 points apart; at one loss they are alike.
    assert late["slope_points"].abs().max() < 1e-3
    assert (late["slope_low_95"] <= late["slope_points"]).all()
