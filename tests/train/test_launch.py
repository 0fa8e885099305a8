"""How runs end, well or badly, and what their records say then."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8study.core.config import make_config
from fp8study.core.errors import UserError
from fp8study.core.files import locked
from fp8study.core.records import read_metrics, read_record
from fp8study.core.studies import judgement_of
from fp8study.run.gpu_lease import CLAIM
from fp8study.run.launch import RunFailed, launch
from tests.checkout import tiny_folder, wait_until
from tests.train.tiny_runs import CPU, TINY, launch_tiny

AFTER_TRAINING = {
    "look_closer": "train.look_closer = fails",
    "validation": "train.Trainer.validate_if_due = lambda self, done: done == 8 and fails()",
}


@pytest.mark.parametrize(
    ("where", "error"), [("look_closer", "torch.OutOfMemoryError"), ("validation", "ValueError")]
)
def test_a_finished_run_keeps_its_results_whatever_fails_after_it(
    where: str, error: str, tmp_path: Path, instead_of_training: Callable[[str], None]
) -> None:
    instead_of_training(
        "import sys, torch, fp8study.train.__main__ as train\n"
        f"def fails(*_): raise {error}('no room here')\n"
        f"{AFTER_TRAINING[where]}\n"
        "sys.exit(train.main())"
    )
    values = TINY | {"strategy": "none", "validation_sequences": 2, "profile": False}
    record = launch(make_config(values), tmp_path / "run", "best-batch", str, machine=CPU)
    assert record.judgement == judgement_of("best-batch")
    assert record.judgement["speed_only"] is True
    assert record.status == "completed"
    assert record.results["loss_last20_mean"] is not None
    assert record.results["tokens_per_second_per_gpu"] > 0
    assert ("validation_loss" in record.results) is False
    notes = [line for line in record.warnings if "after training did not finish" in line]
    assert len(notes) == 1
    assert "no room here" in notes[0]


def test_a_fresh_compile_cache_is_the_runs_own_and_goes_with_it(
    tmp_path: Path, instead_of_training: Callable[[str], None]
) -> None:
    instead_of_training(
        "import os; print('cache', os.environ.get('TORCHINDUCTOR_CACHE_DIR')); raise SystemExit(1)"
    )
    with pytest.raises(RunFailed, match=r"cache .*fp8study-compile-"):
        launch_tiny(tmp_path / "run", strategy="none", compile_cache="fresh")
    said = (tmp_path / "run" / "train.log").read_text().split()[-1]
    assert not Path(said).exists()


def test_a_run_that_died_between_logged_steps_has_done_those_before(
    tmp_path: Path, instead_of_training: Callable[[str], None]
) -> None:
    instead_of_training(
        "import sys; rows = open(f'{sys.argv[1]}/metrics.jsonl', 'w'); "
        'rows.write(\'{"step": 4}\\n{"step": 8}\\n\'); rows.close(); raise SystemExit(1)'
    )
    with pytest.raises(RunFailed):
        launch_tiny(tmp_path / "run", strategy="none", num_steps=9, log_every=4)
    record = read_record(tmp_path / "run" / "run.json")
    assert record.results["steps_completed"] == 8
    assert record.data["num_tokens_seen"] == 8 * 2 * 64


def test_memory_that_others_held_of_its_gpus_is_a_warning_however_it_ends(
    tmp_path: Path, instead_of_training: Callable[[str], None]
) -> None:
    instead_of_training(
        "import sys; from pathlib import Path; from fp8study.core.records import write_json\n"
        "from fp8study.run.gpu_lease import CLAIM\n"
        "claim = {'indices': [3], 'held_by_others_gib': {'3': 41.2}}\n"
        "write_json(Path(sys.argv[1]) / CLAIM.format(0), claim); sys.exit(3)"
    )
    with pytest.raises(RunFailed):
        launch(make_config(TINY | {"strategy": "none"}), tmp_path / "run", show=str, machine=CPU)
    (note,) = read_record(tmp_path / "run" / "run.json").warnings
    assert note.startswith("GPU 3: other processes held 41 GiB")
    assert not list((tmp_path / "run").glob(CLAIM.format("*")))


def test_a_run_whose_fp8_was_switched_off_is_stopped_by_its_audit(
    tmp_path: Path, instead_of_training: Callable[[str], None]
) -> None:
    instead_of_training(
        "import sys, fp8study.model.sharding as parallel, "
        "fp8study.train.__main__ as train; "
        "parallel.convert_to_float8 = lambda *_: None; sys.exit(train.main())"
    )
    with pytest.raises(RunFailed, match="28 linear layers should compute in FP8 but do not"):
        launch_tiny(tmp_path / "run", strategy="none", precision="fp8")
    assert read_record(tmp_path / "run" / "run.json").status == "failed"


def test_an_earlier_record_is_kept_when_its_run_is_repeated_and_no_other_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    first = launch_tiny(run_dir, strategy="none")
    launch_tiny(run_dir, strategy="none")
    earlier = read_record(run_dir / "run.earlier1.json")
    assert earlier.started_at == first.started_at
    assert (run_dir / "metrics.earlier1.jsonl").read_text().count("\n") == 8
    left = {path: path.read_bytes() for path in run_dir.iterdir()}
    with pytest.raises(UserError, match=r"result of another run \(seed=0, not 1\); give another"):
        launch_tiny(run_dir, strategy="none", seed=1)
    monkeypatch.setenv("FP8STUDY_GPUS", "7")
    with pytest.raises(UserError, match=r"^FP8STUDY_GPUS: '7' is no number of a GPU here"):
        launch_tiny(run_dir, strategy="none")
    assert {path: path.read_bytes() for path in run_dir.iterdir()} == left


_NARROW = {"hidden_size": 56, "intermediate_size": 100, "num_hidden_layers": 2, "vocab_size": 512,
           "num_attention_heads": 4, "max_position_embeddings": 64}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "values", "reason"),
    [
        # A tied bias in two FSDP groups.
        ("bert", {"strategy": "fsdp2"}, r"^model: '.*/bert' cannot be trained under .*try "),
        # 56 and 100 do not divide by 16: no pattern of skip is to blame.
        ("llama", {"strategy": "none", "precision": "fp8"},
         r"^precision: no linear .*\(15 × a dimension does not divide by 16\); use precision="),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_trained_ends_in_one_line(
    kind: str, values: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (tmp_path / kind).mkdir()
    (tmp_path / kind / "config.json").write_text(json.dumps({"model_type": kind} | _NARROW))
    with pytest.raises(RunFailed) as failure:
        launch_tiny(tmp_path / "run", model=str(tmp_path / kind), **values)
    assert "Traceback" not in str(failure.value)
    detail = read_record(tmp_path / "run" / "run.json").status_detail
    assert re.search(reason, str(detail)), detail


def test_divergence_is_a_result_that_names_the_step(tmp_path: Path) -> None:
    values = {"strategy": "none", "learning_rate": 1000, "weight_decay": 1000}
    record = launch_tiny(tmp_path / "run", **values)
    assert record.status == "diverged"
    assert record.status_detail is not None
    assert "at step" in record.status_detail
    assert "the gradient norm was" in record.status_detail
    assert "at step 1;" in record.status_detail or "at step 1," in record.status_detail
    assert "learning_rate" in record.status_detail
    assert 0 < record.results["steps_completed"] <= 8


def test_a_failing_child_leaves_a_record_with_its_reason(tmp_path: Path) -> None:
    values = {"model": tiny_folder(tmp_path / "model"), "precision": "fp8", "skip": "lm_haed"}
    with pytest.raises(RunFailed, match="did you mean 'lm_head'"):
        launch_tiny(tmp_path / "run", num_gpus=2, **values)
    record = read_record(tmp_path / "run" / "run.json")
    assert record.status == "failed"
    assert record.status_detail is not None
    assert record.status_detail.startswith("skip: 'lm_haed' matches no linear layer")


@pytest.mark.usefixtures("cold_training")
@pytest.mark.parametrize("num_gpus", [1, 2])  # by itself, and by torchrun
def test_a_killed_child_is_recorded_as_failed(num_gpus: int, tmp_path: Path) -> None:
    config = make_config(TINY | {"num_gpus": num_gpus, "num_steps": 5000})

    def kill_training(line: str) -> None:
        for status in Path("/proc").glob("[0-9]*/cmdline"):
            text = status.read_text(errors="replace")
            is_torchrun = "torch.distributed.run" in text
            if f"fp8study.train\0{tmp_path}/run" in text and not is_torchrun:
                os.kill(int(status.parent.name), signal.SIGKILL)

    with pytest.raises(RunFailed, match=r"was killed by signal 9 \(SIGKILL\), as the sys"):
        launch(config, tmp_path / "run", show=kill_training, machine=CPU)
    record = read_record(tmp_path / "run" / "run.json")
    assert record.status == "failed"
    assert 0 < record.results["steps_completed"] < 5000


@pytest.mark.usefixtures("cold_training")
def test_training_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    config = make_config(TINY | {"strategy": "none", "num_steps": 100_000})
    launcher = multiprocessing.get_context("spawn").Process(
        target=launch, args=(config, tmp_path / "run"), kwargs={"machine": CPU, "show": str}
    )
    launcher.start()
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0)
    assert is_being_written(tmp_path / "run")
    launcher.kill()
    # The lock of the run's folder goes with the last process that holds it.
    wait_until(lambda: not is_being_written(tmp_path / "run"))
    assert len(read_metrics(tmp_path / "run")) < 100_000  # ended, not finished


def is_being_written(run_dir: Path) -> bool:
    try:
        with locked(run_dir / ".lock", "run_dir", busy="busy"):
            return False
    except UserError:
        return True


@pytest.mark.usefixtures("cold_training")
def test_two_launchers_never_write_one_run_and_an_interrupted_one_is_recorded(
    tmp_path: Path,
) -> None:
    # No end of a warm-up near: a signal is lost on a process that collects garbage just then.
    steps = {"num_steps": 100_000, "num_warmup_steps": 50_000}
    config = make_config(TINY | {"strategy": "none"} | steps)
    started = threading.Event()
    refusals: list[str] = []

    def second(line: str) -> None:
        trains = (tmp_path / "run" / "metrics.jsonl").exists()  # and tokenises no more
        if trains and not started.is_set():
            started.set()
            with pytest.raises(UserError, match="is being written by another run") as refusal:
                launch(config, tmp_path / "run", show=str, machine=CPU)
            refusals.append(str(refusal.value))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(config, tmp_path / "run", show=second, machine=CPU)
    assert len(refusals) == 1
    assert read_record(tmp_path / "run" / "run.json").status == "interrupted"
    assert not is_being_written(tmp_path / "run")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"corpus": "text:missing.txt"}, "corpus: there is no file 'missing.txt'"),
        ({"sequence_length": 10**7}, "more than the 4096 positions"),
        ({"micro_batch_size": 10**6}, "longer than the corpus"),
        ({"num_gpus": 4096}, "num_gpus: 4096 is more than"),
        ({"model": "lama-3.1-8b"}, "did you mean 'llama-3.1-8b'"),
    ],
)
def test_impossible_runs_start_nothing(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        launch_tiny(tmp_path / "run", **values)
    assert not (tmp_path / "run" / "run.json").exists()


def test_an_unwritable_place_is_met_before_tokenising(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr("fp8study.run.launch.tokens.prepare", None)
    with pytest.raises(UserError, match="run_dir: cannot write"):
        launch_tiny(tmp_path / "file" / "run")
