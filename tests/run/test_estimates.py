"""Estimated minutes, held against the committed records, and what would make a run fit."""

import dataclasses
import re
import statistics
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from fp8study.core.config import FIELD_NAMES, make_config
from fp8study.core.errors import UserError
from fp8study.core.records import read_record
from fp8study.core.studies import expanded
from fp8study.run.chosen.estimates import (
    check_memory,
    compile_minutes,
    held_minutes,
    minutes_on_cpu,
    step_seconds,
    what_would_fit,
)
from fp8study.run.machine import Machine
from fp8study.run.plan import impossible_runs, plan_text
from tests.checkout import committed_runs
from tests.machines import H100, H200, UNKNOWN, machine
from tests.run.test_slurm import CLUSTER

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
STUDIES = {"h200x2/shapes": H200, "h200x2/all-gather": H200, "h200x2/machine": H200,
           "h100x1/machine": H100, "h100x1/machine-2": H100}  # fmt: skip


@pytest.mark.parametrize("name", STUDIES)
def test_a_run_takes_as_long_as_was_estimated_or_less(name: str) -> None:
    there = machine(STUDIES[name])
    estimated, held = [], []
    for path in (REFERENCE / name).glob("*/run.json"):
        record = read_record(path)
        config, startup = make_config(record.config), record.instruments["startup"]
        begun, ended = map(datetime.fromisoformat, (record.started_at, record.ended_at))
        waited = sum(startup[f"{what}_seconds"] for what in ("launch", "imports", "gpu_wait"))
        held.append(((ended - begun).total_seconds() - waited) / 60)
        is_first = not (config.repeat or config.seed)
        estimated.append(held_minutes(config, there) + is_first * compile_minutes(config))
    ratios = [e / h for e, h in zip(estimated, held, strict=True)]
    assert len(ratios) > 8
    assert min(ratios) > 0.8
    assert max(ratios) < 1.5
    assert 1.0 < sum(estimated) / sum(held) < 1.2  # so that a budget is kept, and used


@pytest.mark.parametrize("precision", ["bf16", "fp8_tensorwise"])
def test_steps_take_what_the_law_says_in_either_precision(precision: str) -> None:
    """A share of the GPU's peak said 0.39 to 1.66 times what they took, the same in both."""
    ratios = []
    for run in committed_runs():
        config, took = run.record.config, run.record.results.get("step_time_ms_median")
        if run.machine_label == "h200x4" and config["precision"] == precision and took:
            known = {name: value for name, value in config.items() if name in FIELD_NAMES}
            ratios.append(1000 * step_seconds(make_config(known), machine(H200)) / took)
    assert len(ratios) > 50
    assert 0.9 < statistics.median(ratios) < 1.1
    assert statistics.mean(0.75 < ratio < 1.25 for ratio in ratios) > 0.9


def test_steps_of_which_no_law_is_known_are_estimated_by_their_flops() -> None:
    eager, compiled = (make_config({"model": "llama-3.2-1b", "compile": how}).resolved()
                       for how in (False, True))  # fmt: skip
    assert step_seconds(eager, machine(H200)) > 0
    assert step_seconds(eager, machine(H200)) != step_seconds(compiled, machine(H200))
    assert step_seconds(compiled, machine(UNKNOWN)) == step_seconds(eager, machine(UNKNOWN))


@pytest.mark.parametrize(
    ("model", "gib", "words"),
    [
        ("llama-3.1-8b", 79.6, "; would fit: reshard_after_forward=true on 2 GPUs (69 GiB); "),
        # In FP32 no such card holds the 8B that each must build.
        ("llama-3.1-8b", 23.99, "; would fit: master_dtype=bf16 "),
        ("llama-3.1-70b", 23.99, "; each GPU must first hold the whole model, 131 GiB in BF16"),
        (
            "llama-3.2-1b",
            12,
            "; would fit: reshard_after_forward=true activation_checkpointing=true on 2",
        ),
    ],
)
def test_what_would_fit_is_said_in_the_words_of_a_runs_fields(
    model: str, gib: float, words: str
) -> None:
    values = {"model": model, "path": "tuned", "sequence_length": 4096, "strategy": "none"}
    assert what_would_fit(make_config(values), gib).startswith(words)
    batch = make_config({"path": "tuned", "strategy": "none", "micro_batch_size": 64})
    assert "micro_batch_size=10 (" in what_would_fit(batch, 79.6)
    tuned = {"model": "llama-3.1-8b", "path": "tuned", "strategy": "none", "micro_batch_size": 2}
    fp8 = what_would_fit(make_config(tuned | {"precision": "fp8"}), 133)
    assert fp8.startswith("; would fit: update_kernel=torch (119 GiB); ")
    assert "update_kernel" not in what_would_fit(make_config(tuned), 133)
    assert "--" not in what_would_fit(batch, gib)
    cast = {"precision": "fp8_tensorwise", "weight_cast": "each_update"}
    assert what_would_fit(make_config(values | cast), gib).startswith(words[:10])


@pytest.mark.parametrize(
    ("values", "gib"),
    [
        ({"num_gpus": 4, "max_grad_norm": 1.0}, 44.99),  # gradients share memory
        ({"strategy": "none", "update_kernel": "one_pass", "gradient_dtype": "compute"}, 79.6),
    ],
)
def test_masters_in_bf16_would_fit_whatever_needs_fp32_ones_now(
    values: dict[str, Any], gib: float
) -> None:
    config = make_config(values | {"model": "llama-3.1-8b", "path": "tuned"})
    for there in (23.99, gib):  # less than the whole model, and less than the run
        assert "master_dtype=bf16" in what_would_fit(config, there)


def test_a_laptop_is_told_what_it_lacks_memory_and_time_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fp8study.run.chosen.estimates.memory_gib", lambda: 24.0)
    laptop = Machine((), num_cpus=4)
    content = {
        "question": "?",
        "base": {"sequence_length": 512},
        "arms": [{"model": "tiny-llama", "num_gpus": 2}, {"model": "llama-3.2-1b"},
                 {"model": "llama-3.1-8b"}],
        "minutes_per_run": 2,
    }  # fmt: skip
    study = expanded("s", content, "s")
    tiny, small, large = study.runs
    (reason,) = (impossible := impossible_runs(study, laptop)).values()
    assert list(impossible) == [large]
    assert re.match(r"memory: llama-3.1-8b at batch 1 needs 1\d\d GiB of this host's 24, ", reason)
    assert not impossible_runs(study, laptop, CLUSTER)  # whose hosts are others
    assert minutes_on_cpu(tiny.config, laptop) < 0.1
    minutes = minutes_on_cpu(small.config, laptop)
    assert minutes == pytest.approx(100 * 6 * 1.24e9 * 512 / (4 * 0.1e12) / 60, rel=0.05)
    timed = dataclasses.replace(tiny.config, timed_seconds=12.0, num_steps=20_000)
    assert minutes_on_cpu(timed, laptop) == pytest.approx(24 / 60, rel=0.05)  # warm-up and window
    check_memory(dataclasses.replace(small.config, runs_per_gpu=4), laptop)  # no GPU is shared
    with pytest.raises(UserError, match=r"^memory: 2 runs of llama-3.2-1b .*; set runs_per_gpu=1"):
        check_memory(
            dataclasses.replace(small.config, runs_per_gpu=2, micro_batch_size=70), machine(H200)
        )
    said = re.search(r"2 to do, about (\d+) min", plan_text(study, laptop))
    assert said and int(said[1]) == pytest.approx(minutes, abs=1)


def test_without_gpus_each_process_counts_and_what_would_help_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fp8study.run.chosen.estimates.memory_gib", lambda: 24.0)
    laptop = Machine((), num_cpus=4)
    values = {"model": "llama-3.2-1b", "sequence_length": 512, "path": "tuned", "precision": "fp8"}
    check_memory(make_config(values).resolved(), laptop)
    with pytest.raises(UserError, match="model=tiny-llama"):
        check_memory(make_config(values | {"num_gpus": 2}).resolved(), laptop)
    large = make_config({"model": "tiny-llama", "micro_batch_size": 10**6}).resolved()
    with pytest.raises(UserError, match="set a smaller micro_batch_size or sequence_length, or"):
        check_memory(large, laptop)
