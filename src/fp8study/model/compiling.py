"""Compilation: of layers as a run asks for it, begun when it is needed, and whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit

from fp8study.core.config import ResolvedConfig


@cache
def compiled(function: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
    """Return a function as `torch.compile` makes it, each time the same.

    For use where the function is called: as a decorator, `torch.compile` would import torch's
    compiler into every run, also those that compile nothing, which takes a second.
    """
    return torch.compile(function, dynamic=dynamic)


@contextmanager
def wholly_compiled(config: ResolvedConfig) -> Iterator[None]:
    """Stop a timed run of which torch would begin to run a part uncompiled.

    After a number of variants of one function torch compiles it no more and says so in a log only:
    the run would go on, slower, and be taken for a compiled one.

    Raises:
        RuntimeError: A limit is reached inside the block.
    """
    if not (config.compile and config.is_timed):
        yield
        return
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        try:
            yield
        except FailOnRecompileLimitHit as error:
            raise RuntimeError(
                "compile: torch has compiled too many variants of one function and would run it "
                "uncompiled from here on; train.log names it, and what differs under "
                "TORCH_LOGS=recompiles; compile=false does without"
            ) from error


def compile_layers(layers: Iterable[torch.nn.Module], config: ResolvedConfig) -> None:
    """Have each layer compiled in place when it is first called, as a run asks for."""
    for layer in layers:
        layer.compile(mode=config.compile_mode)
