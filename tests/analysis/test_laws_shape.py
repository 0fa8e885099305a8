"""What the laws count of a model, against the model that transformers builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from fp8study.analysis.laws.layer import layer_bytes
from fp8study.analysis.laws.shape import MIXTURES, ModelShape, shape_of
from fp8study.core.config import RunConfig
from fp8study.core.errors import UserError
from fp8study.measure.flops import attention_flops_per_token, num_matmul_parameters

Values = dict[str, Any]
SMALL: Values = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 48,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
EXPERTS: Values = {
    "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "shared_expert_intermediate_size": 320,
}  # fmt: skip
#: What gives some kinds more weights, and none by default.
OPTIONS = ("attention_bias", "attention_out_bias", "mlp_bias", "use_bias", "use_qk_norm")
#: As published, and how many weights its authors name, billion.
PUBLISHED: dict[str, tuple[Values, float]] = {
    "gemma2": ({"vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216,
                "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
                "head_dim": 256}, 2.61),
    "gemma3_text": ({"vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912,
                     "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
                     "head_dim": 256}, 1.00),
    "olmo2": ({"vocab_size": 100352, "hidden_size": 4096, "intermediate_size": 11008,
               "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32},
              7.30),
    "phi3": ({"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
              "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32},
             3.82),
    "qwen2": ({"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
               "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
              7.62),
    "qwen2_moe": ({"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632,
                   "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
                   "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
                   "num_experts": 60, "num_experts_per_tok": 4}, 14.3),
}  # fmt: skip


def folder(where: Path, kind: str, values: Values) -> str:
    where.mkdir(exist_ok=True)
    (where / "config.json").write_text(json.dumps({"model_type": kind, **values}))
    return str(where)


def counted(shape: ModelShape) -> tuple[int, int, int]:
    """Weights, those that a token is multiplied with, and attention's FLOPs a token of 512."""
    each = shape.active_parameters + shape.router_parameters
    matmul = shape.num_layers * each + shape.head_parameters
    return shape.num_parameters, matmul, 12 * shape.num_layers * shape.query_size * 512


def built(kind: str, values: Values) -> tuple[int, int, int]:
    config = AutoConfig.for_model(kind, **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = sum(weight.numel() for weight in model.parameters())
    return weights, num_matmul_parameters(model), attention_flops_per_token(config, 512)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_counts_a_published_model_exactly(kind: str, tmp_path: Path) -> None:
    values, billions = PUBLISHED[kind]
    shape = shape_of(folder(tmp_path, kind, values | {"pad_token_id": 0}))
    assert counted(shape) == built(kind, values | {"pad_token_id": 0})
    assert shape.num_parameters / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.slow  # it imports forty models
def test_counts_every_kind_that_it_takes(tmp_path: Path) -> None:
    taken, wrong = set(), []
    for kind in CONFIG_MAPPING:
        values = SMALL | (EXPERTS if kind in MIXTURES else {})
        if kind == "olmoe":  # its norms know no head_dim
            values = values | {"head_dim": 32}
        try:
            known = AutoConfig.for_model(kind)
            options = dict.fromkeys((name for name in OPTIONS if hasattr(known, name)), True)
            for changes in ({}, options):
                shape = shape_of(folder(tmp_path / kind, kind, values | changes))
                model = built(kind, values | changes)
                taken.add(kind)
                wrong += [(kind, changes)] * (counted(shape) != model)
        except Exception:  # refused here, or nothing that writes text
            continue
    assert not wrong
    usual = {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo2",
             "olmo3", "phi3", "granite", "smollm3", "glm4", *MIXTURES}  # fmt: skip
    assert usual <= taken


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("llama", {"hidden_size": 250, "intermediate_size": 700, "head_dim": 40,
                   "num_attention_heads": 5, "num_key_value_heads": 5}, "divide by 16"),
        ("qwen3_moe", EXPERTS | {"decoder_sparse_step": 2}, "in some of its layers only"),
        ("qwen3_moe", EXPERTS | {"mlp_only_layers": [0]}, "in some of its layers only"),
        ("olmo_hybrid", {}, "is a olmo_hybrid, of which no law is known"),
        ("gpt2", {}, "is a gpt2, of which no law is known"),
        ("deepseek_v3", {}, "is a deepseek_v3, of which no law is known"),
        ("gemma3", {}, "takes more than text"),
        ("llama", {"num_hidden_layers": 0}, "has no num_hidden_layers of 1 or more"),
        ("mixtral", {"num_experts_per_tok": 0}, "has no num_experts_per_tok of 1 or more"),
        ("mixtral", EXPERTS | {"num_experts_per_tok": 9}, "sends a token to 9 of its 8 experts"),
        ("llama", {"num_key_value_heads": 0}, "has no num_key_value_heads of 1 or more"),
        ("llama", {"head_dim": 0}, "has no head_dim of 1 or more"),
    ],
)  # fmt: skip
def test_refuses_what_it_cannot_count(
    kind: str, changes: Values, words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words) as caught:
        shape_of(folder(tmp_path, kind, SMALL | changes))
    assert "\n" not in str(caught.value)


def test_capped_scores_are_kept_in_memory(tmp_path: Path) -> None:
    capped, free = (
        shape_of(folder(tmp_path / str(cap), "gemma2", SMALL | {"attn_logit_softcapping": cap}))
        for cap in (50.0, None)
    )
    config = AutoConfig.for_model("gemma2", **SMALL)
    with torch.device("meta"):
        assert AutoModelForCausalLM.from_config(config).config._attn_implementation == "eager"
    more = [
        layer_bytes(config, capped) - layer_bytes(config, free)
        for config in (RunConfig(sequence_length=length).resolved() for length in (512, 1024))
    ]
    assert more == [8 * 8 * 512, 8 * 8 * 1024]  # bytes a token: 8 a score, 8 heads


def test_layers_that_fp8_cannot_take_count_as_bf16(tmp_path: Path) -> None:
    shape = shape_of(folder(tmp_path, "llama", SMALL | {"intermediate_size": 700}))
    assert {*shape.linears} - {*shape.convertible} == {
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"
    }  # fmt: skip
    assert shape.convertible_parameters == 2 * 256 * (8 + 4) * 48
