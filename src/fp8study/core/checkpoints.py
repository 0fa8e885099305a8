"""Checkpoints as files: which are whole, whose they are, and what a run goes on from.

A run's checkpoints are folders ``checkpoints/step-00000100`` of its own. They are written under
another name and renamed once every rank's part is on disk, so a folder of that name is whole.
Its `ABOUT` says what a launcher must know without torch; the tensors are beside it, as
torch.distributed.checkpoint writes them (`fp8study.train.checkpoint`).
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8study.core.config import ResolvedConfig, completed
from fp8study.core.errors import UserError, one_line
from fp8study.core.field_types import shown
from fp8study.core.fields import varying
from fp8study.core.files import write_whole
from fp8study.core.record_shape import SHAPE, check_shape, logged_steps
from fp8study.core.records import RESULTS, read_metrics, read_record, set_aside

#: Below a run's folder.
FOLDER = "checkpoints"
#: In a checkpoint: step, tokens_seen, num_gpus, config, data (hashes), and what the run knows of
#: its steps so far: steps, validation_losses, audit.
ABOUT = "about.json"
#: Beside the checkpoints: a line for each time that the run went on from one.
_RESUMED = "resumed.jsonl"
_WHOLE, _PARTIAL = "step-", ".partial-"
#: Of each file of weights, by which they are told from others: blocks, and bytes of a block.
_SAMPLES, _BLOCK = 64, 4096


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint, and what it says of itself."""

    path: Path
    about: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps that were done."""
        return int(self.about["step"])


def place_of(run_dir: Path, step: int) -> Path:
    """Return the folder of a run's checkpoint after a number of steps."""
    return run_dir / FOLDER / f"{_WHOLE}{step:08}"


def partial(place: Path) -> Path:
    """Return where a checkpoint is until it is whole, or once it is being removed."""
    return place.with_name(_PARTIAL + place.name)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read what a checkpoint says of itself.

    Raises:
        UserError: It is damaged.
    """
    try:
        about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        about |= {"step": int(about["step"]), "config": dict(about["config"])}
        return Checkpoint(path, about)
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise UserError(
            f"{path}: no checkpoint ({one_line(error)}); take it away to go on from the one before"
        ) from error


def last_checkpoint(run_dir: Path) -> Checkpoint | None:
    """Return a run's last whole checkpoint, or None without any.

    Raises:
        UserError: It is damaged.
    """
    whole = _whole(run_dir)
    return read_checkpoint(whole[-1]) if whole else None


def _whole(run_dir: Path) -> list[Path]:
    folders = (run_dir / FOLDER).glob(f"{_WHOLE}*")
    return sorted(folders, key=lambda path: (len(path.name), path.name))


def remove_all_but(keep: int, run_dir: Path) -> None:
    """Remove all of a run's checkpoints but the last ones, and what was never completed."""
    for path in _whole(run_dir)[:-keep]:
        path.rename(partial(path))  # half of one is none
    remove_partial(run_dir)


def remove_partial(run_dir: Path) -> None:
    """Remove what a run that was killed has left of a checkpoint."""
    for path in (run_dir / FOLDER).glob(f"{_PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)


def go_on_from(run_dir: Path, config: ResolvedConfig, data: Mapping[str, Any]) -> Checkpoint | None:
    """Return the last checkpoint of a run that is not finished; set a finished one's aside.

    Raises:
        UserError: There is a result or a checkpoint of another run, or one of other `data` (with
            its hashes).
    """
    record = run_dir / "run.json"
    if record.exists() and (earlier := read_record(record)).status in RESULTS:
        if others := _differing(earlier.config, config, [*config.to_dict()]):
            raise UserError(
                f"run_dir: '{run_dir}' holds the result of another run ({', '.join(others)}); give "
                "another run_dir, or take that folder away"
            )
        if (run_dir / FOLDER).exists():
            set_aside(run_dir / FOLDER, "earlier")
        return None
    remove_partial(run_dir)
    if (checkpoint := last_checkpoint(run_dir)) is not None:
        _check_continues(checkpoint, config, data)
    return checkpoint


def _differing(
    earlier: Mapping[str, Any], config: ResolvedConfig, names: Sequence[str]
) -> list[str]:
    """Say which of the fields with these `names` an earlier run had otherwise."""
    then, now = completed(earlier), completed(config.to_dict())
    return [
        f"{name}={shown(then.get(name)) or 'none'}, not {shown(now[name]) or 'none'}"
        for name in names
        if now[name] != then.get(name)
    ]


def _check_continues(
    checkpoint: Checkpoint, config: ResolvedConfig, data: Mapping[str, Any]
) -> None:
    """Refuse what differs in more than how the work is done: on how many GPUs, by which path."""
    then, now = checkpoint.about["config"], config.to_dict()
    differing = _differing(then, config, [name for name in now if name not in varying("resume")])
    batch = ("num_gpus", "micro_batch_size", "gradient_accumulation_steps")
    before, after = (math.prod(values[name] for name in batch) for values in (then, now))
    if before != after:
        differing.append(f"{' × '.join(batch)} of {before} sequences a step, not {after}")
    hashes = checkpoint.about["data"]
    differing += [f"another {name[:-7]}" for name in hashes if hashes[name] != data[name]]
    if differing:
        raise UserError(
            f"run_dir: '{checkpoint.path.parent}' holds checkpoints of another run "
            f"({', '.join(differing)}); give another run_dir, or take that folder away"
        )


def weights_to_start_from(init_from: str, tokenizer_sha256: str | None = None) -> Path:
    """Return the folder that a run's ``init_from`` means: safetensors, or one of our checkpoints.

    Raises:
        UserError: It holds no weights, or those of a run on another tokenizer's tokens.
    """
    folder = Path(init_from).expanduser()
    checkpoint = last_checkpoint(folder)
    if checkpoint is None and (folder / ABOUT).is_file():
        checkpoint = read_checkpoint(folder)
    if checkpoint is not None:
        theirs = checkpoint.about.get("data", {}).get("tokenizer_sha256")
        if theirs and tokenizer_sha256 and theirs != tokenizer_sha256:
            raise UserError(
                f"init_from: '{init_from}' was trained on another tokenizer's tokens; use the "
                "tokenizer of that run (one trained on its text, as bpe, wants that corpus, too)"
            )
        return checkpoint.path
    if any(folder.glob("*.safetensors")):
        return folder
    raise UserError(
        f"init_from: '{init_from}' holds no weights; give a folder of Hugging Face safetensors, a "
        "run's folder with checkpoints, or one of its checkpoints"
    )


def weights_sha256(folder: Path) -> str:
    """Return a hash by which a folder's weights are told from others.

    Of the names and sizes of its files and of `_SAMPLES` blocks of each: all of it would take
    minutes. A training that is done again leaves others, and so does another of its steps.
    """
    found = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.distcp")]):
        size = path.stat().st_size
        found.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for number in range(_SAMPLES):
                file.seek(number * max(0, size - _BLOCK) // (_SAMPLES - 1))
                found.update(file.read(_BLOCK))
    return found.hexdigest()


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder from `weights_to_start_from` is one of our checkpoints."""
    return (folder / ABOUT).is_file()


def cut_metrics(run_dir: Path, step: int, log_every: int = 1) -> None:
    """Leave in ``metrics.jsonl`` what was logged up to a step: the whole new file or the old.

    Raises:
        UserError: A step up to there is missing: its curve would lose what was trained.
    """
    path = run_dir / "metrics.jsonl"
    if not step:
        path.unlink(missing_ok=True)
        return
    kept = [row for row in read_metrics(run_dir) if (row.get("step") or step + 1) <= step]
    logged, or_over = (logged_steps(step, log_every, is_over) for is_over in (False, True))
    if (found := [row["step"] for row in kept]) not in (logged, or_over):
        raise UserError(
            f"{path}: {len({*logged} & {*found})} of the {len(logged)} steps logged before the "
            f"last checkpoint are in {len(found)} lines, not each once and in order; bring the "
            "file back, or move the run away and do it again"
        )
    write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))


def note_resumed(run_dir: Path, **facts: Any) -> None:
    """Remember that a run goes on, whatever will become of this try."""
    every = [*times_resumed(run_dir), facts]
    write_whole(run_dir / FOLDER / _RESUMED, "".join(json.dumps(time) + "\n" for time in every))


def times_resumed(run_dir: Path) -> list[dict[str, Any]]:
    """Return what `note_resumed` was told of a run, in order.

    Raises:
        UserError: The file is damaged.
    """
    path = run_dir / FOLDER / _RESUMED
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        times = [json.loads(line) for line in lines]
        check_shape(times, SHAPE["results"]["resumed"], _RESUMED)
        return times
    except (ValueError, UserError) as error:
        raise UserError(
            f"{path}: not the times that a run went on ({one_line(error)}); take that file away"
        ) from error
