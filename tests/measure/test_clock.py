import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8study.core.config import RunConfig
from fp8study.data.tokens import PreparedData
from fp8study.measure import clock
from fp8study.measure.clock import FinishedStep, StepMeter
from fp8study.measure.flops import Work
from fp8study.run.job import Job, Outcome
from fp8study.train.summary import headline, notes_on_timing, summarise

CPU = torch.device("cpu")
CONFIG = RunConfig(
    num_gpus=2, micro_batch_size=3, gradient_accumulation_steps=2, sequence_length=128
)
RATES = (
    "step_time_ms_median", "step_time_ms_p10", "step_time_ms_p90", "tokens_per_second_per_gpu",
    "tflops_per_gpu", "mfu_bf16_peak_pct", "mfu_mixed_peak_pct", "warm_up_steps_seconds",
)  # fmt: skip
#: ms of each step; the first two are no part of the timed window.
SIX = (5000, 900, 100, 200, 300, 400)


def summary(
    *times_ms: float, config: RunConfig = CONFIG, gpus: Sequence[str] = (),
    flops_per_token: int = 10**9, fp8_share: float = 0.0, num_warm_up: int = 2, first_step: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Summarise steps that took these times; step i has loss 10 - i."""
    done = [FinishedStep(i, 10.0 - i, t) for i, t in enumerate(times_ms)]
    work = Work(flops_per_token, 0, fp8_share * flops_per_token)
    return summarise(done, config.resolved(), work, gpus, num_warm_up, first_step)


def test_each_step_comes_once_in_order_and_one_late() -> None:
    meter, loss, seen = StepMeter(CPU, num_steps=4), torch.zeros(()), []
    meter.start()
    for step in range(4):
        loss.fill_(step + 0.5)  # the same tensor again: its value must have been taken
        found = list(meter.end_step(loss))
        assert [f.step for f in found] == ([step - 1] if step else [])
        seen += found
    seen += meter.finish()
    assert [f.step for f in seen] == [0, 1, 2, 3]
    assert [f.loss for f in seen] == [0.5, 1.5, 2.5, 3.5]
    assert list(meter.finish()) == []


def test_times_are_those_of_the_steps() -> None:
    meter, seen = StepMeter(CPU, num_steps=3), []
    meter.start()
    for pause_s in (0.03, 0.0, 0.06):
        time.sleep(pause_s)
        seen += meter.end_step(torch.zeros(()))
    seen += meter.finish()
    assert seen[0].step_time_ms >= 30
    assert seen[2].step_time_ms >= 60 > seen[1].step_time_ms


def test_a_restart_leaves_a_pause_out_of_the_next_step() -> None:
    meter = StepMeter(CPU, num_steps=2)
    meter.start()
    seen = [*meter.end_step(torch.zeros(())), *meter.finish()]
    time.sleep(0.2)
    meter.restart()
    seen += [*meter.end_step(torch.zeros(())), *meter.finish()]
    assert [s.step for s in seen] == [0, 1]
    assert seen[1].step_time_ms < 200


def test_a_step_after_an_hour_is_timed_as_finely_as_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA gives the time between two events in FP32: to 0.25 ms where they are an hour apart."""
    now_ms = iter([0.0, 3.6e6, 3.6e6 + 100.1])

    class Event:
        def __init__(self) -> None:
            self.at_ms = next(now_ms)

        def synchronize(self) -> None: ...

        def elapsed_time(self, later: "Event") -> float:
            return float(np.float32(later.at_ms - self.at_ms))

    monkeypatch.setattr(clock, "_HostMark", Event)
    meter = StepMeter(CPU, num_steps=2)
    meter.start()
    seen = [*meter.end_step(torch.zeros(())), *meter.end_step(torch.zeros(())), *meter.finish()]
    assert seen[1].step_time_ms == pytest.approx(100.1, abs=0.001)


def test_a_gradient_norm_belongs_to_its_step() -> None:
    meter, seen = StepMeter(CPU, num_steps=3), []
    meter.start()
    for norm in (torch.tensor(2.5), None, torch.tensor(0.5)):
        seen += meter.end_step(torch.zeros(()), norm)
    seen += meter.finish()
    assert [s.gradient_norm for s in seen] == [2.5, None, 0.5]


def test_that_a_rank_is_told_to_end_is_read_with_its_step() -> None:
    meter = StepMeter(CPU, num_steps=9)
    meter.start(5)
    for told, known in ((False, False), (True, False), (False, True), (False, True)):
        seen = [*meter.end_step(torch.tensor(2.5), told=told)]
        assert meter.is_told is known
        assert [s.loss for s in seen] in ([], [2.5])
    assert [s.step for s in (*seen, *meter.finish())] == [7, 8]


def test_run_without_steps_yields_none() -> None:
    meter = StepMeter(CPU, num_steps=1)
    meter.start()
    assert list(meter.finish()) == []


def test_rates_are_tokens_over_the_whole_timed_window() -> None:
    found = summary(*SIX, gpus=["NVIDIA H200"])
    # 2 GPUs × 3 sequences × 2 micro-steps × 128 tokens = 1536 a step; four steps in one second.
    assert found["tokens_per_second_per_gpu"] == pytest.approx(4 * 1536 / 2)
    assert found["tflops_per_gpu"] == pytest.approx(3.072)
    assert found["mfu_bf16_peak_pct"] == pytest.approx(100 * 3.072 / 989)
    assert found["mfu_mixed_peak_pct"] == found["mfu_bf16_peak_pct"]
    assert found["num_timed_steps"] == 4
    assert found["steps_completed"] == 6


def test_the_mixed_peak_weighs_both_peaks_by_the_work_done_at_them() -> None:
    found = summary(*SIX, gpus=["NVIDIA H200"], fp8_share=0.5)
    assert found["bf16_peak_tflops"] == 989
    assert found["mixed_peak_tflops"] == pytest.approx(2 / (1 / 989 + 1 / 1979))
    assert found["mfu_mixed_peak_pct"] == pytest.approx(100 * 3.072 / found["mixed_peak_tflops"])


def test_the_headline_takes_what_instruments_saw_and_leaves_the_rest_null() -> None:
    results = summary(*SIX) | {"startup_seconds": 20.0}
    found = {
        "memory": {"peak_gib": 7.5, "num_alloc_retries": 2, "num_device_allocs": 0},
        "ceilings": {"run_tflops": 2 * results["tflops_per_gpu"]},
    }
    full = results | headline(results, found)
    assert full["mfu_achievable_pct"] == pytest.approx(50)
    # The first two steps took 5.4 s more than two usual ones.
    assert full["warm_up_seconds"] == pytest.approx(25.4)
    assert (full["memory_peak_gib"], full["energy_joule_per_token"]) == (7.5, None)
    assert ["2 times" in note for note in notes_on_timing(full)] == [True]
    empty = headline(results, {})
    assert (empty["memory_peak_gib"], empty["mfu_achievable_pct"]) == (None, None)
    assert notes_on_timing(empty) == []


def test_times_leave_out_the_warm_up() -> None:
    found = summary(5000, 900, 400, 100, 300, 200)
    assert found["step_time_ms_median"] == 250
    assert (found["step_time_ms_p10"], found["step_time_ms_p90"]) == pytest.approx((130, 370))
    assert found["first_step_seconds"] == 5
    assert found["compile_seconds"] == pytest.approx(4.75)


def test_both_quantiles_follow_one_rule() -> None:
    """Mirrored times have mirrored quantiles."""
    times = [100.0, 101.0, 103.0, 107.0, 115.0, 131.0]
    found, mirrored = summary(1, 1, *times), summary(1, 1, *(300 - t for t in times))
    assert found["step_time_ms_p10"] == pytest.approx(300 - mirrored["step_time_ms_p90"])


def test_utilisation_is_that_of_the_runs_own_gpus() -> None:
    both = summary(*SIX, gpus=["NVIDIA H200", "NVIDIA H100 PCIe"])
    assert both["bf16_peak_tflops"] == (989 + 756) / 2
    assert both["mfu_bf16_peak_pct"] == pytest.approx(100 * 3.072 / 872.5)
    assert summary(*SIX, gpus=["NVIDIA H200", "?"])["bf16_peak_tflops"] is None


def test_a_resumed_run_is_timed_by_its_own_steps() -> None:
    found = summary(9000, 1, 1, 5000, 900, 100, 200, num_warm_up=5, first_step=3)
    assert found["steps_completed"] == 7
    assert found["loss_start"] == 10
    assert (found["first_step_seconds"], found["num_timed_steps"]) == (5, 2)
    assert found["step_time_ms_median"] == 150
    assert found["compile_seconds"] == pytest.approx(4.85)
    assert found["warm_up_steps_seconds"] == pytest.approx(5.6)


def test_without_compilation_there_is_no_compile_time() -> None:
    assert summary(*SIX, config=replace(CONFIG, compile=False))["compile_seconds"] is None


def test_utilisation_of_an_unknown_gpu_is_null() -> None:
    found = summary(*SIX, gpus=["Some GPU"])
    assert found["mfu_bf16_peak_pct"] is None
    assert found["tflops_per_gpu"] > 0


def test_final_loss_is_the_mean_of_the_last_twenty() -> None:
    found = summary(*[1.0] * 30)
    assert found["loss_start"] == 10.0
    assert found["loss_last20_mean"] == pytest.approx(10.0 - sum(range(10, 30)) / 20)


@pytest.mark.parametrize("num_done", [0, 1, 2])
def test_rates_are_null_when_nothing_was_timed(num_done: int) -> None:
    found = summary(*[7.0] * num_done, gpus=["NVIDIA H200"])
    assert (found["steps_completed"], found["num_timed_steps"]) == (num_done, 0)
    assert {name: found[name] for name in RATES} == dict.fromkeys(RATES)
    assert (found["loss_start"] is None) is (num_done == 0)
    assert (found["first_step_seconds"] is None) is (num_done == 0)


def test_job_survives_the_file(tmp_path: Path) -> None:
    data = PreparedData("synthetic", "ab", "bpe-8", "cd", 8, 1000, ["note"], str(tmp_path))
    job = Job(data, gpus={3: "A", 1: "B"}, launched_at=12.5)
    job.save(tmp_path)
    assert Job.load(tmp_path) == job


def test_first_reason_to_fail_stays(tmp_path: Path) -> None:
    first = Outcome("out_of_memory", "rank 1: out of memory", results={"steps_completed": 3})
    first.save(tmp_path)
    Outcome("failed", "rank 0: peer is gone").save(tmp_path)
    assert Outcome.load(tmp_path) == first


@pytest.mark.parametrize("content", [None, "", '{"status": "compl', "[]", '{"sorry": 1}'])
def test_missing_or_broken_outcome_is_none(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "outcome.json").write_text(content)
    assert Outcome.load(tmp_path) is None
