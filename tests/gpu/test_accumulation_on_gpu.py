"""What only a GPU can show of ``fast_accumulation``: which GEMMs were asked to add up so."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from fp8study.core.config import make_config
from fp8study.core.records import read_metrics
from fp8study.run.launch import launch

pytestmark = [pytest.mark.requires_gpu, pytest.mark.slow]


def test_all_fp8_gemms_add_up_fast_where_that_is_asked(tmp_path: Path) -> None:
    LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=2048, intermediate_size=8192,
        num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=16, vocab_size=32_000,
    ).save_pretrained(tmp_path / "model")  # fmt: skip
    losses, shares = {}, {}
    for asked in ("forward", "all"):
        config = make_config(
            {"model": str(tmp_path / "model"), "path": "tuned", "strategy": "none",
             "precision": "fp8_tensorwise", "fast_accumulation": asked, "sequence_length": 2048,
             "num_steps": 12, "num_warmup_steps": 2, "learning_rate": 1e-5}
        ).resolved()  # fmt: skip
        record = launch(config, tmp_path / asked, show=str)
        losses[asked] = [row["loss"] for row in read_metrics(tmp_path / asked)]
        rows = [row for row in record.instruments["step"]["gemm"] if "float8" in row["dtypes"]]
        shares[asked] = sum(row["num_fast"] for row in rows) / sum(row["num"] for row in rows)
    assert shares["all"] == 1
    assert shares["forward"] == pytest.approx(1 / 3)
    assert losses["all"] == pytest.approx(losses["forward"], rel=1e-2)
