"""The script that times others and us by turns keeps a block on the same GPUs."""

import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import peer_runs
import peer_torchtitan
import pytest
from peer_runs import Cell, RepeatFailed

from fp8study.core.errors import UserError
from fp8study.core.studies import PlannedRun
from scripts import beside_torchtitan as beside
from scripts.beside_torchtitan import ACCELERATE
from tests.checkout import ROOT, copy_checkout, run_python
from tests.machines import H200, machine
from tests.project.test_peer_torchtitan import checkout, line

__all__ = ["checkout"]
RUN_REPEAT = peer_runs.run_repeat


class Box:
    """Two GPUs on which our runs and torchtitan's take no time, and what was done there."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str, int, tuple[int, ...]]] = []
        self._lock = threading.Lock()
        self.failing = ""

    def note(self, who: str, precision: str, repeat: int, gpus: Sequence[int]) -> None:
        with self._lock:
            self.done.append((who, precision, repeat, tuple(gpus)))

    def run_repeat(
        self, trainer: peer_runs.PeerTrainer, command: list[str], log: Path, cell: Cell,
        precision: str, gpus: Sequence[int],
    ) -> peer_runs.Repeat:  # fmt: skip
        who = {"torchtitan": "torchtitan", "accelerate": "Accelerate"}[trainer.name]
        self.note(cell.model, f"{precision} of {who}", int(log.stem.removeprefix("repeat-")), gpus)
        return RUN_REPEAT(trainer, command, log, cell, precision, gpus)

    def train(self, run: PlannedRun, study: str, gpus: Sequence[int]) -> None:
        self.note(run.config.model, run.config.precision, run.config.repeat, gpus)

    def accelerate(self, cell: Cell, precision: str, dump: Path, seed: int) -> list[str]:
        found = {"windows": [5e3], "memory_peak_gib": 9.0, "num_parameters": 7,
                 "untrained_pct": 0.0, "loss": 7.0}  # fmt: skip
        return [sys.executable, "-c", f"print({json.dumps(found)!r})"]

    def command_of(
        self, data: Path, cell: Cell, precision: str, dump: Path, seed: int
    ) -> list[str]:
        every = range(cell.log_every, cell.num_steps + 1, cell.log_every)
        swapped = (
            f"Swapped to Float8Linear layers with enable_fsdp_float8_all_gather={cell.num_gpus > 1}"
        )
        text = "\n".join([swapped * ("fp8" in precision), *(line(step, "9,000") for step in every)])
        if precision == self.failing:
            return [sys.executable, "-c", "raise SystemExit('[rank0]: ValueError: no')"]
        return [sys.executable, "-c", f"print({text!r})"]


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    box = Box()
    monkeypatch.chdir(copy_checkout(tmp_path / "copy"))
    monkeypatch.setenv("FP8STUDY_LOCKS", str(tmp_path / "locks"))
    monkeypatch.setattr(beside, "this_machine", lambda: machine(H200, H200))
    monkeypatch.setattr(peer_runs, "machine_facts", lambda machine: {})
    monkeypatch.setattr(peer_runs, "run_repeat", box.run_repeat)
    monkeypatch.setattr(peer_torchtitan, "write_data", lambda *_: None)
    monkeypatch.setattr(peer_torchtitan, "command_of", box.command_of)
    other = beside.ACCELERATE._replace(command_of=box.accelerate)
    monkeypatch.setattr(beside, "ACCELERATE", other)
    monkeypatch.setattr(beside, "train", box.train)
    return box


def test_a_block_holds_both_trainers_in_each_precision_on_the_same_gpu(
    box: Box, checkout: Path, tmp_path: Path
) -> None:
    words = [str(checkout), "beside-torchtitan", "--repeats", *"0123"]
    assert beside.main(words) == 1  # our runs left no records
    blocks: dict[tuple[str, int], list[tuple[str, tuple[int, ...]]]] = {}
    for model, precision, repeat, gpus in box.done:
        blocks.setdefault((model, repeat), []).append((precision, gpus))
    assert len(blocks) == 2 * 4
    trainers = ("", " of torchtitan", " of Accelerate")
    six = {precision + who for precision in ("bf16", "fp8_tensorwise") for who in trainers}
    for block in blocks.values():
        assert {precision for precision, _ in block} == six
        assert len({gpus for _, gpus in block}) == 1
    assert {gpus for *_, gpus in box.done} == {(0,), (1,)}
    orders = {tuple(precision for precision, _ in block) for block in blocks.values()}
    assert len(orders) > 2
    records = [json.loads(path.read_text()) for path in tmp_path.rglob("peer.json")]
    assert [sorted(record["blocks"]) for record in records] == 8 * [[0, 1, 2, 3]]
    assert {record["name"] for record in records} == {"torchtitan", "accelerate"}
    assert {record["status"] for record in records} == {"completed"}
    with pytest.raises(
        UserError, match=r"--repeats: 3 was begun before; not begun are \[4, 5, 6, 7\]"
    ):
        beside.main([*words[:3], "3", "4"])
    assert str(tmp_path) not in json.dumps(records)


def test_a_trainer_can_be_left_out(box: Box, checkout: Path) -> None:
    words = [str(checkout), "beside-torchtitan", "--repeats", "0", "--without", "accelerate"]
    beside.main(words)
    four = [
        f"{precision}{who}"
        for precision in ("bf16", "fp8_tensorwise")
        for who in ("", " of torchtitan")
    ]
    assert sorted(precision for _, precision, *_ in box.done) == sorted(2 * four)  # two models


def test_what_fails_is_not_tried_again_and_stops_nobody(
    box: Box, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box.failing = "fp8_tensorwise"
    monkeypatch.setattr(beside, "this_machine", lambda: machine(H200))  # one block at a time
    words = [str(checkout), "beside-torchtitan", "--repeats", "0", "1"]
    assert beside.main(words) == 1
    repeats = [repeat for _, _, repeat, _ in box.done]
    assert repeats == sorted(repeats)  # of both cells before the next
    tried = [precision for _, precision, *_ in box.done]
    assert tried.count("fp8_tensorwise of torchtitan") == 2  # once a cell
    assert tried.count("bf16 of torchtitan") == tried.count("bf16") == 4
    statuses = [json.loads(path.read_text())["status"] for path in tmp_path.rglob("peer.json")]
    assert sorted(statuses) == 6 * ["completed"] + 2 * ["failed"]


def test_wrong_words_give_one_line(
    box: Box, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="--repeats: 9 is none of the study's"):
        beside.main([str(checkout), "beside-torchtitan", "--repeats", "9"])
    with pytest.raises(UserError, match="is none of torchtitan's here"):
        beside.main([str(checkout), "shapes"])
    with pytest.raises(SystemExit, match="beside_torchtitan: the following arguments"):
        beside.main([str(checkout)])
    monkeypatch.setattr(beside, "this_machine", lambda: machine(H200))
    with pytest.raises(UserError, match="2 is more than the 1 visible GPUs"):
        beside.main([str(checkout), "beside-torchtitan-fsdp-8b"])


def small_cell(num_gpus: int) -> Cell:
    return Cell("tiny-llama", num_gpus, 2, 32, num_steps=4, num_warmup_steps=2, log_every=1)


def test_a_rate_of_weights_that_are_not_trained_is_none() -> None:
    """With FP8 all-gather its optimizer keeps the weights that FP8 replaced."""
    cell = small_cell(2)
    done = run_python(ROOT, *ACCELERATE.command_of(cell, "fp8_tensorwise", Path(), 0)[1:])
    with pytest.raises(RepeatFailed, match="% of the weights are not trained"):
        ACCELERATE.read(done.stdout, cell, "fp8_tensorwise")


def test_plain_accelerate_trains_all_weights_on_one_process() -> None:
    cell = small_cell(1)
    command = ACCELERATE.command_of(cell, "fp8_tensorwise", Path(), 0)
    done = run_python(ROOT, *command[1:])
    found = ACCELERATE.read(done.stdout, cell, "fp8_tensorwise")
    assert len(found.windows) == 2
    assert found.num_parameters == 1_311_872
    with pytest.raises(RepeatFailed, match="no last line"):
        ACCELERATE.read("", cell, "bf16")
