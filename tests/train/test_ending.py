"""How a training process ends, step by step, with all that it is made of replaced."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from fp8study.train import __main__ as process


@pytest.mark.parametrize("is_timed", [False, True])
def test_a_graph_is_let_go_before_nccl_ends(
    is_timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL waits for ever for a graph that holds calls of it, and only a timed run is profiled."""
    trainer = MagicMock()
    trainer.state.is_main_process = False
    trainer.found, trainer.notes = {}, []
    config = SimpleNamespace(
        model="tiny-llama", is_timed=is_timed, validation_sequences=0, num_steps=1
    )
    monkeypatch.setattr(process, "load_config", lambda path: config)
    monkeypatch.setattr(process, "Trainer", lambda *_: trainer)
    for name in ("Job", "StartupClock", "claim_gpus", "import_model_code", "look_closer"):
        monkeypatch.setattr(process, name, MagicMock())
    checkpoints = MagicMock(warnings=[])
    checkpoints.listening.return_value = nullcontext()
    checkpoints.facts.return_value = {}
    monkeypatch.setattr(process, "Checkpoints", lambda *_: checkpoints)
    monkeypatch.setattr(process, "_kept", [])

    process.run(Path("nowhere"))
    done = [name for name, _, _ in trainer.mock_calls]
    order = [done.index(each) for each in
             ("train", "launch_by_kernel", "state.destroy_process_group")]  # fmt: skip
    assert order == sorted(order)
    assert done[-1] == "state.destroy_process_group"
