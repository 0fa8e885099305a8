"""The script that times torchtitan reads its log right, and outlives a configuration that fails."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fp8study.core.studies import load_study
from fp8study.run.gpu_lease import lease
from scripts import peer_torchtitan as peer

RATES = {1: "95", 5: "9,001", 10: "9,100", 15: "9,300", 20: "9,200"}


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
    assert peer.read_log(log(), 20, 10).windows == [9300.0, 9200.0]
    # The window that ends at 10 began at 5, within the warm-up.
    assert peer.read_log(log(), 20, 7).windows == [9300.0, 9200.0]
    assert peer.read_log(log(), 20, 5).windows == [9100.0, 9300.0, 9200.0]


def test_memory_is_the_most_of_all_windows_and_parameters_are_read() -> None:
    text = log().replace("98.70GiB", "101.25GiB", 1)
    found = peer.read_log(text, 20, 10)
    assert (found.memory_peak_gib, found.num_parameters) == (101.25, 8030261248)
    assert found.mfu_pct == 47.6


def test_other_ranks_validation_and_colours_change_nothing() -> None:
    others = "\n".join(line(step, "1", rank=rank) for step in (15, 20) for rank in (1, 10))
    validation = "[rank0]:[titan] x - validate step: 15  loss: 1.0  memory: 1.00GiB(1%)  tps: 7"
    coloured = log().replace("tps:", "\x1b[34mtps:").replace("47.60%", "47.60%\x1b[39m")
    found = peer.read_log(f"{others}\n{validation}\n{coloured}", 20, 10)
    assert found.windows == [9300.0, 9200.0]


def test_a_log_without_its_end_or_a_number_gives_no_rate() -> None:
    with pytest.raises(peer.RepeatFailed, match="ends at step 20 of 25"):
        peer.read_log(log(), 25, 10)
    with pytest.raises(peer.RepeatFailed, match="the loss is nan at step 1") as failure:
        peer.read_log(log(loss="     nan"), 20, 10)
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
    found = peer.why_failed(text, 1)
    assert (found.status, str(found)) == (status, f"exit status 1: {reason}")


def swapped(all_gather: bool) -> str:
    words = "Swapped to Float8Linear layers with enable_fsdp_float8_all_gather"
    return f"[rank0]:[titan] x - root - INFO - {words}={all_gather}"


def test_a_log_of_another_precision_is_refused() -> None:
    peer.check_precision("", "bf16", 4)
    peer.check_precision(swapped(True), "fp8_tensorwise", 4)
    peer.check_precision(swapped(False), "fp8_tensorwise", 1)
    for text, precision, gpus in [
        ("", "fp8_tensorwise", 1),
        (swapped(False), "fp8_tensorwise", 4),
        (swapped(True), "bf16", 4),
    ]:
        with pytest.raises(peer.RepeatFailed):
            peer.check_precision(text, precision, gpus)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    for name, text in [("torchtitan/train.py", ""), ("assets/version.txt", "0.2.2\n")]:
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
    (folder / "COMMIT").write_text("c0ffee\n")
    return folder


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    monkeypatch.setattr(sys, "argv", ["peer_torchtitan.py", *words])
    with pytest.raises(SystemExit) as ending:
        peer.main()
    return ending.value.code


def test_one_failing_configuration_does_not_stop_the_other(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command_of(plan: peer.Plan, precision: str, *rest: object) -> list[str]:
        failing = "raise SystemExit('[rank0]:torch.OutOfMemoryError: too much')"
        return [sys.executable, "-c", failing if "fp8" in precision else f"print({log()!r})"]

    monkeypatch.setattr(peer, "command_of", command_of)
    monkeypatch.setattr(peer, "machine_facts", lambda machine: {})
    output = tmp_path / "out"
    words = ["--checkout", str(checkout), "--output", str(output), "--model", "debug"]
    words += ["--sequence-length", "8", "--steps", "20", "--repeats", "2"]
    assert run(monkeypatch, *words, "--precision", "fp8_tensorwise", "bf16") == 1

    names = [f"torchtitan-debug-{precision}-1gpu-b1" for precision in ("bf16", "fp8_tensorwise")]
    bf16, fp8 = (json.loads((output / name / "peer.json").read_text()) for name in names)
    assert (bf16["status"], bf16["commit"], bf16["model"]) == ("completed", "c0ffee", names[0][:16])
    rate = 2 / sum(1 / window for window in bf16["windows_tokens_per_second"][0])
    assert bf16["tokens_per_second_per_gpu"] == pytest.approx([rate, rate])
    assert 9200 < rate < 9250  # the slower window takes more of the time
    assert bf16["memory_peak_gib"] == [98.7, 98.7]
    assert bf16["log_files"] == ["repeat-1.log", "repeat-2.log"]
    assert str(tmp_path) not in json.dumps(bf16)
    assert (fp8["status"], fp8["tokens_per_second_per_gpu"]) == ("out_of_memory", [])
    assert "repeat 1: exit status 1: torch.OutOfMemoryError" in fp8["status_detail"]
    assert fp8["log_files"] == ["repeat-1.log"]  # it would fail again

    # What is complete is not measured again.
    assert run(monkeypatch, *words, "--precision", "bf16") == 0


def test_a_repeat_waits_its_turn_for_a_gpu(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two GPUs the first is ours, and the peer sees the second alone."""
    seen = tmp_path / "seen"
    tells = "import os, pathlib; "
    tells += f"pathlib.Path({str(seen)!r}).write_text(os.environ['CUDA_VISIBLE_DEVICES'])"
    monkeypatch.setenv("FP8STUDY_LOCKS", str(tmp_path / "locks"))
    monkeypatch.setattr(peer, "command_of", lambda *_: [sys.executable, "-c", tells])
    monkeypatch.setattr(peer, "machine_facts", lambda machine: {})
    two = SimpleNamespace(gpus=[SimpleNamespace(index=4), SimpleNamespace(index=5)])
    monkeypatch.setattr(peer, "this_machine", lambda: two)
    words = ["--checkout", str(checkout), "--output", str(tmp_path / "out"), "--model", "debug"]
    with lease(1, [4]):
        run(monkeypatch, *words, "--sequence-length", "8", "--repeats", "1")
    assert seen.read_text() == "5"
    with lease(2, [4, 5]):  # it gave its own back
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


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--gpus", "0"], "--gpus: '0' is not a whole number above 0"),
        (["--steps", "42"], "multiples of --log-every"),
        (["--steps", "10"], "--steps 10: must be above --warmup-steps 10"),
        (["--precision", "fp4"], "--precision: invalid choice: 'fp4'"),
        (["--", "--training.seq_len=1"], "--label"),
        (["--label", "a/b"], "--label 'a/b'"),
    ],
)
def test_bad_input_gives_one_line(
    words: list[str], named: str, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = ["--checkout", str(checkout), "--output", str(tmp_path / "out")]
    message = run(monkeypatch, *known, *words)
    assert isinstance(message, str)
    assert named in message
    assert "\n" not in message


def test_another_version_or_no_checkout_is_refused(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--output", str(tmp_path / "out"), "--checkout"]
    assert "no checkout of torchtitan" in str(run(monkeypatch, *words, str(tmp_path)))
    (checkout / "assets" / "version.txt").write_text("0.3.0")
    assert "is torchtitan 0.3.0; check out v0.2.2" in str(run(monkeypatch, *words, str(checkout)))


def test_the_studies_beside_it_do_the_same_work() -> None:
    for name, ours in (("beside-torchtitan", 1), ("beside-torchtitan-fsdp", 2)):
        configs = [run.config for run in load_study(name).runs]
        assert {c.num_gpus for c in configs} == {ours}
        assert {c.model for c in configs} <= {shape.name for shape in peer.SHAPES.values()}
        assert {(c.path, c.sequence_length, c.master_dtype) for c in configs} == {
            ("tuned", 4096, "fp32")
        }
        assert {c.repeat for c in configs} == set(range(8))
        assert {c.max_grad_norm for c in configs} == {1.0}  # torchtitan always clips
