"""A run's whole state, saved beside the training and brought back.

torch.distributed.checkpoint does the work. It is handed the memory of the model and of the
optimizer itself, so that loading writes into it, each tensor under its parameter's name and freed
of what torchao wraps it in: whatever the precision, the sharding and the number of GPUs, the same
checkpoint fits. A step stops for the copy to the host; a thread writes that beside the steps that
follow. What is a function of the step (learning rate, order of the data) or of the weights (FP8
scales) is not saved.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.utils._pytree import tree_map_only

from fp8study.core.checkpoints import (
    ABOUT,
    is_checkpoint,
    partial,
    place_of,
    read_checkpoint,
    remove_all_but,
    weights_sha256,
)
from fp8study.core.errors import UserError, one_line
from fp8study.core.records import write_json
from fp8study.measure.clock import FinishedStep
from fp8study.model.kept_weights import forget_updates
from fp8study.model.local import plain
from fp8study.run.children import answering

if TYPE_CHECKING:
    from fp8study.train.trainer import Trainer

#: What a scheduler sends before it ends a run.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
#: A `FinishedStep`, but for its number.
_OF_A_STEP = ("loss", "step_time_ms", "gradient_norm")


class Interrupted(Exception):
    """The run was told to end before its last step, and has saved what it could."""


class Checkpoints:
    """Saves a run's state when it is due, and brings it back as the run begins.

    Every rank must make one, and call `save` at the same steps.

    Raises:
        UserError: What the run is to start from does not fit its model.
    """

    def __init__(self, trainer: Trainer, run_dir: Path) -> None:
        self._trainer, self._run_dir = trainer, run_dir
        self.every = trainer.config.checkpoint_every
        self.is_told: bool | None = False if self.every else None
        """Whether this process was told to end; None: it ends at once, and saves nothing."""
        is_used = bool(self.every or trainer.job.start_from)
        self._group = dist.new_group(backend="gloo") if is_used and dist.is_initialized() else None
        self._writing: tuple[int, Future[Any]] | None = None
        self._last_step: int | None = trainer.job.first_step or None
        self._facts = {"num": 0, "stopped_seconds": 0.0, "written_seconds": 0.0, "gib": 0.0}
        self.warnings: list[str] = []
        on_gpu = trainer.device.type == "cuda"
        self._staging = StagingOptions(
            use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False,
            use_non_blocking_copy=on_gpu,
        )  # fmt: skip
        # It would say in each save that there is one process.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        if trainer.job.first_step:
            self._go_on(Path(str(trainer.job.start_from)))
        elif trainer.job.start_from:
            self._start_from(Path(trainer.job.start_from))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Remember in a block that the process was told to end, in place of ending."""
        if not self.every:
            yield
            return

        def told(number: int, frame: object) -> None:
            self.is_told = True

        with answering(_SIGNALS, told):
            yield

    def is_due(self, step: int) -> bool:
        """Whether to save after a number of steps; after the last one it is."""
        last = step == self._trainer.pace.num_steps
        return self.every > 0 and (step % self.every == 0 or last)

    def save(self, step: int) -> None:
        """Copy the state after a number of steps, and have it written; it is the last one then."""
        began = time.perf_counter()
        self.wait()  # the host's memory has room for one copy
        place = place_of(self._run_dir, step)
        writer = _Writer(place, self._about(step), self._trainer.config.keep_checkpoints)
        saving = async_save(
            self._state(), storage_writer=writer, process_group=self._group,
            # A new one each time: torch 2.11 closes it once it has copied.
            async_stager=DefaultStager(self._staging), no_dist=self._group is None,
        )  # fmt: skip
        self._writing = step, cast("Future[Any]", saving)
        self._facts["stopped_seconds"] += time.perf_counter() - began
        self._writing[1].add_done_callback(lambda done: self._written(writer, began, step, done))

    def _written(self, writer: _Writer, began: float, step: int, done: Future[Any]) -> None:
        self._facts["written_seconds"] += time.perf_counter() - began
        self._facts["gib"] = writer.gib or self._facts["gib"]
        if not done.cancelled() and done.exception() is not None:
            self._remove_part(step)  # at once: on a full disk the run's own files need the room

    def _remove_part(self, step: int) -> None:
        if self._trainer.state.is_main_process:
            shutil.rmtree(partial(place_of(self._run_dir, step)), ignore_errors=True)

    def wait(self) -> None:
        """Wait until what was saved is on disk.

        Where it cannot be, what was there is kept: a full disk is no reason to lose the run too.
        """
        if self._writing is None:
            return
        step, saving = self._writing
        self._writing = None
        try:
            saving.result()
        except (Exception, CheckpointException) as error:
            there = f"step {self._last_step} is the last that is" if self._last_step else "none is"
            note = f"checkpoint_every: step {step} could not be saved ({_reason(error)}); {there}"
            self.warnings.append(note)
            self._remove_part(step)
        else:
            self._last_step = step
            self._facts["num"] += 1

    def interrupt(self, step: int) -> Interrupted:
        """Return what to raise after a number of steps, once they are saved."""
        self.wait()
        saved = f"all {step} steps are saved" if self._last_step == step else self.warnings[-1]
        return Interrupted(f"told to end: {saved}; start the run again to go on")

    def facts(self) -> dict[str, Any]:
        """Return a record's ``instruments.checkpoints``, of this session.

        ``num`` that were saved, ``stopped_seconds`` in which they kept the steps waiting and
        ``written_seconds`` until they were on disk, over all of them; ``gib`` of the last one.
        """
        return dict(self._facts) if self._facts["num"] else {}

    def _about(self, step: int) -> dict[str, Any]:
        """Return what is known of the run besides its tensors."""
        trainer, data = self._trainer, self._trainer.job.data
        return {
            "step": step,
            "tokens_seen": step * trainer.config.tokens_per_step,
            "num_gpus": trainer.config.num_gpus,
            "config": trainer.config.to_dict(),
            "data": {n: getattr(data, n) for n in ("corpus_sha256", "tokenizer_sha256")},
            "steps": list(trainer.steps),
            "validation_losses": list(trainer.validation_losses.items()),
            "audit": dict(trainer.audit),
            "loss_scaler": trainer.updates.scaler_state(),
            "began_with": {n: v for n, v in trainer.model_facts.items() if n.startswith("init_")},
        }

    def _model_state(self) -> dict[str, Any]:
        state = get_model_state_dict(self._trainer.model)
        return cast("dict[str, Any]", tree_map_only(torch.Tensor, plain, state))

    def _state(self) -> dict[str, Any]:
        if not self._trainer.updates.adamw.state:  # else torch would make them, of one step done
            make_states(self._trainer.updates.adamw)
        # Not of Accelerate's wrapper, whose state has other names.
        held = get_optimizer_state_dict(self._trainer.model, self._trainer.updates.adamw)
        return {
            "model": self._model_state(),
            "optimizer": tree_map_only(torch.Tensor, plain, held["state"]),
            "random": {str(self._trainer.state.process_index): _generators(self._trainer.device)},
        }

    def _go_on(self, place: Path) -> None:
        """Bring the run back to where a checkpoint was made."""
        trainer, about = self._trainer, read_checkpoint(place).about
        state, rank = self._state(), str(trainer.state.process_index)
        saved = self._names_in(place)
        # There may be more ranks now.
        generators = {
            n: t for n, t in state["random"][rank].items() if f"random.{rank}.{n}" in saved
        }
        self._read(place, state | {"random": {rank: generators}}, "run_dir")
        _set_generators(generators)
        columns = zip(*(about["steps"][name] for name in _OF_A_STEP), strict=True)
        trainer.steps = [FinishedStep(number, *step) for number, step in enumerate(columns)]
        trainer.validation_losses = dict(about["validation_losses"])
        trainer.audit = about["audit"] | trainer.audit
        trainer.model_facts |= about.get("began_with", {})
        if scaler_state := about.get("loss_scaler"):
            trainer.updates.go_on(scaler_state)

    def _start_from(self, place: Path) -> None:
        """Give the model a checkpoint's weights, unless it was built with others; note which."""
        facts = {"init_sha256": weights_sha256(place)}
        if is_checkpoint(place):
            self._read(place, {"model": self._model_state()}, "init_from")
            about = read_checkpoint(place).about
            facts |= {"init_step": about["step"], "init_precision": about["config"]["precision"]}
        self._trainer.model_facts |= facts

    def _names_in(self, place: Path) -> Mapping[str, Any]:
        """Return what a checkpoint of this run holds, by name."""
        try:
            return FileSystemReader(place).read_metadata().state_dict_metadata
        except Exception as error:  # of any kind: it is pickled
            raise UserError(self._damaged("run_dir", place, error)) from error

    def _damaged(self, field: str, place: Path, error: BaseException) -> str:
        """Say of a checkpoint of this very run, or of one to start from, that it cannot be read."""
        what = f"does not fit the model '{self._trainer.config.model}', or is damaged"
        remedy = "give a whole checkpoint of the same model"
        if field == "run_dir":
            what = "is damaged"
            remedy = "take that folder away, and the run goes on from the one before, or anew"
        return f"{field}: '{place}' {what} ({_reason(error)}); {remedy}"

    def _read(self, place: Path, state: dict[str, Any], field: str) -> None:
        """Read tensors into the memory that `state` holds."""
        try:
            load(
                state, storage_reader=FileSystemReader(place), process_group=self._group,
                no_dist=self._group is None,
            )  # fmt: skip
        except (Exception, CheckpointException) as error:
            raise UserError(self._damaged(field, place, error)) from error
        forget_updates(self._trainer.model)
        self._trainer.updates.after()  # FP8 weights and scales follow from them


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Give each weight the optimizer states of no step, by an update that changes nothing.

    Weight by weight: torch would do it for all at once, with every gradient in memory beside the
    states, four bytes a weight more than a run needs that updates in its backward pass.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for weight in weights:
        dtype = getattr(weight, "grad_dtype", None)  # narrower where a layer keeps its weight
        weight.grad = torch.zeros_like(weight, dtype=dtype)
        optimizer.step()
        weight.grad = None
    for state in optimizer.state.values():
        state["step"].zero_()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


class _Writer(FileSystemWriter):
    """Writes a checkpoint under another name, and renames it once every rank's part is on disk."""

    def __init__(self, place: Path, about: dict[str, Any], keep: int) -> None:
        super().__init__(partial(place))
        self._place, self._about, self._keep = place, about, keep
        self.gib = 0.0

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's part; what fails says why, which torch's own error hides."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise

    def finish(self, metadata: Any, results: Any) -> None:
        """Complete it, on the first rank, after all have written."""
        super().finish(metadata, results)
        folder = Path(self.path)
        steps = {n: [getattr(step, n) for step in self._about["steps"]] for n in _OF_A_STEP}
        write_json(folder / ABOUT, self._about | {"steps": steps})
        self.gib = sum(path.stat().st_size for path in folder.iterdir()) / 2**30
        run_dir = self._place.parents[1]
        _sync(run_dir / "metrics.jsonl")  # its lines must not end before the checkpoint
        folder.rename(self._place)
        _sync(self._place.parent)
        remove_all_but(self._keep, run_dir)


def _sync(path: Path) -> None:
    """Return once a file, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _generators(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of all random generators as tensors of fixed sizes."""
    _, keys, position, *_ = np.random.get_state()
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(random.getstate()[1]),
        "numpy": torch.tensor([*map(int, keys), position]),
    }
    return states | ({"cuda": torch.cuda.get_rng_state()} if device.type == "cuda" else {})


def _set_generators(states: dict[str, torch.Tensor]) -> None:
    if "torch" in states:
        torch.set_rng_state(states["torch"])
        random.setstate((3, tuple(states["python"].tolist()), None))
        *keys, position = states["numpy"].tolist()
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, 0, 0.0))
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _reason(error: BaseException) -> str:
    """Return in a line why it failed on the first rank where it did."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return one_line(cast("Exception", error))
