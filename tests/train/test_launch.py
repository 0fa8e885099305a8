"""Real training in child processes: gloo, emulated FP8, two processes where it matters."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8study.core.audit_rules import cautions, problems
from fp8study.core.config import make_config
from fp8study.core.errors import UserError
from fp8study.core.records import RunRecord, read_metrics, read_record
from fp8study.core.studies import judgement_of
from fp8study.measure.profiling import TRACE_NAME
from fp8study.run.launch import RunFailed, launch
from tests.checkout import tiny_folder
from tests.train.tiny_runs import CPU, TINY, Run


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run_dir)]


def test_one_process_trains_and_leaves_a_whole_record(run: Run) -> None:
    record, run_dir = run(strategy="none", micro_batch_size=4)
    assert record.status == "completed"
    assert read_record(run_dir / "run.json") == record
    assert record.results["loss_last20_mean"] < record.results["loss_start"] - 0.3
    assert record.results["num_timed_steps"] == 6
    assert record.results["tokens_per_second_per_gpu"] > 0
    assert record.results["mfu_bf16_peak_pct"] is None  # no GPU, no peak, no guess
    num_blocks = record.data["num_train_tokens"] // 64  # what is left over is never trained on
    assert record.data["epochs"] == pytest.approx(8 * 4 / num_blocks)
    assert len(read_metrics(run_dir)) == 8
    assert yaml.safe_load((run_dir / "config.yaml").read_text()) == record.config
    assert record.machine["device"] == "cpu"
    assert re.fullmatch("[0-9a-f]{12}", record.machine["host_hash"])
    assert "gpus" not in record.machine
    assert set(record.git) == {"commit", "dirty"}
    assert not (run_dir / "job.json").exists()
    assert not (run_dir / "outcome.json").exists()


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_two_processes_see_the_tokens_of_one(run: Run, strategy: str) -> None:
    _, one = run(strategy="none", micro_batch_size=4)
    record, two = run(strategy=strategy, num_gpus=2)
    assert record.data["num_tokens_seen"] == 8 * 256
    assert losses(two) == pytest.approx(losses(one), abs=0.02)


def test_accumulation_is_the_same_batch_in_parts(run: Run) -> None:
    _, whole = run(strategy="fsdp2", num_gpus=2)
    _, parts = run(strategy="fsdp2", num_gpus=2, micro_batch_size=1, gradient_accumulation_steps=2)
    assert losses(parts) == pytest.approx(losses(whole), abs=0.02)


def test_fp8_converts_all_but_the_loss_head_and_trains_every_weight(run: Run) -> None:
    bf16, bf16_dir = run(strategy="fsdp2", num_gpus=2)
    fp8, fp8_dir = run(strategy="fsdp2", num_gpus=2, precision="fp8")
    assert fp8.config["fp8_all_gather"] is True
    assert (bf16.model["num_linear_fp8"], fp8.model["num_linear_fp8"]) == (0, 28)
    assert fp8.model["parameters_outside_optimizer_pct"] == 0
    assert any("emulated" in warning for warning in fp8.warnings)
    assert fp8.config["fp8_emulate"] is True  # decided by the machine
    assert bf16.data == fp8.data  # the same tokens, tokenizer and epochs
    assert losses(fp8_dir) != losses(bf16_dir)  # FP8 did happen
    assert losses(fp8_dir) == pytest.approx(losses(bf16_dir), abs=0.1)


def test_rowwise_with_activation_checkpointing_and_bf16_masters(run: Run) -> None:
    record, _ = run(
        strategy="fsdp2", precision="fp8_rowwise", activation_checkpointing=True,
        master_dtype="bf16", max_grad_norm=1.0,
    )  # fmt: skip
    assert record.status == "completed"
    assert record.model["parameter_dtype"] == "bfloat16"
    assert record.results["loss_last20_mean"] < record.results["loss_start"] - 0.2


def test_same_seed_gives_the_same_losses_and_another_seed_does_not(run: Run) -> None:
    _, first = run(strategy="none", micro_batch_size=4)
    _, again = run(strategy="none", micro_batch_size=4, log_every=1)
    _, other = run(strategy="none", micro_batch_size=4, seed=1)
    assert losses(again) == losses(first)
    assert losses(other) != losses(first)


def test_document_a_leaves_most_weights_untrained_and_says_so(run: Run) -> None:
    healthy, _ = run(strategy="none", precision="fp8", fp8_all_gather=True)
    stale, _ = run(
        strategy="none", precision="fp8", fp8_all_gather=True,
        optimizer_binding="before_conversion",
    )  # fmt: skip
    assert healthy.model["parameters_outside_optimizer_pct"] == 0
    assert stale.model["parameters_outside_optimizer_pct"] > 50
    assert any("stale optimizer" in warning for warning in stale.warnings)
    assert stale.audit["num_frozen"] == stale.audit["num_outside_optimizer"] == 28
    assert stale.results["loss_last20_mean"] > healthy.results["loss_last20_mean"] + 0.1


HEALTHY = [
    ("fsdp2", "bf16", 2), ("fsdp2", "fp8", 2), ("fsdp2", "fp8_rowwise", 1),
    ("fsdp2", "fp8_rowwise_gw_hp", 1), ("ddp", "bf16", 2), ("ddp", "fp8", 2),
    ("ddp", "fp8_rowwise", 2), ("none", "bf16", 1), ("none", "fp8", 1), ("none", "fp8_rowwise", 1),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "precision", "num_gpus"), HEALTHY)
def test_the_audit_of_a_healthy_run_finds_nothing(
    run: Run, strategy: str, precision: str, num_gpus: int
) -> None:
    record, _ = run(strategy=strategy, num_gpus=num_gpus, precision=precision)
    skipped = {"skip pattern 'lm_head'": 1} if precision != "bf16" else {"precision=bf16": 29}
    assert record.audit["skipped"] == skipped
    assert problems(record.audit) == cautions(record.audit) == []
    assert record.audit["num_trainable"] == 39
    assert record.audit["stalled_pct"] < 1


def test_the_profile_shows_in_what_dtypes_weights_and_gradients_travel(run: Run) -> None:
    bf16, run_dir = run(strategy="fsdp2", num_gpus=2)
    fp8, _ = run(strategy="fsdp2", num_gpus=2, precision="fp8")
    replicated, _ = run(strategy="ddp", num_gpus=2, precision="bf16")
    assert bf16.audit["communication_dtypes"]["all_gather"] == ["bfloat16"]
    assert "uint8" in fp8.audit["communication_dtypes"]["all_gather"]  # FSDP2 packs FP8 as bytes
    for record in (bf16, fp8):
        assert record.audit["communication_dtypes"]["reduce_scatter"] == ["float32"]

    def gathered(record: RunRecord) -> float:
        rows = record.instruments["step"]["communication"]
        return sum(row["gib"] for row in rows if row["collective"] == "all_gather")

    # Four layers in half the bytes; embedding and head, twice as large here, as before.
    assert 0.6 < gathered(fp8) / gathered(bf16) < 0.75
    assert set(replicated.audit["communication_dtypes"]) == {"all_reduce", "broadcast"} or set(
        replicated.audit["communication_dtypes"]
    ) == {"all_reduce"}
    assert (run_dir / TRACE_NAME).exists()


def test_memory_is_split_on_every_rank(run: Run) -> None:
    record, _ = run(strategy="fsdp2", num_gpus=2)
    memory = record.instruments["memory"]
    assert len(memory["ranks"]) == 2
    whole_gib = 4 * record.model["num_parameters"] / 2**30
    assert memory["parameters_gib"] == pytest.approx(whole_gib / 2, rel=0.01)
    assert memory["gradients_gib"] == memory["parameters_gib"]
    assert memory["optimizer_gib"] == pytest.approx(2 * memory["parameters_gib"], rel=0.01)
    assert record.instruments["energy"] == {}  # absent, not zero
    assert record.results["memory_peak_gib"] is None


def test_gradient_norms_are_logged_now_and_then_and_with_clipping_always(run: Run) -> None:
    _, plain = run(strategy="fsdp2", num_gpus=2)
    norms = [row["gradient_norm"] for row in read_metrics(plain)]
    assert [norm is not None for norm in norms] == [True] + 7 * [False]
    _, alone = run(strategy="none", micro_batch_size=4)
    # Sharded or not, the norm is that of the whole gradient.
    assert read_metrics(alone)[0]["gradient_norm"] == pytest.approx(norms[0], rel=0.02)
    _, clipped = run(
        strategy="fsdp2", precision="fp8_rowwise", activation_checkpointing=True,
        master_dtype="bf16", max_grad_norm=1.0,
    )  # fmt: skip
    assert all(row["gradient_norm"] > 0 for row in read_metrics(clipped))


AFTER_TRAINING = {
    "look_closer": "train.look_closer = fails",
    "validation": "train.Trainer.validate_if_due = lambda self, done: done == 8 and fails()",
}


@pytest.mark.parametrize("error", ["torch.OutOfMemoryError", "ValueError"])
@pytest.mark.parametrize("where", AFTER_TRAINING)
def test_a_finished_run_keeps_its_results_whatever_fails_after_it(
    where: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import sys, torch, fp8study.train.__main__ as train\n"
        f"def fails(*_): raise {error}('no room here')\n"
        f"{AFTER_TRAINING[where]}\n"
        "sys.exit(train.main())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    monkeypatch.setattr("fp8study.run.launch._command", lambda *_: command)
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


def test_extra_steps_meet_neither_too_small_buffers_nor_a_gradient_norm(tmp_path: Path) -> None:
    """Six steps a block, in a run of one; step 0 is one of those that log their gradient's norm."""
    values = TINY | {"strategy": "none", "num_steps": 1, "num_warmup_steps": 0,
                     "measure_overhead": True}  # fmt: skip
    record = launch(make_config(values), tmp_path / "run", show=str, machine=CPU)
    assert not any("did not finish" in line for line in record.warnings)
    assert len(record.instruments["overhead"]["plain_ms"]) == 8
    assert read_metrics(tmp_path / "run")[0]["gradient_norm"] is not None
    with gzip.open(tmp_path / "run" / TRACE_NAME, "rt") as trace:
        names = {event.get("name") for event in json.load(trace)["traceEvents"]}
    assert "aten::mm" in names
    assert not {"aten::_foreach_norm", "aten::linalg_vector_norm"} & names


def test_a_fresh_compile_cache_is_the_runs_own_and_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import os; print('cache', os.environ.get('TORCHINDUCTOR_CACHE_DIR')); raise SystemExit(1)"
    )
    monkeypatch.setattr("fp8study.run.launch._command", lambda *_: [sys.executable, "-c", code])
    config = make_config(TINY | {"strategy": "none", "compile_cache": "fresh"})
    with pytest.raises(RunFailed, match=r"cache .*fp8study-compile-"):
        launch(config, tmp_path / "run", show=str, machine=CPU)
    said = (tmp_path / "run" / "train.log").read_text().split()[-1]
    assert not Path(said).exists()


def test_a_run_whose_fp8_was_switched_off_is_stopped_by_its_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import sys, fp8study.model.sharding as parallel, "
        "fp8study.train.__main__ as train; "
        "parallel.convert_to_float8 = lambda *_: None; sys.exit(train.main())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    monkeypatch.setattr("fp8study.run.launch._command", lambda *_: command)
    config = make_config(TINY | {"strategy": "none", "precision": "fp8"})
    with pytest.raises(RunFailed, match="28 linear layers should compute in FP8 but do not"):
        launch(config, tmp_path / "run", show=str, machine=CPU)
    assert read_record(tmp_path / "run" / "run.json").status == "failed"


def test_an_earlier_record_is_kept_when_its_run_is_repeated(tmp_path: Path) -> None:
    for seed in (0, 1):
        config = make_config(TINY | {"strategy": "none", "seed": seed})
        launch(config, tmp_path / "run", show=str, machine=CPU)
    earlier = read_record(tmp_path / "run" / "run.earlier1.json")
    assert earlier.config["seed"] == 0
    assert read_record(tmp_path / "run" / "run.json").config["seed"] == 1


def test_a_folder_with_only_a_configuration_gets_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    """transformers makes an empty tokenizer there, which would turn all text into one token."""
    config = {
        "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "vocab_size": 512, "architectures": ["GPT2LMHeadModel"],
    }  # fmt: skip
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config))
    values = TINY | {"model": str(tmp_path / "gpt2"), "strategy": "none"}
    record = launch(make_config(values), tmp_path / "run", show=str, machine=CPU)
    assert record.data["tokenizer"] == "bpe-512"
    assert any("holds no vocabulary" in warning for warning in record.warnings)
    assert record.results["loss_last20_mean"] > 3  # nats: nothing like a constant text
    # GPT-2's products are no nn.Linear; whoever reads the FLOPs must know.
    assert any("no nn.Linear" in warning for warning in record.warnings)
    with pytest.raises(UserError, match="more than the 64 positions"):
        launch(make_config(values | {"sequence_length": 65}), tmp_path / "x", machine=CPU)


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
    config = make_config(TINY | {"model": str(tmp_path / kind)} | values)
    with pytest.raises(RunFailed) as failure:
        launch(config, tmp_path / "run", show=str, machine=CPU)
    assert "Traceback" not in str(failure.value)
    detail = read_record(tmp_path / "run" / "run.json").status_detail
    assert re.search(reason, str(detail)), detail


def test_divergence_is_a_result_that_names_the_step(tmp_path: Path) -> None:
    config = make_config(TINY | {"strategy": "none", "learning_rate": 1000, "weight_decay": 1000})
    record = launch(config, tmp_path / "run", show=str, machine=CPU)
    assert record.status == "diverged"
    assert record.status_detail is not None
    assert "at step" in record.status_detail
    assert "the gradient norm was" in record.status_detail
    assert "at step 1;" in record.status_detail or "at step 1," in record.status_detail
    assert "learning_rate" in record.status_detail
    assert 0 < record.results["steps_completed"] <= 8


def test_a_failing_child_leaves_a_record_with_its_reason(tmp_path: Path) -> None:
    values = {"model": tiny_folder(tmp_path / "model"), "precision": "fp8", "skip": "lm_haed"}
    config = make_config(TINY | values | {"num_gpus": 2})
    with pytest.raises(RunFailed, match="did you mean 'lm_head'"):
        launch(config, tmp_path / "run", show=str, machine=CPU)
    record = read_record(tmp_path / "run" / "run.json")
    assert record.status == "failed"
    assert record.status_detail is not None
    assert record.status_detail.startswith("skip: 'lm_haed' matches no linear layer")


@pytest.mark.parametrize("num_gpus", [1, 2])  # by itself, and by torchrun
def test_a_killed_child_is_recorded_as_failed(num_gpus: int, tmp_path: Path) -> None:
    strategy = "none" if num_gpus == 1 else "fsdp2"
    config = make_config(TINY | {"strategy": strategy, "num_gpus": num_gpus, "num_steps": 5000})

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


def test_an_interrupted_run_is_recorded_and_its_child_ended(tmp_path: Path) -> None:
    config = make_config(TINY | {"strategy": "none", "num_steps": 5000})

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(config, tmp_path / "run", show=interrupt, machine=CPU)
    assert read_record(tmp_path / "run" / "run.json").status == "interrupted"


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
    from fp8study.core.files import locked

    try:
        with locked(run_dir / ".lock", "run_dir", busy="busy"):
            return False
    except UserError:
        return True


def wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


def test_two_launchers_never_write_one_run(tmp_path: Path) -> None:
    config = make_config(TINY | {"strategy": "none", "num_steps": 100_000})
    started = threading.Event()
    refusals: list[str] = []

    def second(line: str) -> None:
        if not started.is_set():
            started.set()
            with pytest.raises(UserError, match="is being written by another run") as refusal:
                launch(config, tmp_path / "run", show=str, machine=CPU)
            refusals.append(str(refusal.value))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(config, tmp_path / "run", show=second, machine=CPU)
    assert len(refusals) == 1


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
        launch(make_config(TINY | values), tmp_path / "run", show=str, machine=CPU)
    assert not (tmp_path / "run" / "run.json").exists()


def test_an_unwritable_place_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="run_dir: cannot write"):
        launch(make_config(TINY), tmp_path / "file" / "run", show=str, machine=CPU)


def test_metrics_are_json_lines_with_units_in_their_names(run: Run) -> None:
    _, run_dir = run(strategy="none", micro_batch_size=4)
    first = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert set(first) == {
        "step", "loss", "learning_rate", "gradient_norm", "step_time_ms",
        "tokens_per_second_per_gpu", "tokens_seen", "timed",
    }  # fmt: skip
    assert (first["step"], first["timed"], first["tokens_seen"]) == (1, False, 256)
