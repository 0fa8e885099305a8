"""Synthetic run records for tests. None of these numbers was measured."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fp8study.core.records import RunRecord, write_record
from fp8study.core.studies import PlannedRun

VOCAB_SIZE = 128_256
CONFIG: dict[str, Any] = {
    "model": "llama-3.2-1b",
    "precision": "bf16",
    "num_gpus": 1,
    "strategy": "fsdp2",
    "sequence_length": 4096,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_steps": 60,
    "num_warmup_steps": 10,
    "learning_rate": 3e-4,
    "lr_schedule": "constant",
    "seed": 0,
    "compile": True,
    "activation_checkpointing": False,
    "master_dtype": "fp32",
    "optimizer_binding": "after_conversion",
    "fp8_all_gather": False,
    "fp8_emulate": None,
    "skip": ["lm_head"],
    "corpus": "tinystories",
    "untrained": [],
    "repeat": 0,
    "validation_sequences": 0,
    "runs_per_gpu": 1,
    "max_grad_norm": None,
}
H200 = {
    "device": "cuda",
    "gpu_name": "NVIDIA H200",
    "num_gpus_on_machine": 8,
    "gpu_memory_gib": 139.8,
    "driver": "000.00.00",
    "cpu_name": "synthetic CPU",
}
CPU = {"device": "cpu", "gpu_name": None, "cpu_name": "synthetic CPU", "num_cpus": 4}

#: Synthetic speed-ups over BF16.
SPEEDUP = {
    "bf16": 1.0,
    "fp16": 1.0,
    "fp8_tensorwise": 1.2,
    "fp8_rowwise": 0.9,
    "fp8_rowwise_gw_hp": 0.85,
}


def make_record(outside_pct: float | None = 0.0, **changes: Any) -> RunRecord:
    """Build one record; configuration fields and record fields are both given by name.

    ``results``, ``machine``, ``data`` and ``git`` are merged into the defaults. `outside_pct` of
    the parameters are in no optimizer.
    """
    config = CONFIG | {key: changes.pop(key) for key in list(changes) if key in CONFIG}
    fields: dict[str, Any] = {
        "run_id": _run_id(config),
        "study": "quick",
        "status": "completed",
        "config": config,
        "started_at": "2000-01-01T00:00:00+00:00",
        "ended_at": "2000-01-01T00:10:00+00:00",
        "versions": {"python": "3.11.0", "torch": "2.11.0", "torchao": "0.17.0"},
        "machine": dict(H200),
        "git": {"commit": "0123456789abcdef" * 2 + "01234567", "dirty": False},
        "data": {
            "corpus": config["corpus"],
            "corpus_sha256": "ab" * 32,
            "vocab_size": 8192,
            "num_train_tokens": 1_000_000,
            "num_tokens_seen": 250_000,
            "epochs": 0.25,
        },
        "model": {
            "vocab_size": VOCAB_SIZE,
            "num_parameters": 1_235_814_400,
            "flops_per_token": 8.1e9,
            "num_linear": 113,
            "num_linear_fp8": 0 if config["precision"] == "bf16" else 112,
            "parameters_outside_optimizer_pct": outside_pct,
            "parameter_dtype": config["master_dtype"],
        },
        "results": _results(config),
        "judgement": {"question": "What would a synthetic run decide?"},
    }
    for key, value in changes.items():
        merge = isinstance(value, dict) and key in fields
        fields[key] = fields[key] | value if merge else value
    if isinstance(fields["results"], dict) and isinstance(fields["config"], dict):
        fields["results"] = _step_times(fields["config"], fields["results"]) | fields["results"]
    return RunRecord(**fields)


def _step_times(config: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """Return step times as a rate says, if it is one."""
    names = ("sequence_length", "micro_batch_size", "gradient_accumulation_steps")
    tokens = math.prod(config.get(name, 1) for name in names)
    rate = results.get("tokens_per_second_per_gpu")
    if not isinstance(rate, float | int) or rate <= 0:
        return {}
    median = 1000 * tokens / rate
    shares = {"median": 1.0, "p10": 0.99, "p90": 1.01}
    return {f"step_time_ms_{name}": median * share for name, share in shares.items()}


def _run_id(config: dict[str, Any]) -> str:
    names = ("model", "precision", "num_gpus", "strategy", "master_dtype", "optimizer_binding")
    return "-".join(str(config[name]) for name in (*names, "seed"))


def _results(config: dict[str, Any]) -> dict[str, Any]:
    big = "8b" in config["model"]
    speed = (9_000.0 if big else 42_000.0) * SPEEDUP[config["precision"]]
    speed *= 1 - 0.02 * math.log2(config["num_gpus"])
    tflops = speed * (52e9 if big else 8.1e9) / 1e12
    return {
        "steps_completed": config["num_steps"],
        "startup_seconds": 20.0,
        "first_step_seconds": 30.0,
        "compile_seconds": 25.0,
        "num_timed_steps": config["num_steps"] - config["num_warmup_steps"],
        "tokens_per_second_per_gpu": speed,
        "tflops_per_gpu": tflops,
        "mfu_bf16_peak_pct": 100 * tflops / 989,
        "memory_peak_gib": (123.0 if big else 24.0) / config["num_gpus"] + 2,
        "loss_start": 11.8,
        "loss_last20_mean": 5.5,
    }


def finish(*runs: PlannedRun, **changes: Any) -> None:
    """Write the records of planned runs where the pipeline looks for them, without metrics."""
    for run in runs:
        run.run_dir.mkdir(parents=True, exist_ok=True)
        config = run.config.to_dict() | changes.get("config", {})
        record = make_record(**changes | {"config": config})
        record.results["steps_completed"] = None
        write_record(record, run.run_dir)


def loss_curve(num_steps: int, end: float, seed: int = 0) -> list[float]:
    """Fall from ln(vocabulary) to about `end`, with noise that a seed fixes."""
    rng = np.random.default_rng(seed)
    start = math.log(VOCAB_SIZE)
    step = np.arange(num_steps)
    curve = end + (start - end) * np.exp(-6 * step / num_steps)
    return (curve + rng.normal(0, 0.12, num_steps)).tolist()


def store(
    results: Path, machine: str, record: RunRecord, losses: Iterable[float | None] = ()
) -> Path:
    """Write a record and its metrics where `load_runs` finds them; return the run's folder.

    A completed or diverged run has done as many steps as it has losses; of one without, that is
    unknown. Losses of a completed one are moved by what their last 20 are off the record's.
    """
    losses = list(losses)
    if record.status in ("completed", "diverged") and "steps_completed" in record.results:
        record.results["steps_completed"] = len(losses) or None
    if record.status == "completed" and losses and None not in losses:
        off = record.results["loss_last20_mean"] - statistics.fmean(losses[-20:])
        losses = [loss + off for loss in losses]  # as the record says
    run_dir = results / machine / record.study / record.run_id
    run_dir.mkdir(parents=True)
    write_record(record, run_dir)
    lines = [
        json.dumps(
            {
                "step": step,
                "loss": loss,
                "learning_rate": 1e-5,
                "step_time_ms": 100.0,
                "tokens_per_second_per_gpu": 40_000.0,
                "tflops_per_gpu": 330.0,
                "tokens_seen": 4096 * step,
                "timed": step > 10,
            }
        )
        for step, loss in enumerate(losses, start=1)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return run_dir
