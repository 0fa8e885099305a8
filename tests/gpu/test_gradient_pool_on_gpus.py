"""What only GPUs can show of ``gradient_pool=shared``: nobody writes into memory that is in use."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from fp8study.core.config import make_config
from fp8study.core.records import read_metrics
from fp8study.run.launch import launch

pytestmark = [pytest.mark.requires_gpu(2), pytest.mark.slow]


def test_gradients_take_the_activations_memory_and_stay_what_they_were(tmp_path: Path) -> None:
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8,
             "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 2048}  # fmt: skip
    LlamaConfig(architectures=["LlamaForCausalLM"], **shape).save_pretrained(tmp_path / "model")
    norms, losses, reserved = {}, {}, {}
    for how, pool, launched in (("own", "own", "by_kernel"), ("shared", "shared", "by_kernel"),
                                ("graph", "shared", "as_graph")):  # fmt: skip
        config = make_config(
            {"model": str(tmp_path / "model"), "num_gpus": 2, "path": "tuned", "compile": False,
             "max_grad_norm": 1.0, "gradient_pool": pool, "step_launch": launched,
             "sequence_length": 2048, "micro_batch_size": 2, "num_steps": 12,
             "num_warmup_steps": 5, "learning_rate": 1e-5, "profile": False}
        ).resolved()  # fmt: skip
        record = launch(config, tmp_path / how, show=str)
        rows = read_metrics(tmp_path / how)
        losses[how] = [row["loss"] for row in rows]
        norms[how] = [row["gradient_norm"] for row in rows]
        reserved[how] = record.instruments["memory"]["steady_reserved_gib"]
    # Not to the bit: some of a GPU's sums have no fixed order.
    for how in ("shared", "graph"):
        assert losses[how] == pytest.approx(losses["own"], rel=1e-3)
        assert norms[how] == pytest.approx(norms["own"], rel=1e-2)
        assert reserved[how] < reserved["own"] - 0.5  # of 1.0 GiB of gradients on each GPU
