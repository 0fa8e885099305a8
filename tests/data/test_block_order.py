"""Which block of tokens a step sees."""

import collections

import numpy as np
import pytest

from fp8study.core.config import RunConfig, make_config
from fp8study.data.tokens import BlockOrder, batch


def test_batch_cuts_whole_blocks() -> None:
    tokens = np.arange(20, dtype=np.uint32)
    cut = batch(tokens, [2, 0], sequence_length=5)
    assert cut.dtype == np.int64
    assert cut.tolist() == [[10, 11, 12, 13, 14], [0, 1, 2, 3, 4]]


def blocks_of_step(config: RunConfig, order: BlockOrder, step: int) -> list[int]:
    return [
        block
        for micro_step in range(config.gradient_accumulation_steps)
        for rank in range(config.num_gpus)
        for block in order.block_ids(step, micro_step, rank)
    ]


def order_for(num_blocks: int, **changes: object) -> tuple[RunConfig, BlockOrder]:
    config = make_config({"sequence_length": 8, **changes})
    return config, BlockOrder(config, num_tokens=8 * num_blocks + 7)


def test_every_epoch_shows_every_block_once_in_a_new_order() -> None:
    config, order = order_for(
        24, num_gpus=2, micro_batch_size=2, gradient_accumulation_steps=3, seed=5
    )
    epochs = [blocks_of_step(config, order, 0) + blocks_of_step(config, order, 1)]
    epochs.append(blocks_of_step(config, order, 2) + blocks_of_step(config, order, 3))
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(24))
    assert epochs[0] != epochs[1] != list(range(24))
    assert order.epochs(4) == 2.0


def test_epoch_may_end_inside_a_step() -> None:
    config, order = order_for(10, micro_batch_size=4)
    seen = collections.Counter(b for step in range(5) for b in blocks_of_step(config, order, step))
    assert seen == dict.fromkeys(range(10), 2)


@pytest.mark.parametrize(
    "split",
    [
        {"num_gpus": 8},
        {"micro_batch_size": 8},
        {"gradient_accumulation_steps": 8},
        {"num_gpus": 2, "micro_batch_size": 2, "gradient_accumulation_steps": 2},
    ],
)
def test_equal_effective_batches_hold_equal_blocks(split: dict[str, int]) -> None:
    config, order = order_for(50, **split)
    whole_config, whole = order_for(50, micro_batch_size=4, gradient_accumulation_steps=2)
    for step in range(7):
        expected = blocks_of_step(whole_config, whole, step)
        assert sorted(blocks_of_step(config, order, step)) == sorted(expected)


def test_order_depends_on_the_seed_and_not_on_the_precision_or_history() -> None:
    config, order = order_for(100, seed=1)
    fp8_config, fp8 = order_for(100, seed=1, precision="fp8")
    other_config, other = order_for(100, seed=2)
    expected = [blocks_of_step(config, order, step) for step in range(100)]
    assert [blocks_of_step(fp8_config, fp8, s) for s in reversed(range(100))] == expected[::-1]
    assert [blocks_of_step(other_config, other, step) for step in range(100)] != expected
