from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fp8study.core.config import RunConfig
from fp8study.core.errors import UserError
from fp8study.core.presets import PRESETS
from fp8study.measure.flops import FlopsTable, count_flops
from fp8study.model.build import build_model
from tests.checkout import ROOT, run_python


@pytest.fixture(scope="module")
def table_8b() -> FlopsTable:
    return count_flops(RunConfig(model="llama-3.1-8b", precision="fp8_tensorwise"))


def test_components_of_the_8b_model_by_hand(table_8b: FlopsTable) -> None:
    hidden, inner, kv, vocab, layers = 4096, 14336, 1024, 128256, 32
    assert table_8b.linear == {
        "q_proj": 6 * layers * hidden * hidden,
        "k_proj": 6 * layers * hidden * kv,
        "v_proj": 6 * layers * hidden * kv,
        "o_proj": 6 * layers * hidden * hidden,
        "gate_proj": 6 * layers * hidden * inner,
        "up_proj": 6 * layers * hidden * inner,
        "down_proj": 6 * layers * inner * hidden,
        "lm_head": 6 * hidden * vocab,
    }
    assert table_8b.attention == 12 * layers * 32 * 128 * 4096
    assert table_8b.num_matmul_parameters == 7_504_658_432
    assert table_8b.total == 51_470_401_536


@pytest.mark.parametrize("name", PRESETS)
def test_every_count_is_torchs_own_at_full_size(name: str) -> None:
    """A whole forward and backward pass of 4096 tokens, on tensors that hold no numbers."""
    length = 4096
    table = count_flops(RunConfig(model=name, sequence_length=length))
    with FakeTensorMode():
        model = build_model(name, torch.bfloat16, torch.device("cpu"), seed=0)
        model.set_attn_implementation("eager")  # its products are products to the counter
        with FlopCounterMode(display=False) as whole:
            model(input_ids=torch.zeros(1, length, dtype=torch.long)).logits.sum().backward()
        by_layer: Counter[str] = Counter()
        for layer_name, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear):
                data = torch.zeros(length, layer.in_features, dtype=layer.weight.dtype)
                with FlopCounterMode(display=False) as alone:
                    layer(data.requires_grad_()).sum().backward()
                by_layer[layer_name.rpartition(".")[2]] += alone.get_total_flops()
    counted = whole.get_flop_counts()["Global"]
    assert whole.get_total_flops() == length * table.total
    assert counted[torch.ops.aten.bmm] == length * table.attention
    assert dict(by_layer) == {leaf: length * flops for leaf, flops in table.linear.items()}


def test_what_fp8_takes_over_bounds_its_speed_up(table_8b: FlopsTable) -> None:
    assert table_8b.eligible == 6 * 7_504_658_432
    assert table_8b.converted == table_8b.eligible - table_8b.linear["lm_head"]
    share = table_8b.converted / table_8b.total
    assert table_8b.speedup_bound(table_8b.converted) == pytest.approx(1 / (1 - share / 2))
    assert table_8b.speedup_bound(0) == 1.0


def test_a_recipe_that_keeps_one_product_of_three_converts_two_thirds() -> None:
    def converted(precision: str) -> int:
        return count_flops(RunConfig(model="tiny-qwen3", precision=precision)).converted  # type: ignore[arg-type]

    assert converted("bf16") == 0
    assert converted("fp8_rowwise_gw_hp") == pytest.approx(2 / 3 * converted("fp8_rowwise"))


def test_causal_attention_is_the_mean_over_the_queries() -> None:
    table = count_flops(RunConfig(model="tiny-llama", sequence_length=8))
    keys_seen = sum(range(1, 9)) / 8  # query i meets i keys
    assert table.total - table.total_causal == pytest.approx(table.attention * (1 - keys_seen / 8))


# Shares of the full count that published.md reads off document A's own figures, 2048 to 8192.
@pytest.mark.parametrize(
    ("model", "shortest", "longest"),
    [("llama-3.1-8b", 77, 81), ("llama-3.2-1b", 69, 76), ("qwen3-4b", 66, 65)],
)
def test_document_as_count_falls_short_by_a_quarter(
    model: str, shortest: int, longest: int
) -> None:
    """For Qwen3 it also takes hidden size / heads for the head dimension, which is larger."""
    for length, percent in ((2048, shortest), (8192, longest)):
        table = count_flops(RunConfig(model=model, sequence_length=length))
        assert round(100 * table.document_a / table.total) == percent


def test_document_bs_compiled_arms_count_the_embedding_too(table_8b: FlopsTable) -> None:
    assert table_8b.document_b_compiled - table_8b.total == 6 * 128256 * 4096


def test_a_misspelt_pattern_is_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'lm_head'"):
        count_flops(RunConfig(model="tiny-llama", skip=("lm_haed",)))


def test_the_command_prints_json_that_adds_up() -> None:
    done = run_python(
        ROOT, "-m", "fp8study.cli", "flops", "--model", "tiny-llama", "--sequence-length", "64",
        "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert sum(table["linear"].values()) + table["attention"] == table["total"]
    assert table["precision"] == "fp8_tensorwise"
