"""Train as `fp8study.train` does, and meet with trouble at a step that is known beforehand.

TROUBLE=told:4   the last rank is told to end (SIGUSR1) once step 4 is done
TROUBLE=full:4   from then on no file may grow beyond 64 KiB, as if the disk were full
TROUBLE=stale:4  from then on no FP8 weight that is kept follows its weight

It saves as torch 2.11 does, whose stager copies once.
"""

from __future__ import annotations

import os
import resource
import signal
from typing import Any

from torch.distributed.checkpoint.staging import DefaultStager

from fp8study.model import sharding
from fp8study.train import __main__ as train
from fp8study.train import checkpoint


class Checkpoints(checkpoint.Checkpoints):
    def is_due(self, step: int) -> bool:
        trouble, _, number = os.environ["TROUBLE"].partition(":")
        if step == int(number):
            if trouble == "full":
                self.wait()
                resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
            elif trouble == "stale":
                sharding.refresh = lambda model: None  # type: ignore[assignment]
            elif os.environ.get("RANK", "0") == str(self._trainer.config.num_gpus - 1):
                os.kill(os.getpid(), signal.SIGUSR1)
        return super().is_due(step)


class StagerOfTorch211(DefaultStager):
    def _stage(self, *arguments: Any, **options: Any) -> Any:
        staged = super()._stage(*arguments, **options)
        self._state_dict_stager.close()
        return staged


if __name__ == "__main__":
    train.Checkpoints = Checkpoints  # type: ignore[misc]
    checkpoint.DefaultStager = StagerOfTorch211  # type: ignore[misc]
    train.leave(train.main())
