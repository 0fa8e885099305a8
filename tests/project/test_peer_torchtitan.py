"""torchtitan's log is read right, and what fails stops nothing else."""

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path

import peer_runs
import peer_torchtitan as peer
import pytest
from peer_runs import Cell, Configuration, PeerTrainer, RepeatFailed

from fp8study.core.errors import UserError
from fp8study.core.studies import load_study
from fp8study.run.gpu_lease import lease
from fp8study.run.machine import Machine
from tests.machines import H200, machine

RATES = {1: "95", 5: "9,001", 10: "9,100", 15: "9,300", 20: "9,200"}
CELL = Cell("llama-3.1-8b", 1, 1, 8, num_steps=20, num_warmup_steps=10, log_every=5)
#: The studies beside it, and the GPUs of each.
STUDIES = {
    "beside-torchtitan": 1, "beside-torchtitan-switches": 1, "beside-torchtitan-fsdp-8b": 2,
    "beside-torchtitan-fsdp-1b": 2,
}  # fmt: skip
read = partial(peer.read, cell=CELL, precision="bf16")


def line(step: int, rate: str, rank: int = 0, loss: str = "11.76543", memory: str = "98.70") -> str:
    return (
        f"[rank{rank}]:[titan] 2026-01-02 03:04:05 - root - INFO - step: {step:2}  loss: {loss}"
        f"  grad_norm:  2.3456  memory: {memory}GiB(70.61%)  tps: {rate}"
        "  tflops: 471.20  mfu: 47.60%"
    )


def log(**changes: str) -> str:
    first = ["[rank0]:[titan] x - INFO - Model llama3 8B size: 8,030,261,248 total parameters"]
    return "\n".join(first + [line(step, rate, **changes) for step, rate in RATES.items()])


def test_only_windows_after_warm_up_count() -> None:
    assert read(log()).windows == [9300.0, 9200.0]
    # The window that ends at 10 began at 5, within the warm-up.
    for num_warmup_steps, windows in ((7, [9300.0, 9200.0]), (5, [9100.0, 9300.0, 9200.0])):
        cell = dataclasses.replace(CELL, num_warmup_steps=num_warmup_steps)
        assert read(log(), cell=cell).windows == windows


def test_memory_is_the_most_of_all_windows_and_parameters_are_read() -> None:
    found = read(log().replace("98.70GiB", "101.25GiB", 1))
    assert (found.memory_peak_gib, found.num_parameters) == (101.25, 8030261248)
    assert found.mfu_pct == 47.6


def test_other_ranks_validation_and_colours_change_nothing() -> None:
    others = "\n".join(line(step, "1", rank=rank) for step in (15, 20) for rank in (1, 10))
    validation = "[rank0]:[titan] x - validate step: 15  loss: 1.0  memory: 1.00GiB(1%)  tps: 7"
    coloured = log().replace("tps:", "\x1b[34mtps:").replace("47.60%", "47.60%\x1b[39m")
    assert read(f"{others}\n{validation}\n{coloured}").windows == [9300.0, 9200.0]


def test_a_log_without_its_end_or_a_number_gives_no_rate() -> None:
    with pytest.raises(RepeatFailed, match="ends at step 20 of 25"):
        read(log(), cell=dataclasses.replace(CELL, num_steps=25))
    with pytest.raises(RepeatFailed, match="the loss is nan at step 1") as failure:
        read(log(loss="     nan"))
    assert failure.value.status == "diverged"


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        (
            "[rank0]:RuntimeError: aborted\n"
            "[rank1]:[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried",
            "out_of_memory",
            "torch.OutOfMemoryError: CUDA out of memory. Tried",
        ),
        ("[rank0]: ValueError: first\n[rank0]: KeyError: second", "failed", "ValueError: first"),
        ("[rank0]:│ Unrecognized options: --x   │", "failed", "Unrecognized options: --x"),
        ("elastic.errors.ChildFailedError:\nlast words\n\n", "failed", "last words"),
        ("", "failed", "no output"),
    ],
)
def test_the_first_error_of_a_rank_is_the_reason(text: str, status: str, reason: str) -> None:
    found = peer_runs.why_failed(text, 1)
    assert (found.status, str(found)) == (status, f"exit status 1: {reason}")


def swapped(all_gather: bool) -> str:
    words = "Swapped to Float8Linear layers with enable_fsdp_float8_all_gather"
    return f"{log()}\n[rank0]:[titan] x - root - INFO - {words}={all_gather}"


@pytest.mark.parametrize("num_gpus", [1, 4])
def test_a_log_of_another_precision_is_refused(num_gpus: int) -> None:
    cell = dataclasses.replace(CELL, num_gpus=num_gpus)
    peer.read(swapped(num_gpus > 1), cell, "fp8_tensorwise")
    for text, precision in [
        (log(), "fp8_tensorwise"), (swapped(num_gpus == 1), "fp8_tensorwise"),
        (swapped(num_gpus > 1), "bf16"),
    ]:  # fmt: skip
        with pytest.raises(RepeatFailed, match="FP8 all-gather was"):
            peer.read(text, cell, precision)


PARSER = "class ConfigManager:\n    def parse_args(self, words): {}\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    for name, text in [
        ("torchtitan/train.py", ""), ("assets/version.txt", "0.2.2\n"),
        ("torchtitan/config.py", PARSER.format("pass")),
    ]:  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "COMMIT").write_text("c0ffee\n")
    return folder


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("FP8STUDY_LOCKS", str(tmp_path / "locks"))
    monkeypatch.setattr(peer_runs, "machine_facts", lambda machine: {})
    return machine(H200, H200)


def saying(python: str) -> PeerTrainer:
    return PeerTrainer(
        "talker", "1", "c0ffee", lambda *_: [sys.executable, "-c", python], peer.read, {}
    )


def test_a_record_holds_each_repeat_and_nothing_of_this_machines_folders(
    two_gpus: Machine, tmp_path: Path
) -> None:
    done = Configuration(saying(f"print({log()!r})"), CELL, "bf16", tmp_path, 2, two_gpus)
    path = tmp_path / "llama-3.1-8b-bf16-1gpu-b1-talker" / "peer.json"
    done.measure(3, [0])
    assert json.loads(path.read_text())["status"] == "interrupted"
    done.measure(5, [1])
    record = json.loads(path.read_text())
    assert (record["status"], record["commit"]) == ("completed", "c0ffee")
    rate = 2 / sum(1 / window for window in record["windows_tokens_per_second"][0])
    assert record["tokens_per_second_per_gpu"] == pytest.approx([rate, rate])
    assert 9200 < rate < 9250  # the slower window takes more of the time
    assert (record["memory_peak_gib"], record["blocks"]) == ([98.7, 98.7], [3, 5])
    assert record["log_files"] == ["repeat-3.log", "repeat-5.log"]
    assert str(tmp_path) not in json.dumps(record)


def test_a_configuration_that_failed_is_not_tried_again(two_gpus: Machine, tmp_path: Path) -> None:
    trainer = saying("raise SystemExit('[rank0]:torch.OutOfMemoryError: too much')")
    failing = Configuration(trainer, CELL, "bf16", tmp_path, 2, two_gpus)
    failing.measure(0, [0])
    failing.measure(1, [0])
    record = json.loads(next(tmp_path.rglob("peer.json")).read_text())
    assert (record["status"], record["tokens_per_second_per_gpu"]) == ("out_of_memory", [])
    assert "repeat 0: exit status 1: torch.OutOfMemoryError" in record["status_detail"]
    assert record["log_files"] == ["repeat-0.log"]


def test_a_repeat_has_its_gpus_to_itself(two_gpus: Machine, tmp_path: Path) -> None:
    """It sees the GPUs that it was told, holds them while it runs, and gives them back."""
    seen = tmp_path / "seen"
    tells = "import os, pathlib; "
    tells += f"pathlib.Path({str(seen)!r}).write_text(os.environ['CUDA_VISIBLE_DEVICES'])"
    with lease(1, [0]):
        Configuration(saying(tells), CELL, "bf16", tmp_path, 1, two_gpus).measure(0, [1])
    assert seen.read_text() == "1"
    with lease(2, [0, 1]):
        pass


def test_random_documents_use_the_whole_vocabulary_and_one_sequence_each(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    peer.write_data(tmp_path, 300, 16)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    rows = (tmp_path / "corpus" / "data.jsonl").read_text().splitlines()
    tokens = [tokenizer.encode(json.loads(row)["text"]).ids for row in rows]
    assert tokenizer.get_vocab_size() == 300
    assert {len(row) for row in tokens} == {17}
    assert (min(map(min, tokens)), max(map(max, tokens))) == (0, 299)


def test_another_version_no_checkout_or_another_model_is_refused(
    checkout: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="no checkout of torchtitan"):
        peer.check_checkout(tmp_path)
    with pytest.raises(UserError, match="is none of torchtitan's here"):
        peer.torchtitan(checkout, dataclasses.replace(CELL, model="qwen3-4b"), tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        peer.torchtitan(checkout, CELL, tmp_path / "file")
    peer.check_checkout(checkout)
    for name, text in [
        ("config.py", PARSER.format("import not_for_flags")), ("train.py", "import not_for_train"),
    ]:  # fmt: skip
        (checkout / "torchtitan" / name).write_text(text)
        missing = text.split()[-1]
        with pytest.raises(UserError, match=rf"does not start \(.*'{missing}'\); install tyro"):
            peer.check_checkout(checkout)
    (checkout / "assets" / "version.txt").write_text("0.3.0")
    with pytest.raises(UserError, match=r"is torchtitan 0.3.0; check out v0.2.2"):
        peer.check_checkout(checkout)


def test_the_studies_beside_it_do_the_same_work() -> None:
    for name, ours in STUDIES.items():
        configs = [run.config for run in load_study(name).runs]
        assert {c.num_gpus for c in configs} == {ours}
        assert {c.model for c in configs} <= {*peer.SHAPES}
        assert {(c.path, c.sequence_length, c.master_dtype) for c in configs} == {
            ("tuned", 4096, "fp32")
        }
        more = {"beside-torchtitan": 8, "beside-torchtitan-switches": 4}
        blocks = (more | {"beside-torchtitan-fsdp-8b": 6}).get(name, 5)
        assert {c.repeat for c in configs} == set(range(blocks))
        assert {c.max_grad_norm for c in configs} == {1.0}  # torchtitan always clips
