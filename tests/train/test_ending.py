"""How a training process ends, step by step, with all that it is made of replaced."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from fp8study.core.config import make_config, save_config
from fp8study.core.records import write_json
from fp8study.run.gpu_lease import CLAIM
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


def test_a_model_does_not_fit_only_where_the_whole_gpu_was_its_own(tmp_path: Path) -> None:
    save_config(make_config({}), tmp_path / "config.yaml")
    error = torch.OutOfMemoryError("CUDA out of memory.")
    for held, status, said in (
        ({}, "out_of_memory", "lower micro_batch_size"),
        ({"0": 41.2}, "failed", "GPU 0: other processes held 41 GiB"),
    ):
        write_json(tmp_path / CLAIM.format(0), {"indices": [0], "held_by_others_gib": held})
        found = process.explain(error, tmp_path)
        assert found.status == status
        assert said in (found.status_detail or "")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for it"),
        RuntimeError("Expected mha_graph.execute(handle, pack, pointer).is_good() to be true"),
    ],
)
def test_pages_that_were_taken_away_are_told_from_other_errors_of_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    for allocator, retries, is_told in (
        ("expandable", 1, True), ("expandable", 0, False), ("default", 1, False),
    ):  # fmt: skip
        save_config(make_config({"allocator": allocator}), tmp_path / "config.yaml")
        monkeypatch.setattr(process, "num_retries", lambda retries=retries: retries)
        detail = process.explain(error, tmp_path).status_detail or ""
        assert detail.startswith(f"RuntimeError: {str(error).splitlines()[0]}")
        assert ("set allocator=default" in detail) is is_told
