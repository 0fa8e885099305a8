"""Which GPUs a run may use, whose turn it is, and how a training process takes them.

Snakemake counts GPUs but does not say which; two runs that each want one would both take the
first. So a run leases its GPUs with lock files. The first of its training processes holds them
open: the operating system gives the GPUs back when that process is gone, however it ended.

It takes them as late as it can: after its imports, before it touches CUDA. What a run does before
it needs a GPU (a notebook's kernel, imports, the model's code) takes longer than many a short run
trains. So the pipeline starts more runs than there are GPUs, and each gets as far as here while
others train.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fp8study.core.config import RunConfig
from fp8study.core.errors import UserError
from fp8study.core.files import locked, open_lock, try_lock
from fp8study.core.records import write_json
from fp8study.run.job import Job
from fp8study.run.machine import driver, visible_gpus

#: A GPU is leased in this many places: a run takes all of them, or its part where it shares.
PLACES = 8

#: Where the first of a run's processes on a node, by its number, says which GPUs it holds.
CLAIM = "gpus.{}.json"
_POLL_SECONDS = 0.05

#: What others may hold of a GPU, GiB, without a word: a desktop does; who trains holds more.
UNNOTICED_GIB = 2.0
#: A run that ends gives back its lease a moment before its memory.
_LINGERS_SECONDS = 5.0

#: Leases of this process, kept until it ends.
_held = ExitStack()


class Lease(NamedTuple):
    """GPUs held for one run, as long as the files are open."""

    indices: tuple[int, ...]
    file_descriptors: tuple[int, ...]


def lock_dir() -> Path:
    """Return the folder of the lock files: ``$FP8STUDY_LOCKS``, or one shared by the machine."""
    chosen = os.environ.get("FP8STUDY_LOCKS")
    return Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"fp8study-{os.getuid()}"


@dataclass(frozen=True)
class _Wish:
    """What somebody who waits is waiting for."""

    num_gpus: int
    indices: tuple[int, ...]
    runs_per_gpu: int

    @property
    def places(self) -> int:
        """Places wanted on each GPU."""
        return PLACES // self.runs_per_gpu

    @property
    def has_no_choice(self) -> bool:
        """Whether it wants all of the GPUs that it names."""
        return self.num_gpus == len(self.indices)

    def take(self, free: dict[int, int]) -> list[int]:
        """Take GPUs out of the free places, the emptiest first; none if there are too few."""
        emptiest = sorted((i for i in self.indices if i in free), key=lambda index: -free[index])
        taken = [index for index in emptiest if free[index] >= self.places][: self.num_gpus]
        if len(taken) < self.num_gpus:
            return []
        for index in taken:
            free[index] -= self.places
        return taken


@contextmanager
def lease(
    num_gpus: int, indices: list[int], runs_per_gpu: int = 1, poll_seconds: float = 1.0
) -> Iterator[Lease]:
    """Hold `num_gpus` of the given GPUs, waiting until that many are free.

    All or none are taken, under one machine-wide lock, so two waiting runs cannot each hold
    half of what the other needs. Who has waited longest comes first. One whose wish cannot be met
    yet is passed by those whose can, but not on GPUs that it has to have: else a wide run would
    wait until the queues of narrow ones are through.

    Args:
        num_gpus: How many to hold.
        indices: GPUs to choose from, in order of preference; of shared ones, the emptiest first.
        runs_per_gpu: With how many runs each may be shared, ourselves included. A run that wants
            a GPU for itself never shares one.
        poll_seconds: How often to look again.

    Raises:
        UserError: More are asked for than there are, or the folder of the locks is not writable.
    """
    if num_gpus > len(indices):
        raise UserError(
            f"num_gpus: {num_gpus} is more than the {len(indices)} visible GPUs; lower it or "
            "widen CUDA_VISIBLE_DEVICES"
        )
    wish, folder = _Wish(num_gpus, tuple(indices), runs_per_gpu), lock_dir()
    with _in_line(wish, folder) as ticket:
        while (held := _try_lease(wish, ticket, folder)) is None:
            time.sleep(poll_seconds)
    try:
        yield held
    finally:
        for descriptor in held.file_descriptors:
            os.close(descriptor)


def _try_lease(wish: _Wish, ticket: Path, folder: Path) -> Lease | None:
    with locked(folder / "all.lock", "FP8STUDY_LOCKS"):
        free = {index: _free_places(index, folder) for index in wish.indices}
        left = {index: len(places) for index, places in free.items()}
        for older in _waiting_longer(ticket):
            if not older.take(left) and older.has_no_choice:
                left |= dict.fromkeys(older.indices, 0)
        taken = wish.take(left)
        kept = [place for index in taken for place in free[index][: wish.places]]
        for descriptor in {place for places in free.values() for place in places} - set(kept):
            os.close(descriptor)
    return Lease(tuple(taken), tuple(kept)) if taken else None


@contextmanager
def _in_line(wish: _Wish, folder: Path) -> Iterator[Path]:
    """Hold a ticket, whose name says since when; it counts as long as its file is locked."""
    name = f"{time.monotonic_ns():020d}-{os.getpid()}-{threading.get_ident()}.json"
    ticket = folder / "waiting" / name
    with locked(folder / "all.lock", "FP8STUDY_LOCKS"):  # or it would be read half-written
        descriptor = open_lock(ticket, "FP8STUDY_LOCKS")
        try_lock(descriptor)
        with suppress(OSError):  # an empty ticket is passed by
            os.write(descriptor, json.dumps(asdict(wish)).encode())
    try:
        yield ticket
    finally:
        ticket.unlink(missing_ok=True)
        os.close(descriptor)


def _waiting_longer(ticket: Path) -> list[_Wish]:
    """Return the wishes of those who came before, in their order, and clear away dead tickets."""
    wishes = []
    for path in sorted(ticket.parent.glob("*.json")):
        if path.name >= ticket.name:
            break
        descriptor = open_lock(path, "FP8STUDY_LOCKS")
        try:
            if try_lock(descriptor):  # nobody holds it any more
                path.unlink(missing_ok=True)
                continue
            content = json.loads(path.read_text(encoding="utf-8"))
            wishes.append(_Wish(**content | {"indices": tuple(content["indices"])}))
        except (OSError, ValueError, TypeError, KeyError):
            continue
        finally:
            os.close(descriptor)
    return wishes


def _free_places(index: int, folder: Path) -> list[int]:
    """Take all free places of a GPU; return what holds them."""
    held = []
    for place in range(PLACES):
        descriptor = open_lock(folder / f"gpu-{index}.{place}.lock", "FP8STUDY_LOCKS")
        if try_lock(descriptor):
            held.append(descriptor)
        else:
            os.close(descriptor)
    return held


def memory_in_use(index: int) -> float:
    """Return the GiB that processes hold of a GPU; 0 where the driver does not say."""
    with driver() as nvml:
        if nvml is not None:
            with suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                return float(nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2).used / 2**30)
    return 0.0


def _occupied(indices: Iterable[int]) -> dict[int, float]:
    """Return which GPUs are in use, with the GiB; those just given back have a moment."""
    until = time.monotonic() + _LINGERS_SECONDS
    while True:
        in_use = {index: memory_in_use(index) for index in indices}
        occupied = {index: gib for index, gib in in_use.items() if gib > UNNOTICED_GIB}
        if not occupied or time.monotonic() > until:
            return occupied
        time.sleep(_POLL_SECONDS)


def claim_gpus(config: RunConfig, job: Job, run_dir: Path) -> Job:
    """Wait for the run's GPUs and make them the only ones that this process will see.

    The first process of a run on each node takes them for all and holds them until it ends; the
    others read which they are. Nothing may have touched CUDA before: it looks at the environment
    once. The job's GPUs are the first node's; another node looks for its own.

    Returns:
        The job with the GPUs that the run got; of one that names none, there is nothing to claim.
    """
    if not job.gpus:
        return job
    node = int(os.environ.get("GROUP_RANK", "0"))  # torchrun's number of this node
    names = {gpu.index: gpu.name for gpu in visible_gpus()} if node else job.gpus
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        held = _held.enter_context(lease(config.gpus_per_node, list(names), config.runs_per_gpu))
        # Beside runs of ours that share the GPU nobody can tell whose memory it is.
        others = _occupied(held.indices) if config.runs_per_gpu == 1 else {}
        claim = {"indices": list(held.indices), "held_by_others_gib": others}
        write_json(run_dir / CLAIM.format(node), claim)
    while (indices := claimed(run_dir, node)) is None:
        time.sleep(_POLL_SECONDS)
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as the driver's library counts
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, indices))
    return dataclasses.replace(job, gpus={index: names[index] for index in indices})


def claimed(run_dir: Path, node: int = 0) -> list[int] | None:
    """Return the GPUs that a run's processes on a node hold, or None while they hold none."""
    try:
        return [int(index) for index in _claim(run_dir / CLAIM.format(node))["indices"]]
    except FileNotFoundError:
        return None


def held_by_others(run_dir: Path) -> list[str]:
    """Say of each GPU of a run what other processes held of its memory when the run took it."""
    return [
        f"GPU {index}: other processes held {gib:.0f} GiB of its memory when the run began"
        for path in sorted(run_dir.glob(CLAIM.format("*")))
        for index, gib in _claim(path)["held_by_others_gib"].items()
    ]


def _claim(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))
