"""What only GPUs can show of ``collectives=copy_engines``: that all numbers arrive, and in time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from fp8study.core.config import make_config
from fp8study.core.records import read_metrics
from fp8study.run.launch import launch

pytestmark = [pytest.mark.requires_gpu(2), pytest.mark.slow]


def furthest(ones: list[float], others: list[float]) -> float:
    """Return the largest ratio of two numbers of one step, less one."""
    return max(abs(one / other - 1) for one, other in zip(ones, others, strict=True))


def save_model(folder: Path, ties: bool) -> None:
    """Save layers of a few milliseconds, so that copies run beside GEMMs; the embedding is larger.

    Its configuration, that is: weights are drawn.
    """
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 6,
             "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 64_000,
             "tie_word_embeddings": ties}  # fmt: skip
    LlamaConfig(architectures=["LlamaForCausalLM"], **shape).save_pretrained(folder)


@pytest.mark.parametrize("precision", ["bf16", "fp8_tensorwise"])
@pytest.mark.parametrize(("num_gpus", "ties"), [(2, False), (2, True), (4, False)])
def test_copy_engines_move_what_nccl_moves(
    tmp_path: Path, precision: str, num_gpus: int, ties: bool
) -> None:
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs")
    save_model(tmp_path / "model", ties)
    norms, losses, moved = {}, {}, {}
    for name in ("nccl", "again", "copy_engines"):
        collectives = "copy_engines" if name == "copy_engines" else "nccl"
        config = make_config(
            {"model": str(tmp_path / "model"), "num_gpus": num_gpus, "path": "tuned",
             "precision": precision, "max_grad_norm": 1.0, "collectives": collectives,
             "sequence_length": 2048, "micro_batch_size": 2, "num_steps": 16,
             "num_warmup_steps": 2, "learning_rate": 1e-5}
        ).resolved()  # fmt: skip
        record = launch(config, tmp_path / name, show=str)
        rows = read_metrics(tmp_path / name)
        losses[name] = [row["loss"] for row in rows]
        norms[name] = [row["gradient_norm"] for row in rows]
        moved[name] = {
            (row["collective"], row["dtype"]): row["gib"]
            for row in record.instruments["step"]["communication"]
            if row["collective"] in ("all_gather", "reduce_scatter")
        }
    # Not to the bit: some of a GPU's sums have no fixed order, and two runs with NCCL differ.
    floor, off = (furthest(norms[name], norms["nccl"]) for name in ("again", "copy_engines"))
    print(f"gradient norms: {off:.2%} off, two runs with NCCL {floor:.2%}")
    assert losses["copy_engines"] == pytest.approx(losses["nccl"], rel=1e-3)
    assert off <= min(2 * floor, 0.02) + 0.01
    theirs, ours = moved["nccl"], moved["copy_engines"]
    gathered = {key for key in theirs if key[0] == "all_gather"}
    assert {key: ours[key] for key in gathered} == pytest.approx({k: theirs[k] for k in gathered})
    assert {*ours} - gathered == {("reduce_scatter", "bfloat16")}
    half = theirs["reduce_scatter", "float32"] / 2
    assert ours["reduce_scatter", "bfloat16"] == pytest.approx(half)


@pytest.mark.parametrize("max_grad_norm", [1.0, None])
@pytest.mark.parametrize("precision", ["fp8_tensorwise", "bf16"])
def test_gradients_that_each_pass_reduces_are_those_of_the_last(
    tmp_path: Path, precision: str, max_grad_norm: float | None
) -> None:
    save_model(tmp_path / "model", False)
    ways = {
        "last": {"gradient_reduction": "last_pass"}, "again": {"gradient_reduction": "last_pass"},
        "each": {"gradient_reduction": "each_pass", "collectives": "nccl"}, "copied": {},
    }  # fmt: skip
    norms, losses, peaks = {}, {}, {}
    for name, changes in ways.items():
        config = make_config(
            {"model": str(tmp_path / "model"), "num_gpus": 2, "path": "tuned",
             "precision": precision, "max_grad_norm": max_grad_norm, "sequence_length": 2048,
             "gradient_accumulation_steps": 3, "num_steps": 8, "num_warmup_steps": 2,
             "learning_rate": 1e-5} | changes
        ).resolved()  # fmt: skip
        record = launch(config, tmp_path / name, show=str)
        rows = read_metrics(tmp_path / name)
        losses[name] = [row["loss"] for row in rows]
        norms[name] = [row["gradient_norm"] for row in rows if max_grad_norm]  # else not found
        peaks[name] = record.results["memory_peak_gib"]
    floor = furthest(norms["again"], norms["last"]) if max_grad_norm else 0.0
    print(f"two runs {floor:.2%} apart; GiB: {peaks}")
    for name in ("each", "copied"):
        assert losses[name] == pytest.approx(losses["last"], rel=1e-3)
        if max_grad_norm:
            assert furthest(norms[name], norms["last"]) <= min(2 * floor, 0.02) + 0.01
        assert peaks[name] < peaks["last"] - 0.5  # 1.2 GiB are half of whole FP32 gradients
