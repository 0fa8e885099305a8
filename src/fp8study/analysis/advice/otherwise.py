"""Another way to train the same model, of which more is known than of what is asked about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from fp8study.analysis.advice.answer import Advice
from fp8study.analysis.advice.figures import Quantity
from fp8study.analysis.decision import CHECK, FP8
from fp8study.analysis.laws.nearby import Changed, changed, with_batch
from fp8study.analysis.laws.room import fits
from fp8study.analysis.laws.shape import ModelShape
from fp8study.core.config import ResolvedConfig
from fp8study.core.errors import UserError

#: What makes room for a larger batch and leaves the training as it is, the cheapest first.
_ROOMIER: tuple[dict[str, Any], ...] = (
    {}, {"reshard_after_forward": True}, {"activation_checkpointing": True},
)  # fmt: skip


def decided_with(
    config: ResolvedConfig,
    shape: ModelShape,
    capacity: float,
    most_tokens: int,
    decide: Callable[[ResolvedConfig], ResolvedConfig],
    answer: Callable[[ResolvedConfig], Advice],
) -> tuple[Changed, Quantity] | None:
    """Return a larger batch at which FP8 surely pays and neither precision makes fewer tokens/s.

    Args:
        config: The BF16 run whose answer is open.
        shape: Its model's.
        capacity: Of a GPU, GiB.
        most_tokens: Of a pass on one GPU.
        decide: Decides anew what the path makes of a run with another batch.
        answer: Answers for another BF16 run.

    Returns:
        The fields that are changed, the BF16 run then, and how many tokens/s more than as asked its
        FP8 makes, %; and FP8's lead there.
    """
    asked = _rates(answer(config))
    for changes, larger in _larger(config, shape, capacity, most_tokens):
        found = answer(way := decide(larger))
        if found.verdict.action in (FP8, CHECK):
            faster = [rate / before for rate, before in zip(_rates(found), asked, strict=True)]
            if min(faster) >= 1:
                return (changes, way, 100 * (faster[1] - 1)), found.verdict.lead_pct
    return None


def _rates(advice: Advice) -> list[float]:
    """Return the tokens/s of BF16, and of the FP8 that an advice speaks of."""
    return [o.tokens_per_second_per_gpu.value for o in (advice.options[0], advice.chosen)]


def _larger(
    config: ResolvedConfig, shape: ModelShape, capacity: float, most_tokens: int
) -> Iterator[tuple[dict[str, Any], ResolvedConfig]]:
    """Yield twice the batch, four times …, each with the first of `_ROOMIER` by which it fits.

    Where a step has several passes it has fewer then, as long as they come out even.
    """
    batch = 2 * config.micro_batch_size
    while batch * config.sequence_length <= most_tokens and (resized := with_batch(config, batch)):
        for roomier in _ROOMIER:
            changes = resized | {
                name: value for name, value in roomier.items() if getattr(config, name) != value
            }
            with suppress(UserError):  # refused on so many GPUs
                way = changed(config, changes)
                if fits(way, shape, capacity):
                    yield changes, way
                    break
        batch *= 2
