from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from fp8study.core.config import RunConfig, make_config
from fp8study.core.errors import UserError
from fp8study.core.presets import PRESETS
from fp8study.measure.flops import (
    FlopsTable,
    beyond_fp8_pct,
    count_flops,
    flops_text,
    matmul_weights,
    num_matmul_parameters,
    work_per_token,
)
from fp8study.model.build import build_model


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
def test_every_count_is_torchs_own_at_full_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole forward and backward pass of 4096 tokens, on tensors that hold no numbers.

    All layers of the 8B model, and two of the others, whose layers are as alike.
    """
    length = 4096
    if name != "llama-3.1-8b":
        monkeypatch.setitem(PRESETS, name, PRESETS[name] | {"num_hidden_layers": 2})
    config = RunConfig(model=name, sequence_length=length)
    table = count_flops(config)
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
    work = work_per_token(model, model.config, config)
    assert (work.flops_per_token, work.attention_flops_per_token) == (table.total, table.attention)
    assert dict(by_layer) == {leaf: length * flops for leaf, flops in table.linear.items()}


def test_what_fp8_takes_over_bounds_its_speed_up(table_8b: FlopsTable) -> None:
    assert table_8b.eligible == 6 * 7_504_658_432
    assert table_8b.converted == table_8b.eligible - table_8b.linear["lm_head"]
    # Of the causal count, since a kernel may skip what is masked: else the bound is none.
    share = table_8b.converted / table_8b.total_causal
    assert table_8b.speedup_bound(table_8b.converted) == pytest.approx(1 / (1 - share / 2))
    assert table_8b.speedup_bound(0) == 1.0


def test_a_share_and_its_bound_are_of_one_count(table_8b: FlopsTable) -> None:
    text = flops_text(table_8b)
    said = re.findall(r"(\S+) % of the causal total: at most (\S+) ×", text)
    assert len(said) == 2
    for percent, bound in said:
        assert f"{1 / (1 - float(percent) / 200):.2f}" == bound
    assert "Of the total, masked scores too: it could take 87.5 %, and takes 81.4 %" in text
    shares = table_8b.to_dict()
    for part in ("eligible", "converted"):
        by_hand = 1 / (1 - shares[f"{part}_causal_pct"] / 200)
        assert shares[f"speedup_bound_{part}"] == pytest.approx(by_hand)


def test_what_fp8_cannot_take_says_why(tmp_path: Path, table_8b: FlopsTable) -> None:
    assert "cannot" not in flops_text(table_8b)
    folder = model_folder(tmp_path, "gpt2")
    values = json.loads((tmp_path / "config.json").read_text()) | {"vocab_size": 519}
    (tmp_path / "config.json").write_text(json.dumps(values))
    text = flops_text(count_flops(make_config({"model": folder, "sequence_length": 32})))
    assert "FP8 could take 0.0 % of the causal total" in text
    assert (
        "FP8 cannot take c_attn, c_proj, c_fc: Conv1D in place of nn.Linear, which torchao alone "
        "converts\nFP8 cannot take lm_head: 64 × 519: a side does not divide by 16\n"
    ) in text


def test_a_recipe_that_keeps_one_product_of_three_converts_two_thirds() -> None:
    def converted(precision: str) -> int:
        values = {"model": "tiny-qwen3", "precision": precision, "strategy": "fsdp2"}
        return count_flops(make_config(values)).converted

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


#: Sizes under which every model here is small; each takes the names that it knows.
_SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "vocab_size": 512, "max_position_embeddings": 128,
}  # fmt: skip
_EIGHT_EXPERTS = {"num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2},
    "qwen3_moe": {"num_experts": 8, "head_dim": 16, **_EIGHT_EXPERTS},
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 48, **_EIGHT_EXPERTS},
    "deepseek_v3": {
        **_EIGHT_EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32, "num_key_value_heads": 4,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2,
                "head_dim": 16},
    "gpt2": {}, "gpt_neox": {}, "opt": {"ffn_dim": 256, "word_embed_proj_dim": 64}, "bert": {},
}  # fmt: skip


def model_folder(folder: Path, kind: str) -> str:
    values = _SMALL | MODELS[kind]
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **values}))
    return str(folder)


@pytest.mark.parametrize("kind", MODELS)
def test_mixtures_and_older_models_are_counted_as_torch_counts_them(
    kind: str, tmp_path: Path
) -> None:
    """Only the active experts, the router and the shared expert; Conv1D as any linear layer."""
    length = 32
    folder = model_folder(tmp_path, kind)
    table = count_flops(make_config({"model": folder, "sequence_length": length, "skip": ""}))
    model = build_model(folder, torch.float32, torch.device("cpu"), seed=0)
    model.set_attn_implementation("eager")
    if "moe" in kind or "tral" in kind or kind in ("deepseek_v3", "gpt_oss"):
        model.set_experts_implementation("eager")  # grouped GEMMs escape the counter
    with FlopCounterMode(display=False) as whole:
        model(input_ids=torch.arange(length)[None]).logits.sum().backward()
    assert whole.get_total_flops() == length * table.total
    assert not table.left_out
    assert table.document_a is None  # its formula is that of a dense Llama
    assert flops_text(table)  # also where document A's count has no meaning


def test_mixtral_by_hand(tmp_path: Path) -> None:
    values = {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = {"model": str(tmp_path), "sequence_length": 512, "precision": "fp8"}
    table = count_flops(make_config(config))
    assert table.total / 1e9 == pytest.approx(77.3, abs=0.05)
    assert 100 * table.converted / table.total == pytest.approx(10.4, abs=0.05)
    assert table.speedup_bound(table.converted) == pytest.approx(1.05, abs=0.01)
    assert table.linear["router"] == 6 * 32 * 8 * 4096
    assert table.linear["experts.down_proj"] == 6 * 32 * 2 * 14336 * 4096
    model = build_model(str(tmp_path), torch.bfloat16, torch.device("meta"), seed=0)
    assert beyond_fp8_pct(model) > 96  # the experts of all tokens


def test_what_cannot_be_counted_is_said(tmp_path: Path) -> None:
    values = {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(values))
    text = flops_text(count_flops(make_config({"model": str(tmp_path), "sequence_length": 32})))
    assert "Not counted: how 2 of 2 layers mix tokens without attention" in text
    assert "Not counted: the arithmetic of 5." in text
    assert "Document A" not in text


def test_text_passes_no_vision_tower() -> None:
    model = torch.nn.ModuleDict(
        {"vision_tower": torch.nn.Linear(8, 8), "language_model": torch.nn.Linear(16, 16)}
    )
    assert [weight.name for weight in matmul_weights(model)] == ["language_model"]


def test_listed_experts_count_as_often_as_tokens_meet_them() -> None:
    model = torch.nn.Module()
    model.experts = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(8))
    wrapped = torch.nn.ModuleDict({"layer": model, "head": torch.nn.Linear(16, 16)})
    wrapped.config = AutoConfig.for_model("mixtral", num_experts_per_tok=2)
    assert num_matmul_parameters(wrapped) == (2 + 1) * 256


def test_a_misspelt_pattern_is_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'lm_head'"):
        count_flops(RunConfig(model="tiny-llama", skip=("lm_haed",)))


def test_a_window_of_attention_is_said_to_be_left_out(tmp_path: Path) -> None:
    values = {"model_type": "mistral", "hidden_size": 64, "intermediate_size": 128,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
              "vocab_size": 512, "sliding_window": 16}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))

    def text(length: int) -> str:
        return flops_text(
            count_flops(make_config({"model": str(tmp_path), "sequence_length": length}))
        )

    assert "Not counted: that attention looks back at 16 tokens, in some layers or all" in text(32)
    assert "Not counted" not in text(16)
