"""Real training in child processes: gloo, emulated FP8, two processes where it matters."""

from __future__ import annotations

import gzip
import json
import math
import re
from pathlib import Path

import pytest
import yaml

from fp8study.core.audit_rules import cautions, problems
from fp8study.core.errors import UserError
from fp8study.core.records import RunRecord, read_metrics, read_record
from fp8study.measure.profiling import TRACE_NAME
from tests.train.tiny_runs import Run, launch_tiny


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run_dir)]


def test_one_process_trains_and_leaves_a_whole_record(run: Run) -> None:
    record, run_dir = run(strategy="none", micro_batch_size=4)
    assert record.status == "completed"
    assert record.results["loss_last20_mean"] < record.results["loss_start"] - 0.3
    assert record.results["num_timed_steps"] == 6
    assert record.results["tokens_per_second_per_gpu"] > 0
    assert record.results["mfu_bf16_peak_pct"] is None  # no GPU, no peak, no guess
    num_blocks = record.data["num_train_tokens"] // 64  # what is left over is never trained on
    assert record.data["epochs"] == pytest.approx(8 * 4 / num_blocks)
    assert 0 < record.data["unigram_loss"] < math.log(record.data["vocab_size"])
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


@pytest.mark.usefixtures("cold_training")
def test_torchrun_starts_the_same_run(run: Run, tmp_path: Path) -> None:
    """As users start it; the other tests' processes are forked from one (`tests/warm`)."""
    _, forked = run(strategy="fsdp2", num_gpus=2)
    record = launch_tiny(tmp_path / "run", strategy="fsdp2", num_gpus=2, profile=False)
    assert record.status == "completed"
    assert losses(tmp_path / "run") == losses(forked)


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
    assert "config_sha256" not in record.model  # of a preset
    assert record.results["loss_last20_mean"] < record.results["loss_start"] - 0.2


def test_same_seed_gives_the_same_losses_and_another_seed_does_not(run: Run) -> None:
    _, first = run(strategy="none", micro_batch_size=4)
    _, again = run(strategy="none", micro_batch_size=4, repeat=1)
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
    replicating = set(replicated.audit["communication_dtypes"])
    assert replicating - {"broadcast"} == {"all_reduce"}
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


def test_extra_steps_meet_neither_too_small_buffers_nor_a_gradient_norm(tmp_path: Path) -> None:
    """Six steps a block, in a run of one; step 0 is one of those that log their gradient's norm."""
    values = {"strategy": "none", "num_steps": 1, "num_warmup_steps": 0, "measure_overhead": True}
    record = launch_tiny(tmp_path / "run", **values)
    assert read_record(tmp_path / "run" / "run.json") == record
    assert not any("did not finish" in line for line in record.warnings)
    assert len(record.instruments["overhead"]["plain_ms"]) == 8
    assert read_metrics(tmp_path / "run")[0]["gradient_norm"] is not None
    with gzip.open(tmp_path / "run" / TRACE_NAME, "rt") as trace:
        names = {event.get("name") for event in json.load(trace)["traceEvents"]}
    assert "aten::mm" in names
    assert not {"aten::_foreach_norm", "aten::linalg_vector_norm"} & names


def test_a_folder_with_only_a_configuration_gets_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    """transformers makes an empty tokenizer there, which would turn all text into one token."""
    config = {
        "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "vocab_size": 512, "architectures": ["GPT2LMHeadModel"],
    }  # fmt: skip
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config))
    text = tmp_path / "own.txt"
    text.write_text("".join(f"The {n} small words of line {n * n % 97}.\n" for n in range(3000)))
    values = {"model": str(tmp_path / "gpt2"), "strategy": "none", "corpus": f"text:{text}"}
    record = launch_tiny(tmp_path / "run", **values)
    assert record.data["tokenizer"] == "bpe-512"
    assert any("holds no vocabulary" in warning for warning in record.warnings)
    assert record.results["loss_last20_mean"] > 1  # nats: nothing like a constant text
    # GPT-2's products are no nn.Linear; whoever reads the FLOPs must know.
    assert any("no nn.Linear" in warning for warning in record.warnings)
    with pytest.raises(UserError, match="more than the 64 positions"):
        launch_tiny(tmp_path / "x", sequence_length=65, **values)
    config["activation_function"] = "relu"  # as many weights
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config))
    edited = launch_tiny(tmp_path / "edited", **values)
    assert edited.model["num_parameters"] == record.model["num_parameters"]
    assert edited.model["config_sha256"] != record.model["config_sha256"]


def test_metrics_are_json_lines_with_units_in_their_names(run: Run) -> None:
    _, run_dir = run(strategy="none", micro_batch_size=4)
    first = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert set(first) == {
        "step", "loss", "learning_rate", "gradient_norm", "step_time_ms",
        "tokens_per_second_per_gpu", "tokens_seen", "timed",
    }  # fmt: skip
    assert (first["step"], first["timed"], first["tokens_seen"]) == (1, False, 256)


def test_a_warm_up_longer_than_the_run_is_told(tmp_path: Path) -> None:
    record = launch_tiny(tmp_path, precision="bf16", lr_warmup_steps=9)
    (note,) = (line for line in record.warnings if line.startswith("lr_warmup_steps"))
    assert "9 is more than num_steps=8" in note
