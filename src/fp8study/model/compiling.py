"""That a run which asks for compilation is compiled as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit

from fp8study.core.config import ResolvedConfig


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
