"""Going on from a checkpoint takes the run's own memory, and one weight's more."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.profiler import ProfilerActivity, profile

from fp8study.core.checkpoints import place_of
from fp8study.core.config import make_config
from fp8study.train.checkpoint import Checkpoints, make_states

LAYERS, WIDTH = 24, 256
LAYER_BYTES = 4 * WIDTH * WIDTH
WEIGHTS_BYTES = LAYERS * LAYER_BYTES


def trainer_of(run_dir: Path, first_step: int) -> Any:
    """What a run's checkpoints need of its trainer, of a model that one CPU trains at once."""
    layers = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
    model = torch.nn.Sequential(*layers)
    config = make_config({"strategy": "none", "checkpoint_every": 1, "num_steps": 20}).resolved()
    data = SimpleNamespace(corpus_sha256="", tokenizer_sha256="")
    start = str(place_of(run_dir, first_step)) if first_step else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return SimpleNamespace(
        config=config, model=model, device=torch.device("cpu"), optimizer=optimizer,
        job=SimpleNamespace(first_step=first_step, start_from=start, data=data),
        pace=SimpleNamespace(num_steps=20), steps=[], validation_losses={}, audit={},
        model_facts={},
        state=SimpleNamespace(is_main_process=True, process_index=0),
        updates=SimpleNamespace(after=lambda: None, adamw=optimizer, scaler_state=dict),
    )  # fmt: skip


def peak_bytes(recorded: profile, place: Path) -> int:
    """What was allocated at most while a profile was taken, more than at its start."""
    recorded.export_chrome_trace(str(place))
    events = json.loads(place.read_text())["traceEvents"]
    memory = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    totals = [event["args"]["Total Allocated"] for event in memory]
    return int(max(totals) - totals[0] + memory[0]["args"]["Bytes"])


def watching() -> profile:
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def test_a_run_goes_on_without_gradients_of_all_weights(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").touch()
    before = trainer_of(run_dir, 0)
    before.model_facts = {"init_sha256": "ab" * 32, "num_parameters": 1}
    before.model(torch.randn(4, WIDTH)).sum().backward()
    before.optimizer.step()
    saving = Checkpoints(before, run_dir)
    saving.save(1)
    saving.wait()
    assert not saving.warnings
    after = trainer_of(run_dir, 1)
    with watching() as recorded:
        Checkpoints(after, run_dir)
    # Two states a weight are there to stay; loading takes a copy of one tensor at a time.
    peak = peak_bytes(recorded, tmp_path / "trace.json")
    assert 2 * WEIGHTS_BYTES <= peak < 2 * WEIGHTS_BYTES + 4 * LAYER_BYTES
    assert after.model_facts == {"init_sha256": "ab" * 32}  # what it began with
    for ours, theirs in zip(after.model.parameters(), before.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        for name, state in before.optimizer.state[theirs].items():
            assert torch.equal(after.optimizer.state[ours][name], state), name


@pytest.mark.parametrize("makes", [True, False])
def test_states_are_made_weight_by_weight(makes: bool, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, 0)
    weights = [weight.detach().clone() for weight in trainer.model.parameters()]
    with watching() as recorded:
        if makes:
            make_states(trainer.optimizer)
        get_optimizer_state_dict(trainer.model, trainer.optimizer)
    least = 2 * WEIGHTS_BYTES + (LAYER_BYTES if makes else WEIGHTS_BYTES)
    peak = peak_bytes(recorded, tmp_path / "trace.json")
    assert peak == pytest.approx(least, rel=0.02)  # torch's own way takes every gradient as well
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [1e-3]
    for weight, own in zip(trainer.model.parameters(), weights, strict=True):
        assert torch.equal(weight, own) and weight.grad is None
