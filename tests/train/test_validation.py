"""The validation loss: the same weights give the same number, however they are held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState

from fp8study.core.config import RunConfig, make_config
from fp8study.core.errors import UserError
from fp8study.core.presets import model_vocab_size
from fp8study.data.tokens import BlockOrder, batch, prepare
from fp8study.model.build import build_model
from fp8study.model.float8 import convert_to_float8
from fp8study.train.validation import validation_loss
from tests.train.tiny_runs import TINY, launch_tiny

SCORED = {"sequence_length": 32, "micro_batch_size": 1, "validation_sequences": 5, "profile": False}


def tiny(**changes: object) -> RunConfig:
    return make_config(TINY | SCORED | changes)


@pytest.mark.parametrize("precision", ["bf16", "fp8_tensorwise"])
def test_it_is_the_bf16_loss_of_the_held_out_blocks(precision: str) -> None:
    config = tiny(precision=precision)
    data = prepare(config, model_vocab_size(config.model))
    blocks = BlockOrder(config, data.num_train_tokens).held_out()
    model = build_model(config.model, torch.float32, torch.device("cpu"), seed=3)
    expected_model = build_model(config.model, torch.float32, torch.device("cpu"), seed=3)
    for parameter in expected_model.parameters():  # and not the buffers of the positions
        parameter.data = parameter.data.to(torch.bfloat16)
    convert_to_float8(model, config)

    ids = torch.from_numpy(batch(data.tokens(), blocks, config.sequence_length))
    with torch.no_grad():
        expected = sum(float(expected_model(input_ids=x[None], labels=x[None]).loss) for x in ids)
    expected /= 5
    found = validation_loss(config, model, data.tokens(), blocks, PartialState(cpu=True))
    assert found == pytest.approx(expected, abs=1e-6)
    with torch.no_grad():  # the model's own arithmetic: FP32, or FP8 products
        own = sum(float(model(input_ids=x[None], labels=x[None]).loss) for x in ids) / 5
    assert own != pytest.approx(expected, abs=1e-6)


def test_held_out_blocks_are_the_last_and_never_trained_on() -> None:
    config = tiny(num_steps=40, seed=1)
    order = BlockOrder(config, 32 * 20)
    assert order.held_out() == [15, 16, 17, 18, 19]
    seen = {b for step in range(40) for b in order.block_ids(step, 0, 0)}
    assert seen == set(range(15))


def test_keeping_too_much_is_refused_by_name() -> None:
    with pytest.raises(
        UserError, match=r"^validation_sequences: 1000000 of the corpus's \d+ leave"
    ):
        prepare(tiny(validation_sequences=1_000_000), 2048)


@pytest.mark.slow
def test_sharded_fp8_weights_are_scored_as_plain_ones(tmp_path: Path) -> None:
    values: dict[str, Any] = SCORED | {"precision": "fp8_tensorwise"}
    sharded = launch_tiny(tmp_path / "sharded", num_gpus=2, **values)
    alone = {"strategy": "none", "gradient_accumulation_steps": 2}
    plain = launch_tiny(tmp_path / "plain", **values | alone)
    without = launch_tiny(tmp_path / "without", **values | {"validation_sequences": 0})
    losses = [record.results["validation_loss"] for record in (sharded, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)  # as far as FSDP2 and autocast differ
    # Shards in a wrong order are no model.
    assert 0 < losses[0] < 0.9 * sharded.results["loss_start"]
    assert "validation_loss" not in without.results
    assert sharded.data["epochs"] > without.data["epochs"]


@pytest.mark.slow
def test_a_run_that_shares_its_gpu_has_losses_but_no_timings(tmp_path: Path) -> None:
    shared = launch_tiny(tmp_path / "shared", **SCORED | {"runs_per_gpu": 2, "profile": True})
    assert shared.status == "completed"
    assert shared.results["loss_last20_mean"] > 0
    assert shared.results["validation_loss"] > 0
    assert shared.results["num_timed_steps"] == 0
    assert shared.results["tokens_per_second_per_gpu"] is None
    assert set(shared.instruments) == {"startup"}
    assert any("shared" in line for line in shared.warnings)
