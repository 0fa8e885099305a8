"""Two nodes of two processes each, played by four processes of one machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fp8study.core.config import RunConfig, make_config
from fp8study.core.records import RunRecord, read_metrics
from fp8study.run.launch import launch
from fp8study.run.machine import Machine, host_hash
from tests.train.tiny_runs import TINY

TWO_NODES = TINY | {"num_gpus": 4, "num_nodes": 2, "num_steps": 4, "num_warmup_steps": 1}


@pytest.fixture(autouse=True)
def _one_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(config: RunConfig, run_dir: Path) -> list[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*torchrun, "--nproc-per-node=4", "-m", "fp8study.train", str(run_dir)]

    monkeypatch.setattr("fp8study.run.launch.training_command", command)


Reached = dict[tuple[str, str], float]


def trained(run_dir: Path, **values: Any) -> tuple[RunRecord, list[float], Reached]:
    """The record, the loss of each step, and GiB by collective, inside and between nodes."""
    config = make_config(TWO_NODES | values)
    record = launch(config, run_dir, show=str, machine=Machine((), 4, num_nodes=2))
    gib: Reached = {}
    for call in record.instruments["step"]["communication"]:
        key = call["collective"], call["reach"]
        gib[key] = gib.get(key, 0.0) + call["gib"]
    return record, [row["loss"] for row in read_metrics(run_dir)], gib


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_shards_within_a_node_train_what_shards_over_all_do(precision: str, tmp_path: Path) -> None:
    full, expected, over_all = trained(tmp_path / "full", precision=precision)
    hybrid, losses, moved = trained(tmp_path / "hybrid", precision=precision, sharding="hybrid")
    # Sums of four in two orders: Adam turns a rounding into a step, so the first is compared best.
    assert losses[0] == expected[0]
    assert losses == pytest.approx(expected, rel=1e-3)
    # Half of the gradients, those of its own shards, are what a process reduces with its replica.
    weights_gib = 4 * hybrid.model["num_parameters"] / 2**30
    assert moved["all_reduce", "between"] == pytest.approx(weights_gib / 2, rel=0.02)
    assert over_all.get(("all_reduce", "between"), 0.0) < weights_gib / 100
    # The rest stays within a node, or crosses where shards are spread over both.
    for collective in ("all_gather", "reduce_scatter"):
        inside = moved[collective, "inside"]
        assert inside > 0
        assert inside == pytest.approx(over_all[collective, "between"], rel=0.02)
    assert {reach for _, reach in over_all} == {"between"}
    assert full.machine["nodes"] == [{"host_hash": host_hash(), "ranks": [0, 1, 2, 3]}]
    assert full.machine["network_link"]
