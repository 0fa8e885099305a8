"""What GPUs of one host fetch from each other by their copy engines.

A GEMM beside one of NCCL's kernels takes a third longer (docs/log.md, entry 69): NCCL copies by
blocks of threads, each on a multiprocessor that the GEMM does without. Fetching uses none; what is
done beside it, as barriers and adding up, does for a moment. Here a rank puts what others need into
memory that they can read, each fetches its part, and a barrier before and after says when
that is whole and when it may change. All ranks must be on one host.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fp8study.core.errors import UserError
from fp8study.model.compiling import compiled

#: By which gradients are added up or squared: 8 on each multiprocessor of an H200.
PROGRAMS = 1056
#: How long a rank waits for the others, ms, before it fails: one may be compiling meanwhile.
_PATIENCE_MS = 600_000


def unreachable() -> str:
    """Say why NCCL must do what copy engines were asked for; empty where GPUs can, or none are.

    All ranks get the same answer, as each looks at all pairs of GPUs.
    """
    if not torch.cuda.is_available():
        return ""
    number, there = dist.get_world_size(), torch.cuda.device_count()
    if there < number:
        return f"each process sees {there} of {number} GPUs"
    blind = (
        f"GPU {one} cannot read GPU {other}'s memory"
        for one, other in itertools.permutations(range(number), 2)
        if not torch.cuda.can_device_access_peer(one, other)
    )
    return next(blind, "")


class PeerMemory:
    """Memory of this GPU that the others of its host can read, as this one can read theirs."""

    def __init__(self) -> None:
        self._bytes_N: torch.Tensor | None = None
        self._idle = torch.cuda.Event()

    def room(self, num: int, dtype: torch.dtype) -> torch.Tensor:
        """Return this GPU's own part, ``dtype[num]``, once nobody uses it any more.

        A collective call where it must grow: all ranks ask for as much, in the same order.

        Raises:
            UserError: These GPUs cannot read each other's memory.
        """
        num_bytes = num * dtype.itemsize
        if self.num_bytes < num_bytes:
            self._allocate(num_bytes)
        assert self._bytes_N is not None
        torch.cuda.current_stream().wait_event(self._idle)
        return self._bytes_N[:num_bytes].view(dtype)

    def _allocate(self, num_bytes: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        torch.cuda.synchronize()  # what is replaced may still be read
        dist.barrier()
        torch.cuda.empty_cache()  # torch takes this memory from the driver, past its own cache
        group, here = dist.group.WORLD, torch.device("cuda", torch.cuda.current_device())
        assert group is not None
        try:
            self._bytes_N = symmetric.empty(num_bytes, dtype=torch.uint8, device=here)
        except RuntimeError as error:  # the driver's, of which a run knows torch's own
            if "out of memory" not in str(error):
                raise
            raise torch.OutOfMemoryError(str(error)) from error
        try:
            self._handle = symmetric.rendezvous(self._bytes_N, group.group_name)
        except RuntimeError as error:
            raise UserError(
                "collectives: 'copy_engines' needs GPUs that read each other's memory, and these "
                f"do not ({str(error).splitlines()[0]}); use nccl"
            ) from error

    @property
    def num_bytes(self) -> int:
        return 0 if self._bytes_N is None else self._bytes_N.numel()

    def fetch(self, parts: Sequence[torch.Tensor], offset: int) -> None:
        """Fill each part from the memory of the rank of its number, from an element on.

        This rank's own part is left alone. On the stream that is current, before and after which
        all ranks wait for each other.
        """
        rank, world_size = self._handle.rank, self._handle.world_size
        self._handle.barrier(timeout_ms=_PATIENCE_MS)
        for step in range(1, world_size):
            peer = (rank + step) % world_size  # all links at once
            part = parts[peer]
            part.copy_(self._handle.get_buffer(peer, part.shape, part.dtype, offset))
        self._handle.barrier(timeout_ms=_PATIENCE_MS)

    def forget_events(self) -> None:
        """Wait for no earlier use: a graph that is recorded may not, and nobody for one in it."""
        self._idle = torch.cuda.Event()

    def release(self) -> None:
        """Let the memory be used again, after what the stream that is current does now."""
        self._idle.record()


_MEMORIES: dict[str, PeerMemory] = {}


def memory(of: str) -> PeerMemory:
    """Return the memory of ``weights`` or ``gradients``, made where it is first asked for."""
    if of not in _MEMORIES:
        _MEMORIES[of] = PeerMemory()
    return _MEMORIES[of]


def forget_events() -> None:
    """Let no memory wait for what was done before; call where the GPU has done all of it."""
    for each in _MEMORIES.values():
        each.forget_events()


def held_bytes() -> int:
    """Return what all of it takes of this GPU, of which torch's allocator does not know."""
    return sum(each.num_bytes for each in _MEMORIES.values())


@torch.library.custom_op("fp8study::pull_weights", mutates_args=("whole_N",))
def _pull_weights(whole_N: torch.Tensor, own_N: torch.Tensor) -> None:
    """Gather all ranks' shards; this one's lies in its place already."""
    weights = memory("weights")
    weights.room(own_N.numel(), own_N.dtype).copy_(own_N)
    weights.fetch(whole_N.view(-1, own_N.numel()).unbind(), 0)
    weights.release()


class Squares:
    """What this rank's gradients of a step add up to, squared, as they are reduced."""

    def __init__(self) -> None:
        self._units: list[torch.Tensor] = []
        self._num_known = 0

    def next_unit(self, device: torch.device) -> torch.Tensor:
        """Return the numbers of one more unit, to be written on any stream: one a program."""
        if self._num_known == len(self._units):
            on_gpu = device.type == "cuda"
            stream = torch.cuda.default_stream(device) if on_gpu else None
            with torch.cuda.stream(stream):  # kept, and read there
                self._units.append(torch.empty(PROGRAMS if on_gpu else 1, device=device))
        self._num_known += 1
        return self._units[self._num_known - 1]

    def take(self) -> torch.Tensor | None:
        """Return their sum and forget them; None where none were reduced so."""
        known, self._num_known = self._units[: self._num_known], 0
        return torch.stack(known).sum() if known else None


squares = Squares()


@torch.library.custom_op("fp8study::pull_gradients", mutates_args=("sum_N", "squares_P"))
def _pull_gradients(
    sum_N: torch.Tensor, own_N: torch.Tensor, divisor: int, squares_P: torch.Tensor | None
) -> None:
    """Add up this rank's share of all ranks' gradients; `own_N` is the room of ``gradients``.

    With `squares_P` two ranks', and what the squares of the sum add up to.
    """
    gradients, rank = memory("gradients"), dist.get_rank()
    shares = [*own_N.view(-1, sum_N.numel()).unbind()]
    parts = [own if n == rank else torch.empty_like(own) for n, own in enumerate(shares)]
    gradients.fetch(parts, rank * sum_N.numel())
    if squares_P is None:
        compiled(add_up, dynamic=True)(parts, sum_N, divisor)
    else:
        from fp8study.model import kernels

        first_N, second_N = parts
        kernels.add_two(first_N, second_N, sum_N, squares_P, divisor)
    gradients.release()


def add_up(parts: Sequence[torch.Tensor], sum_N: torch.Tensor, divisor: int) -> None:
    """Write the sum of BF16 parts over `divisor`, in the order of the parts and in FP32."""
    total_N = parts[0].float()
    for part_N in parts[1:]:
        total_N = total_N + part_N.float()
    sum_N.copy_(total_N / divisor)
