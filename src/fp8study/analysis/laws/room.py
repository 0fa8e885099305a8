"""Whether a run fits its GPUs, by the law of memory, and the largest batch that does."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any

from fp8study.analysis.laws import memory
from fp8study.analysis.laws.shape import ModelShape
from fp8study.core.config import ResolvedConfig, RunConfig

#: Of a GPU's memory, what is left free.
HEADROOM = 0.1
#: What makes room for a larger batch and leaves the training as it is, the cheapest first.
ROOMIER: tuple[dict[str, Any], ...] = (
    {}, {"reshard_after_forward": True}, {"activation_checkpointing": True},
    {"reshard_after_forward": True, "activation_checkpointing": True},
)  # fmt: skip


def has_room(gib: float, capacity: float) -> bool:
    """Whether so much leaves `HEADROOM` of a GPU's memory free."""
    return gib <= (1 - HEADROOM) * capacity


def fits(config: ResolvedConfig, shape: ModelShape, capacity: float) -> bool:
    """Return whether a run has room on GPUs of so many GiB, once each holds its share."""
    return has_room(memory.predicted_memory(config, shape).held, capacity)


def largest_batch_of(
    ways: Sequence[RunConfig], shape: ModelShape, capacity: float, most_tokens: int
) -> int:
    """Return the largest batch at which all of these runs fit, as `largest_batch` has it.

    Up to so many tokens a pass. Each GPU need not hold the whole model first.
    """
    most = max(1, most_tokens // ways[0].sequence_length)
    return min(largest_batch(way, shape, capacity, most, builds_whole=False) for way in ways)


def largest_batch(
    config: RunConfig, shape: ModelShape, capacity_gib: float, most: int, builds_whole: bool = True
) -> int:
    """Return the largest micro batch whose peak leaves `HEADROOM` of the GPU free; 0: none does.

    `capacity_gib` is the GPU's memory as its driver reports it (a record's ``gpu_memory_gib``).
    What the allocator reserves besides does not count: it gives that back before it runs out,
    unless a CUDA graph holds it. To give back segments that grow can break a run of FSDP2
    (docs/log.md, 98), which this does not know.
    `builds_whole`: each GPU must first hold the whole model, as in a run of ours.
    """

    def lacks_room(batch: int) -> bool:
        tried = dataclasses.replace(config, micro_batch_size=batch)
        law = memory.predicted_memory(tried, shape)
        return not has_room(law.needed if builds_whole else law.held, capacity_gib)

    return bisect.bisect_left(range(1, most + 1), True, key=lacks_room)


def with_batch(config: ResolvedConfig, micro_batch_size: int) -> dict[str, Any]:
    """Return the changes to a batch a GPU; empty where passes do not come out even.

    A step of several passes keeps its tokens, by as many more or fewer of them.
    """
    passes = config.gradient_accumulation_steps
    if passes == 1:
        return {"micro_batch_size": micro_batch_size}
    passes, rest = divmod(passes * config.micro_batch_size, micro_batch_size)
    if rest:
        return {}
    return {"micro_batch_size": micro_batch_size, "gradient_accumulation_steps": passes}


def largest_step(
    config: ResolvedConfig, shape: ModelShape, capacity: float, most_tokens: int
) -> int:
    """Return the largest batch that fits and with which a step of several passes comes out even."""
    most = largest_batch_of([config], shape, capacity, most_tokens)
    return next((n for n in range(most, 0, -1) if with_batch(config, n)), 0)
