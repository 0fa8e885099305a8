"""Train as `fp8study.train` does, and meet with trouble at a step that is known beforehand.

TROUBLE=told:4      the last rank is told to end (SIGUSR1) once step 4 is done
TROUBLE=full:4      from then on no file may grow beyond 64 KiB, as if the disk were full
TROUBLE=stale:4     from then on no FP8 weight that is kept follows its weight
TROUBLE=overflow:4  from then on FP16's gradients overflow
TROUBLE=graph:0     no step can be recorded as a graph, as its end shows
TROUBLE=scale:24    FP16 begins with a loss scale of 2 to that power

Several, as "told:4 scale:24", may come together.

It saves as torch 2.11 does, whose stager copies once.
"""

from __future__ import annotations

import os
import re
import resource
import signal
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager

from fp8study.model import sharding
from fp8study.train import __main__ as train
from fp8study.train import checkpoint, step_graph

TROUBLES = {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", os.environ["TROUBLE"])}


class Checkpoints(checkpoint.Checkpoints):
    def is_due(self, step: int) -> bool:
        now = {trouble for trouble, number in TROUBLES.items() if number == step}
        if "full" in now:
            self.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
        if "stale" in now:
            sharding.refresh = lambda model: None  # type: ignore[assignment]
        if "overflow" in now:
            self._trainer.updates._scaler.update(2.0**60)
        is_last = os.environ.get("RANK", "0") == str(self._trainer.config.num_gpus - 1)
        if "told" in now and is_last:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().is_due(step)


class StagerOfTorch211(DefaultStager):
    def _stage(self, *arguments: Any, **options: Any) -> Any:
        staged = super()._stage(*arguments, **options)
        self._state_dict_stager.close()
        return staged


def cannot_be_recorded(graph: step_graph.StepGraph, ids_BT: torch.Tensor) -> None:
    graph._optimizer.be_recorded()
    graph._model(input_ids=ids_BT, labels=ids_BT).loss.backward()
    raise step_graph.NotRecorded("operation not permitted")


if __name__ == "__main__":
    if "graph" in TROUBLES:
        step_graph.StepGraph.replay = cannot_be_recorded  # type: ignore[assignment]
    if "scale" in TROUBLES:
        scaler = partial(torch.amp.GradScaler, init_scale=2.0 ** TROUBLES["scale"])
        torch.amp.GradScaler = scaler  # type: ignore[misc]
    train.Checkpoints = Checkpoints  # type: ignore[misc]
    checkpoint.DefaultStager = StagerOfTorch211  # type: ignore[misc]
    train.leave(train.main())
