"""An interrupt of the training process is never lost."""

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from fp8study.train.trainer import settle_garbage


class Interrupting:
    """Part of a cycle: it is finalised as garbage is collected, where Python drops exceptions."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)  # until the signal has come, whichever thread takes it


@pytest.fixture
def another_thread() -> Iterator[None]:
    """As torch has them: it may take a signal that is sent to the process."""
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    yield
    ended.set()
    thread.join()


@pytest.mark.usefixtures("another_thread")
def test_one_that_meets_a_finaliser_comes_after_it() -> None:
    gc.disable()
    try:
        Interrupting()
        with pytest.raises(KeyboardInterrupt):
            settle_garbage()
    finally:
        gc.unfreeze()
        gc.enable()
