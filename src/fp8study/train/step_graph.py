"""A step recorded as one CUDA graph, so that the host launches one thing a step, not thousands.

A replayed graph reads and writes the memory that it was recorded with, and does nothing of what
Python does beside launching. So what changes from step to step reaches it in memory: its tokens,
and AdamW's numbers. https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fp8study.core.errors import UserError, one_line
from fp8study.core.record_shape import INSTEAD
from fp8study.model.fsdp import peers, pooling
from fp8study.model.local import unwrapped
from fp8study.model.optimizer import OnePassAdamW

#: A step's loss on this rank and, now and then, the norm of its gradients.
Results = tuple[torch.Tensor, torch.Tensor | None]
#: Takes tokens, int64[B, T] where the model is, and updates its weights.
Step = Callable[[torch.Tensor], Results]
#: Steps launched kernel by kernel first: they compile, load kernels and make AdamW's averages.
STEPS_BEFORE = 3


class NotRecorded(UserError):
    """A step does what no graph can hold. To record launches nothing, so no number has changed."""

    def __init__(self, why: str) -> None:
        super().__init__(f"step_launch: 'as_graph' cannot record this step ({why}); use by_kernel")
        self.why = why


class StepGraph:
    """Steps of one kind: the first ones kernel by kernel, later ones as a graph.

    Where there is no GPU a later step is done again as it would be recorded.
    """

    def __init__(self, step: Step, model: torch.nn.Module, optimizer: OnePassAdamW) -> None:
        self._step, self._model, self._optimizer = step, model, optimizer
        device = next(model.parameters()).device
        # A graph cannot be recorded on the default one.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        pooling.compute_on(self._stream)
        self._num_steps = 0
        self._again: Callable[[], None] | None = None

    @property
    def is_due(self) -> bool:
        """Whether enough steps were done kernel by kernel."""
        return self._num_steps >= STEPS_BEFORE

    @contextmanager
    def by_kernel(self) -> Iterator[None]:
        """Do a step kernel by kernel, on the stream on which later ones are recorded.

        Autograd and FSDP2 remember the streams that they have seen.
        """
        self._num_steps += 1
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def replay(self, ids_BT: torch.Tensor) -> Results:
        """Do a step on these tokens; the results hold until the next one.

        Raises:
            NotRecorded: Something in the step cannot be.
            UserError: It moves what the next one would look for.
        """
        if self._again is None:
            before = places(self._model)
            self._ids_BT = ids_BT.clone()
            self._optimizer.be_recorded()
            self._again = self._do if self._stream is None else self._recorded()
            self._replay(self._again, ids_BT)
            if places(self._model) != before:
                raise UserError(
                    "step_launch: 'as_graph' would not find what a step of this run moves; use "
                    "by_kernel"
                )
        else:
            self._replay(self._again, ids_BT)
        return self._results

    def let_go(self) -> None:
        """Free the graph; later steps are to be done without it."""
        self._again = None
        pooling.compute_on(None)
        self._optimizer.be_recorded(False)

    def taken_back(self, error: NotRecorded) -> str:
        """Let go, as if no step had been recorded; return what a run's record says of it.

        Raises:
            NotRecorded: GPUs are several, and may wait for each other in the middle of the step.
        """
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise error
        self.let_go()
        self._optimizer.zero_grad()
        instead = INSTEAD.format("step_launch", "by_kernel")
        return f"step_launch: a graph cannot hold this step ({error.why}): {instead}"

    def _replay(self, again: Callable[[], None], ids_BT: torch.Tensor) -> None:
        self._ids_BT.copy_(ids_BT)
        self._optimizer.count()
        again()

    def _do(self) -> None:
        self._results = self._step(self._ids_BT)

    def _recorded(self) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Of other threads nothing is forbidden meanwhile: NCCL's asks for its events.
        recording = torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local")
        peers.forget_events()
        cause: RuntimeError | None = None
        try:
            with recording:
                try:
                    self._do()
                except RuntimeError as error:  # to leave the recording fails, too
                    cause = error
                    raise
        except RuntimeError as error:
            cause = cause or error
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            raise NotRecorded(one_line(cause)) from cause
        peers.forget_events()
        return graph.replay


def places(model: torch.nn.Module) -> list[int]:
    """Return where a model's numbers lie: weights, or shards with what they keep, and buffers."""
    tensors = [*model.buffers()]
    for parameter in model.parameters():
        own = vars(getattr(parameter, "_local_tensor", parameter)).values()
        tensors += [unwrapped(parameter), *(kept for kept in own if torch.is_tensor(kept))]
    return [tensor.data_ptr() for tensor in tensors]
