"""An interrupt of the training process is never lost."""

import gc
import os
import signal

import pytest

from fp8study.train.trainer import settle_garbage


class Interrupting:
    """Part of a cycle: it is finalised as garbage is collected, where Python drops exceptions."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def test_one_that_meets_a_finaliser_comes_after_it() -> None:
    gc.disable()
    try:
        Interrupting()
        with pytest.raises(KeyboardInterrupt):
            settle_garbage()
    finally:
        gc.unfreeze()
        gc.enable()
