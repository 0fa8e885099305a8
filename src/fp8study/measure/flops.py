"""Useful arithmetic of one training token, counted once and for all.

Conventions differ by a quarter between tools, so the one used here is stated: every linear layer
counts, the loss head also where it shares the embedding's weights; the embedding look-up is no
product; attention counts in full, without the causal discount; recomputation does not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fp8study.core.config import RunConfig
from fp8study.core.recipes import RECIPES
from fp8study.model.build import build_model
from fp8study.model.float8 import float8_filter, is_aligned, is_converted

#: Two FLOPs a weight forward, two for the input's gradient, two for the weight's.
_PER_WEIGHT = 6
#: How much faster FP8 matrix units are than BF16 ones, by datasheet, on every GPU that has them.
_FP8_RATIO = 2.0


@dataclass(frozen=True)
class Work:
    """One token's arithmetic in a run, forward and backward."""

    flops_per_token: int
    attention_flops_per_token: int
    fp8_flops_per_token: float

    @property
    def fp8_share(self) -> float:
        """Share of the FLOPs that are done in FP8, 0 to 1."""
        return self.fp8_flops_per_token / self.flops_per_token


def num_matmul_parameters(model: torch.nn.Module) -> int:
    """Return the weights that every token is multiplied with."""
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    return sum(m.in_features * m.out_features for m in linears)


def work_per_token(model: torch.nn.Module, hf_config: Any, config: RunConfig) -> Work:
    """Count a token's arithmetic in the model that is really trained.

    Args:
        model: Converted as the run converts it; sharded or not.
        hf_config: Its transformers configuration.
        config: The run.
    """
    converted = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and is_converted(m)]
    in_fp8 = sum(m.in_features * m.out_features for m in converted)
    return Work(
        flops_per_token(num_matmul_parameters(model), hf_config, config.sequence_length),
        attention_flops_per_token(hf_config, config.sequence_length),
        _PER_WEIGHT * RECIPES[config.precision].fp8_share * in_fp8,
    )


def uncounted_pct(model: torch.nn.Module) -> float:
    """Return the share of the weights that multiply tokens but are no linear layer, in percent.

    GPT-2's `Conv1D` and the fused experts of a mixture are such; neither the FLOPs count nor
    torchao's conversion sees them. Embeddings are looked up and do not count. Call before
    sharding.
    """
    known = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    weights = [p for p in model.parameters() if p.ndim >= 2]
    total = sum(p.numel() for p in weights)
    return 100 * sum(p.numel() for p in weights if id(p) not in known) / total if total else 0.0


def attention_flops_per_token(hf_config: Any, sequence_length: int) -> int:
    """Return forward and backward FLOPs of scores and their product with the values.

    ``12 · layers · heads · head_dim · sequence_length`` (Chowdhery et al. 2022, PaLM, appendix
    B), every query against every key.

    Args:
        hf_config: A transformers configuration.
        sequence_length: Tokens per sequence.
    """
    hf_config = hf_config.get_text_config()
    heads = hf_config.num_attention_heads
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads
    return int(12 * hf_config.num_hidden_layers * heads * head_dim * sequence_length)


def flops_per_token(num_matmul_params: int, hf_config: Any, sequence_length: int) -> int:
    """Return forward and backward FLOPs of one token, the headline count.

    Args:
        num_matmul_params: From `num_matmul_parameters`.
        hf_config: A transformers configuration.
        sequence_length: Tokens per sequence.
    """
    return _PER_WEIGHT * num_matmul_params + attention_flops_per_token(hf_config, sequence_length)


def document_a_flops_per_token(hf_config: Any, sequence_length: int) -> int:
    """Return document A's count, the one of Accelerate's FSDP2 examples, to restate its figures.

    Its term for the attention projections lacks the hidden size, and it has no loss head.
    """
    heads, kv_heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
    head_dim = hf_config.hidden_size // heads
    mlp = 18 * hf_config.hidden_size * hf_config.intermediate_size
    projections = 12 * head_dim * (heads + kv_heads)
    scores = 12 * heads * head_dim * sequence_length
    return int((mlp + projections + scores) * hf_config.num_hidden_layers)


def document_b_flops_per_token(
    num_matmul_params: int, hf_config: Any, sequence_length: int, compiled: bool
) -> int:
    """Return document B's count: ours, plus the embedding in its compiled arms, by accident."""
    embedding = hf_config.vocab_size * hf_config.hidden_size if compiled else 0
    return flops_per_token(num_matmul_params + embedding, hf_config, sequence_length)


@dataclass(frozen=True)
class FlopsTable:
    """FLOPs of one token, forward and backward, by component."""

    model: str
    precision: str
    sequence_length: int
    linear: dict[str, int]
    """By the layer's own name (``q_proj`` … ``lm_head``), summed over the model's layers."""
    attention: int
    """Scores and values, in full."""
    num_matmul_parameters: int
    eligible: int
    """Linear layers whose two dimensions divide by 16: what FP8 could take over."""
    converted: int
    """What the recipe and the filter really compute in FP8."""
    document_a: int
    document_b_compiled: int

    @property
    def total(self) -> int:
        """The headline count."""
        return sum(self.linear.values()) + self.attention

    @property
    def total_causal(self) -> float:
        """With each query meeting only the keys before it: (S + 1) / 2 of S on average."""
        causal = self.attention * (self.sequence_length + 1) / (2 * self.sequence_length)
        return sum(self.linear.values()) + causal

    def speedup_bound(self, flops: int) -> float:
        """Return Amdahl's bound if `flops` ran at twice the rate and nothing else took time."""
        share = flops / self.total
        return 1 / (1 - share + share / _FP8_RATIO)

    def to_dict(self) -> dict[str, Any]:
        """Return everything, derived figures included, as JSON types."""
        return vars(self) | {
            "total": self.total,
            "total_causal": self.total_causal,
            "eligible_pct": 100 * self.eligible / self.total,
            "converted_pct": 100 * self.converted / self.total,
            "speedup_bound_eligible": self.speedup_bound(self.eligible),
            "speedup_bound_converted": self.speedup_bound(self.converted),
        }


def count_flops(config: RunConfig) -> FlopsTable:
    """Count a run's FLOPs from the model itself, built without memory.

    Args:
        config: Its model, sequence length, precision and skip patterns are used.

    Raises:
        UserError: As `fp8study.model.build.hf_config`, or a skip pattern matches nothing.
    """
    model = build_model(config.model, torch.bfloat16, torch.device("meta"), seed=0)
    converts = float8_filter(config, model)
    share = RECIPES[config.precision].fp8_share
    linear: dict[str, int] = {}
    eligible, converted = 0, 0.0
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        flops = _PER_WEIGHT * module.weight.numel()
        leaf = name.rpartition(".")[2]
        linear[leaf] = linear.get(leaf, 0) + flops
        if is_aligned(module):
            eligible += flops
        if converts(module, name):
            converted += share * flops
    matmul_parameters = num_matmul_parameters(model)
    length = config.sequence_length
    return FlopsTable(
        model=config.model,
        precision=config.precision,
        sequence_length=length,
        linear=linear,
        attention=attention_flops_per_token(model.config, length),
        num_matmul_parameters=matmul_parameters,
        eligible=eligible,
        converted=round(converted),
        document_a=document_a_flops_per_token(model.config, length),
        document_b_compiled=document_b_flops_per_token(
            matmul_parameters, model.config, length, compiled=True
        ),
    )


def flops_text(table: FlopsTable) -> str:
    """Return the table for reading, in GFLOP a token."""
    rows = [*table.linear.items(), ("attention scores", table.attention)]
    lines = [f"{table.model}, {table.sequence_length} tokens, forward and backward, a token"]
    lines += [f"  {n:<24}{f / 1e9:>9.3f} GFLOP {100 * f / table.total:>6.1f} %" for n, f in rows]
    lines += [
        f"  {'total':<24}{table.total / 1e9:>9.3f} GFLOP  "
        f"({table.num_matmul_parameters:,} matmul weights)",
        f"  {'total, causal':<24}{table.total_causal / 1e9:>9.3f} GFLOP",
        f"FP8 could take {100 * table.eligible / table.total:.1f} % of it: at most "
        f"{table.speedup_bound(table.eligible):.2f} × as fast",
        f"{table.precision} takes {100 * table.converted / table.total:.1f} %: at most "
        f"{table.speedup_bound(table.converted):.2f} × as fast",
        f"Document A's count: {table.document_a / 1e9:.3f} GFLOP "
        f"({100 * table.document_a / table.total:.0f} % of ours); document B's in its compiled "
        f"arms: {table.document_b_compiled / 1e9:.3f} GFLOP "
        f"({100 * table.document_b_compiled / table.total:.0f} %)",
    ]
    return "\n".join(lines)
