"""Estimated minutes, held against the committed records, and what would make a run fit."""

from datetime import datetime
from pathlib import Path

import pytest

from fp8study.core.config import make_config
from fp8study.core.records import read_record
from fp8study.run.chosen.estimates import compile_minutes, held_minutes, what_would_fit
from tests.run.test_selection import H100, H200, machine

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


@pytest.mark.parametrize(
    ("model", "gib", "words"),
    [
        ("llama-3.1-8b", 79.6, "; would fit: on 4 GPUs (51 GiB); "),
        # In FP32 no such card holds the 8B that each must build.
        ("llama-3.1-8b", 23.99, "; would fit: master_dtype=bf16 "),
        ("llama-3.1-70b", 23.99, "; each GPU must first hold the whole model, 131 GiB in BF16"),
        ("llama-3.2-1b", 12, "; would fit: on 8 GPUs ("),
    ],
)
def test_what_would_fit_is_said_in_the_words_of_a_runs_fields(
    model: str, gib: float, words: str
) -> None:
    values = {"model": model, "path": "tuned", "sequence_length": 4096, "strategy": "none"}
    assert what_would_fit(make_config(values), gib).startswith(words)
    batch = make_config({"path": "tuned", "strategy": "none", "micro_batch_size": 64})
    assert "micro_batch_size=1 (" in what_would_fit(batch, 79.6)
    assert "--" not in what_would_fit(batch, gib)
    cast = {"precision": "fp8_tensorwise", "weight_cast": "each_update"}
    assert what_would_fit(make_config(values | cast), gib).startswith(words[:10])
