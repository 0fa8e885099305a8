"""A run that was stopped, or killed, goes on as if it had not been."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8study.core.checkpoints import FOLDER, last_checkpoint
from fp8study.core.config import make_config
from fp8study.core.errors import UserError
from fp8study.core.files import locked
from fp8study.core.records import read_metrics, read_record
from fp8study.run.launch import launch
from tests.checkout import tiny_folder
from tests.disks import small_disk_at
from tests.train.tiny_runs import FOUR, SAVING, Train, tensors


def facts(run_dir: Path) -> list[list[Any]]:
    """Return what does not depend on the clock, of each logged step."""
    names = ("step", "loss", "learning_rate", "gradient_norm", "tokens_seen")
    return [[row[name] for name in names] for row in read_metrics(run_dir)]


#: The first four in every run of the tests.
ARMS: list[dict[str, Any]] = [
    {"strategy": "none", "precision": "fp8", "path": "tuned", "gradient_accumulation_steps": 2,
     "lr_schedule": "cosine", "lr_warmup_steps": 3, "weight_cast": "each_update",
     "update_kernel": "one_pass"},
    {"strategy": "none", "precision": "fp8", "precision_schedule": "bf16:2,fp8_tensorwise:7,bf16"},
    {"strategy": "none", "precision": "fp16"},
    {"strategy": "fsdp2", "num_gpus": 2, "precision": "fp8", "path": "tuned",
     "max_grad_norm": 1.0, "update_kernel": "one_pass"},
    {"strategy": "none", "precision": "bf16", "path": "tuned", "update_kernel": "one_pass",
     "gradient_dtype": "compute"},
    {"strategy": "fsdp2", "num_gpus": 2, "precision": "fp8", "path": "tuned",
     "gather_cast": "compiled", "weight_cast": "each_update", "update_kernel": "one_pass"},
    {"strategy": "fsdp2", "num_gpus": 2, "precision": "fp8", "model": "tied"},
    {"strategy": "fsdp2", "num_gpus": 2, "precision": "fp8_rowwise", "path": "tuned"},
    {"strategy": "fsdp2", "num_gpus": 2, "precision": "bf16", "master_dtype": "bf16"},
    {"strategy": "fsdp2", "num_gpus": 2, "precision": "fp8", "optimizer_state": "bf16"},
    {"strategy": "fsdp2", "num_gpus": 2, "precision": "fp8", "fp8_all_gather": False},
    {"strategy": "fsdp2", "num_gpus": 4, "precision": "bf16"},
    {"strategy": "fsdp2", "num_gpus": 4, "precision": "fp8"},
    {"strategy": "ddp", "num_gpus": 2, "precision": "bf16"},
    {"strategy": "ddp", "num_gpus": 2, "precision": "fp8", "path": "tuned"},
    {"strategy": "fsdp2", "num_gpus": 2, "precision": "fp16", "path": "tuned"},
    {"strategy": "ddp", "num_gpus": 2, "precision": "fp16"},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [*ARMS[:4], *(pytest.param(arm, marks=pytest.mark.long) for arm in ARMS[4:])],
    ids=lambda v: "-".join(map(str, v.values())),
)
def test_resumed_is_uninterrupted_to_the_bit(
    values: dict[str, Any], train: Train, tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    if values.get("model") == "tied":
        values = values | {"model": tiny_folder(tmp_path / "tied", tie_word_embeddings=True)}
    # Its first steps overflow, and so would those of one that began with this scale again.
    scale = "scale:20" if values["precision"] == "fp16" else ""
    expected = train(whole, scale, **values)
    # One rank is told, and its word travels with the loss of the next step, read one step later.
    stopped = train(parts, f"told:4 {scale}", **values)
    assert stopped.status == "interrupted"
    told = "told to end: all 6 steps are saved; start the run again to go on"
    assert stopped.status_detail == told
    record = train(parts, scale, **values)
    assert (expected.status, record.status) == ("completed", "completed")
    assert facts(parts) == facts(whole)
    assert [row[0] for row in facts(parts)] == list(range(1, 9))
    names = ("steps_completed", "loss_start", "loss_last20_mean")
    assert [record.results[n] for n in names] == [expected.results[n] for n in names]
    scaling, own_scaling = (r.instruments.get("loss_scaling") for r in (expected, record))
    assert own_scaling == scaling
    last, own_last = tensors(whole, 8), tensors(parts, 8)
    assert set(own_last) == set(last)
    assert [name for name in last if not torch.equal(last[name], own_last[name])] == []


@pytest.mark.usefixtures("cold_training")
def test_a_run_whose_launcher_is_killed_saves_and_ends(tmp_path: Path) -> None:
    values = {"num_gpus": 2, "num_steps": 5000, "checkpoint_every": 4000}
    process = multiprocessing.get_context("spawn").Process(
        target=launch,
        args=(make_config(SAVING | values), tmp_path),
        kwargs={"machine": FOUR, "show": str},
    )
    process.start()
    metrics = tmp_path / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    process.kill()
    with locked(tmp_path / ".lock", "run_dir"):  # goes with the last process that holds it
        last = last_checkpoint(tmp_path)
    assert last is not None
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, last.step + 1))


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_a_launcher_that_is_stopped_lets_its_run_save(num_gpus: int, tmp_path: Path) -> None:
    values = {"num_gpus": num_gpus, "num_steps": 5000, "checkpoint_every": 4000}

    def stop(line: str) -> None:
        if line.startswith("step     1"):  # a second signal would end it at once
            os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(KeyboardInterrupt, match="stopped by SIGUSR1"):
        launch(make_config(SAVING | values), tmp_path, show=stop, machine=FOUR)
    record, last = read_record(tmp_path / "run.json"), last_checkpoint(tmp_path)
    assert last is not None
    assert record.status == "interrupted"
    assert f"all {last.step} steps are saved" in str(record.status_detail)
    assert len(read_metrics(tmp_path)) == last.step == record.results["steps_completed"]


def test_a_record_says_when_it_was_resumed_and_what_saving_cost(
    train: Train, tmp_path: Path
) -> None:
    values = {"strategy": "none", "num_steps": 12, "keep_checkpoints": 1}
    train(tmp_path, "told:2", **values)
    train(tmp_path, "told:6", **values)
    record = train(tmp_path, **values)
    (first, second) = record.results["resumed"]
    assert [(r["from_step"], r["num_gpus"]) for r in (first, second)] == [(4, 1), (8, 1)]
    note = "resumed after step 4 (num_gpus=1), 8 (num_gpus=1): timings"
    assert any(line.startswith(note) for line in record.warnings)
    # Its own warm-up is left out again: steps 9 and 10.
    assert record.results["num_timed_steps"] == 2
    assert [row["timed"] for row in read_metrics(tmp_path)][8:] == [False, False, True, True]
    saved = record.instruments["checkpoints"]
    assert saved["num"] == 2  # after steps 9 and 12
    assert 0 < saved["stopped_seconds"] < saved["written_seconds"]
    assert saved["gib"] == pytest.approx(3 * 4 * record.model["num_parameters"] / 2**30, rel=0.1)
    assert [p.name for p in sorted((tmp_path / FOLDER).glob("*step*"))] == ["step-00000012"]
    assert not list((tmp_path / FOLDER).glob(".*"))


@pytest.mark.long
@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(train: Train, tmp_path: Path) -> None:
    values = {"precision": "fp8", "num_gpus": 2, "micro_batch_size": 2}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, **values)
    train(parts, "told:1", **values)
    train(parts, "told:5", **values | {"num_gpus": 4, "micro_batch_size": 1})
    alone = {"num_gpus": 1, "strategy": "fsdp2", "gradient_accumulation_steps": 2}
    record = train(parts, **values | alone)
    assert [(r["from_step"], r["num_gpus"]) for r in record.results["resumed"]] == [(3, 4), (7, 1)]
    losses, own = ([row[1] for row in facts(d)] for d in (whole, parts))
    assert own[:3] == losses[:3]
    assert own == pytest.approx(losses, rel=2e-3)  # the same text in the same order
    assert [row[0] for row in facts(parts)] == list(range(1, 9))


@pytest.fixture(scope="module")
def stopped(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was told to end."""
    run_dir = tmp_path_factory.mktemp("stopped")
    assert train(run_dir, "told:1", strategy="none").status == "interrupted"
    return run_dir


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"seed": 1}, "another run (seed=0, not 1); give another run_dir"),
        ({"model": "tiny-qwen3"}, "(model=tiny-llama, not tiny-qwen3)"),
        ({"micro_batch_size": 4}, "gradient_accumulation_steps of 2 sequences a step, not 4)"),
        ({"corpus": "text:{other}"}, "(corpus=synthetic, not text:"),
    ],
)
def test_another_runs_checkpoints_are_refused_and_kept(
    changed: dict[str, Any], words: str, stopped: Path, train: Train, tmp_path: Path
) -> None:
    (tmp_path / "other.txt").write_text("Some other text to train on. " * 500)
    changed = {k: str(v).format(other=tmp_path / "other.txt") for k, v in changed.items()}
    before = {p: p.stat().st_mtime_ns for p in stopped.rglob("*") if p.name != ".lock"}
    with pytest.raises(UserError, match=re.escape(words)) as refusal:
        train(stopped, strategy="none", **changed)
    assert "\n" not in str(refusal.value)
    assert {p: p.stat().st_mtime_ns for p in stopped.rglob("*") if p.name != ".lock"} == before


def test_a_finished_run_is_done_anew_and_its_checkpoints_are_kept(
    train: Train, tmp_path: Path
) -> None:
    for _ in range(2):
        record = train(tmp_path, strategy="none")
        assert "resumed" not in record.results
    assert (tmp_path / f"{FOLDER}.earlier1" / "step-00000008").is_dir()
    assert len(read_metrics(tmp_path)) == 8


def test_a_full_disk_costs_a_warning_and_no_checkpoint(train: Train, tmp_path: Path) -> None:
    record = train(tmp_path, "full:4", strategy="none")
    assert record.status == "completed"
    notes = [line for line in record.warnings if line.startswith("checkpoint_every")]
    assert [re.sub(r"\(.*\)", "(…)", note) for note in notes] == [
        f"checkpoint_every: step {step} could not be saved (…); step 3 is the last that is"
        for step in (6, 8)
    ]
    assert "File too large" in notes[0]
    assert [p.name for p in (tmp_path / FOLDER).iterdir()] == ["step-00000003"]
    (tmp_path / "run.json").unlink()
    assert train(tmp_path, strategy="none").results["resumed"][0]["from_step"] == 3


def test_what_a_full_disk_took_of_a_checkpoint_is_given_back(train: Train, tmp_path: Path) -> None:
    """The part that was written filled the disk until the next one was due, and ended the run."""
    with small_disk_at(tmp_path, "24m"):
        record = train(tmp_path, strategy="none", num_steps=200, checkpoint_every=50)
        assert record.status == "completed"
        assert len(read_metrics(tmp_path)) == 200
        assert [p.name for p in (tmp_path / FOLDER).iterdir()] == ["step-00000050"]
        assert sum("No space left" in line for line in record.warnings) == 3


def training_process(run_dir: Path) -> int | None:
    """Return the process that writes a run's metrics; this one reads them."""
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        try:
            if run_dir / "metrics.jsonl" in [d.readlink() for d in (process / "fd").iterdir()]:
                return int(process.name)
        except OSError:  # it has just ended
            continue
    return None


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_gpus", [1, 2])
def test_after_kill_9_at_any_moment_the_last_checkpoint_loads(
    num_gpus: int, train: Train, tmp_path: Path
) -> None:
    """Of two processes the first is killed, which completes checkpoints."""
    values = {"num_gpus": num_gpus, "checkpoint_every": 1, "num_steps": 100_000}
    draw, steps = random.Random(0), []

    def kill() -> None:
        """Soon after so many further steps; three of them see one checkpoint completed."""
        last = steps[-1] if steps else 0
        enough = last + draw.randrange(5)
        while (process := training_process(tmp_path)) is None or len(
            (tmp_path / "metrics.jsonl").read_text().splitlines()
        ) < enough:
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.1))
        os.kill(process, signal.SIGKILL)

    while len(steps) < 50:
        killer = threading.Thread(target=kill)
        killer.start()
        record = train(tmp_path, **values)
        killer.join()
        assert "killed by signal 9" in str(record.status_detail)
        last = last_checkpoint(tmp_path)
        steps.append(last.step if last else 0)
    assert steps == sorted(steps)
    assert len(set(steps)) > len(steps) / 8
    assert [row["step"] for row in read_metrics(tmp_path)][: steps[-1]] == list(
        range(1, steps[-1] + 1)
    )
