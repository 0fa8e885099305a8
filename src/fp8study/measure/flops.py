"""Useful arithmetic of one training token, counted once and for all.

Conventions differ by a quarter between tools, so the one used here is stated: every matrix that a
token is multiplied with counts, the loss head also where it shares the embedding's weights, and of
a mixture's experts the active ones; the embedding look-up does not; attention counts in full,
without the causal discount; recomputation does not count.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from fp8study.core.config import ResolvedConfig
from fp8study.core.presets import attention_window
from fp8study.core.recipes import ALIGNMENT, RECIPES, is_aligned
from fp8study.model.build import build_model
from fp8study.model.float8 import float8_filter, is_converted

#: Parts of a multimodal model that text does not pass.
_OTHER_INPUTS = re.compile(r"(^|\.)(vision|visual|audio|image|multi_modal)")
_ROUTER = re.compile(r"(^|\.)(router|gate)$")
_LISTED_EXPERT = re.compile(r"(\bexperts)\.\d+(\.|$)")
#: What transformers' configurations call the number of experts that each token goes to.
_ACTIVE_EXPERTS = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k",
    "top_k_experts",
)  # fmt: skip
#: Two FLOPs a weight forward, two for the input's gradient, two for the weight's.
_PER_WEIGHT = 6
#: How much faster FP8 tensor cores are than BF16 ones, by datasheet, on every GPU that has them.
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

    def rates(self, config: ResolvedConfig, step_seconds: float) -> tuple[float, float]:
        """Return a GPU's tokens per second and its TFLOP/s, in steps that take so long."""
        rate = config.tokens_per_step / config.num_gpus / step_seconds
        return rate, rate * self.flops_per_token / 1e12


@dataclass(frozen=True)
class MatmulWeight:
    """A weight that tokens are multiplied with."""

    label: str
    """Its layer's own name (``q_proj`` … ``lm_head``); ``router``, ``experts.down_proj``."""
    name: str
    """The full name of its module."""
    module: torch.nn.Module
    num_per_token: float
    """Elements that a token meets: of a mixture's experts, those of the active ones."""


def matmul_weights(model: torch.nn.Module) -> list[MatmulWeight]:
    """Find every weight that text is multiplied with, in a model sharded or not, converted or not.

    Linear layers, GPT-2's `Conv1D`, routers, and a mixture's experts, which transformers keeps in
    one tensor [experts, …, …], or each by itself in a list.
    """
    active = _num_active_experts(model)
    found = []
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if _OTHER_INPUTS.search(name):
            continue
        own = dict(module.named_parameters(recurse=False))
        kinds = {kind.__name__ for kind in type(module).mro()}
        if isinstance(module, torch.nn.Linear):
            share, listed = 1.0, _LISTED_EXPERT.search(name)
            if listed and active:
                share = active / len(model.get_submodule(name[: listed.end(1)]))  # type: ignore[arg-type]
            size = module.in_features * module.out_features
            found.append(MatmulWeight(leaf, name, module, share * size))
        elif "Conv1D" in kinds:
            found.append(MatmulWeight(leaf, name, module, own["weight"].numel()))
        elif _ROUTER.search(name) and "weight" in own and own["weight"].ndim == 2:
            found.append(MatmulWeight("router", name, module, own["weight"].numel()))
        elif active and any("Experts" in kind for kind in kinds):
            found += [
                MatmulWeight(f"experts.{key}", name, module, active * p.numel() / p.shape[0])
                for key, p in own.items()
                if p.ndim == 3
            ]
    return found


def _num_active_experts(model: torch.nn.Module) -> int | None:
    """Return to how many experts each token goes; None where the configuration does not say."""
    config = getattr(model, "config", None)
    settings = config.get_text_config() if config is not None else None
    known = (getattr(settings, name, None) for name in _ACTIVE_EXPERTS)
    return next((int(number) for number in known if isinstance(number, int)), None)


def num_matmul_parameters(model: torch.nn.Module) -> int:
    """Return how many weights a token is multiplied with."""
    return round(sum(weight.num_per_token for weight in matmul_weights(model)))


def work_per_token(model: torch.nn.Module, hf_config: Any, config: ResolvedConfig) -> Work:
    """Count a token's arithmetic in the model that is really trained: converted, maybe sharded."""
    in_fp8 = sum(w.num_per_token for w in matmul_weights(model) if is_converted(w.module))
    attention = attention_flops_per_token(hf_config, config.sequence_length)
    return Work(
        _PER_WEIGHT * num_matmul_parameters(model) + attention,
        attention,
        _PER_WEIGHT * RECIPES[config.precision].fp8_share * in_fp8,
    )


def uncounted_pct(model: torch.nn.Module) -> float:
    """Return the share of the weights that no count of FLOPs here knows, in percent.

    State-space scans and short convolutions are such. Call before sharding.
    """
    return _outside_pct(model, {w.module for w in matmul_weights(model)})


def beyond_fp8_pct(model: torch.nn.Module) -> float:
    """Return the share of the weights that are in no nn.Linear, which torchao alone converts, %.

    GPT-2's `Conv1D` and the fused experts of a mixture are such. Call before sharding.
    """
    return _outside_pct(model, {m for m in model.modules() if isinstance(m, torch.nn.Linear)})


def _outside_pct(model: torch.nn.Module, known: set[torch.nn.Module]) -> float:
    """Return the share of matrices outside the `known` modules; embeddings are looked up."""
    total = outside = 0
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) or _OTHER_INPUTS.search(name):
            continue
        own = module.named_parameters(recurse=False)
        size = sum(p.numel() for key, p in own if p.ndim >= 2 and not key.endswith("bias"))
        total += size
        outside += 0 if module in known else size
    return 100 * outside / total if outside else 0.0


def attention_flops_per_token(hf_config: Any, sequence_length: int) -> int:
    """Return a token's forward and backward FLOPs of scores and their product with the values.

    ``12 · layers · heads · head_dim · sequence_length`` (Chowdhery et al. 2022, PaLM, appendix
    B), every query against every key; layers without attention have none.
    """
    settings = hf_config.get_text_config()
    layers = _num_attention_layers(settings)
    if not layers:
        return 0
    heads = settings.num_attention_heads
    head_dim = getattr(settings, "head_dim", None) or settings.hidden_size // heads
    of_scores = of_values = head_dim
    if getattr(settings, "qk_nope_head_dim", None):  # DeepSeek's latent attention
        of_scores = settings.qk_nope_head_dim + settings.qk_rope_head_dim
        of_values = settings.v_head_dim
    return int(6 * layers * heads * (of_scores + of_values) * sequence_length)


def _num_attention_layers(settings: Any) -> int:
    kinds = getattr(settings, "layer_types", None) or getattr(settings, "layers_block_type", None)
    if not getattr(settings, "num_attention_heads", None):
        return 0
    if not kinds:
        return int(settings.num_hidden_layers)
    return sum("attention" in kind and "linear" not in kind for kind in kinds)


def document_a_flops_per_token(hf_config: Any, sequence_length: int) -> int | None:
    """Return document A's count, the one of Accelerate's FSDP2 examples, to restate its figures.

    Its term for the attention projections lacks the hidden size, and it has no loss head. None
    for a mixture, and for a model that lacks one of the settings it is made of.
    """
    settings = hf_config.get_text_config()
    names = ("num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size")
    heads, kv_heads, hidden, inner = (getattr(settings, name, None) for name in names)
    is_mixture = any(getattr(settings, name, None) for name in _ACTIVE_EXPERTS)
    if is_mixture or not (heads and kv_heads and hidden and inner):
        return None
    head_dim = hidden // heads
    per_layer = 18 * hidden * inner + 12 * head_dim * (heads + kv_heads)
    return int((per_layer + 12 * heads * head_dim * sequence_length) * settings.num_hidden_layers)


@dataclass(frozen=True)
class FlopsTable:
    """FLOPs of one token, forward and backward, by component."""

    model: str
    precision: str
    path: str
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
    document_a: int | None
    document_b_compiled: int
    beyond_fp8: dict[str, str]
    """Why FP8 cannot take a label of `linear`, all or some of its layers."""
    left_out: list[str]
    """What is in no figure here."""

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
        """Return Amdahl's bound: `flops` at twice the rate, and nothing but GEMMs takes time.

        Of the causal count: a kernel that skips masked scores has fewer that FP8 cannot speed up.
        """
        share = flops / self.total_causal
        return 1 / (1 - share + share / _FP8_RATIO)

    def to_dict(self) -> dict[str, Any]:
        """Return everything, derived figures included, as JSON types."""
        return vars(self) | {
            "total": self.total,
            "total_causal": self.total_causal,
            "eligible_pct": 100 * self.eligible / self.total,
            "converted_pct": 100 * self.converted / self.total,
            "eligible_causal_pct": 100 * self.eligible / self.total_causal,
            "converted_causal_pct": 100 * self.converted / self.total_causal,
            "speedup_bound_eligible": self.speedup_bound(self.eligible),
            "speedup_bound_converted": self.speedup_bound(self.converted),
        }


def count_flops(config: ResolvedConfig) -> FlopsTable:
    """Count a run's FLOPs from the model itself, built without memory.

    Raises:
        UserError: As `fp8study.core.presets.hf_config`, or a skip pattern matches nothing.
    """
    model = build_model(config.model, torch.bfloat16, torch.device("meta"), seed=0)
    converts = float8_filter(config, model)
    linear: dict[str, float] = defaultdict(float)
    eligible = converted = 0.0
    beyond: dict[str, str] = {}
    for weight in matmul_weights(model):
        linear[weight.label] += _PER_WEIGHT * weight.num_per_token
        if why := _why_beyond_fp8(weight.module):
            beyond[weight.label] = why
        else:
            eligible += _PER_WEIGHT * weight.num_per_token
        if converts(weight.module, weight.name):
            converted += _PER_WEIGHT * weight.num_per_token
    matmul_parameters = num_matmul_parameters(model)
    length, settings = config.sequence_length, model.config.get_text_config()
    attention = attention_flops_per_token(model.config, length)
    uncounted, layers = uncounted_pct(model), settings.num_hidden_layers
    left_out = []
    if uncounted > 0.5:
        left_out.append(
            f"the arithmetic of {uncounted:.1f} % of the weights, in layers of another kind"
        )
    if others := layers - _num_attention_layers(settings):
        left_out.append(f"how {others} of {layers} layers mix tokens without attention")
    if (window := attention_window(settings.to_dict()) or length) < length:
        left_out.append(f"that attention looks back at {window:,} tokens, in some layers or all")
    return FlopsTable(
        model=config.model,
        precision=config.precision,
        path=config.path,
        sequence_length=length,
        linear={label: round(flops) for label, flops in linear.items()},
        attention=attention,
        num_matmul_parameters=matmul_parameters,
        eligible=round(eligible),
        converted=round(RECIPES[config.precision].fp8_share * converted),
        document_a=document_a_flops_per_token(model.config, length),
        # Its compiled arms count the embedding too, by accident.
        document_b_compiled=attention
        + _PER_WEIGHT * (matmul_parameters + settings.vocab_size * settings.hidden_size),
        beyond_fp8=beyond,
        left_out=left_out,
    )


def _why_beyond_fp8(module: torch.nn.Module) -> str | None:
    """Return why torchao cannot make a layer compute in FP8; None if it can."""
    if not isinstance(module, torch.nn.Linear):
        return f"{type(module).__name__} in place of nn.Linear, which torchao alone converts"
    if not is_aligned(module.in_features, module.out_features):
        size = f"{module.in_features} × {module.out_features}"
        return f"{size}: a side does not divide by {ALIGNMENT}"
    return None


def flops_text(table: FlopsTable) -> str:
    """Return the table for reading, in GFLOP a token."""
    rows = [*table.linear.items(), ("attention scores", table.attention)]
    of = table.to_dict()
    lines = [f"{table.model}, {table.sequence_length} tokens, forward and backward, a token"]
    lines += [f"  {n:<24}{f / 1e9:>9.3f} GFLOP {100 * f / table.total:>6.1f} %" for n, f in rows]
    lines += [
        f"  {'total':<24}{table.total / 1e9:>9.3f} GFLOP  "
        f"({table.num_matmul_parameters:,} matmul weights)",
        f"  {'total, causal':<24}{table.total_causal / 1e9:>9.3f} GFLOP",
        # The bound is of the causal count, and so is the share beside it.
        f"FP8 could take {of['eligible_causal_pct']:.1f} % of the causal total: at most "
        f"{of['speedup_bound_eligible']:.2f} × as fast (GEMMs alone)",
        f"{table.precision}, path={table.path}, takes {of['converted_causal_pct']:.1f} % of the "
        f"causal total: at most {of['speedup_bound_converted']:.2f} × as fast",
        f"Of the total, masked scores too: it could take {of['eligible_pct']:.1f} %, and takes "
        f"{of['converted_pct']:.1f} %",
    ]
    reasons: dict[str, list[str]] = {}
    for label, why in table.beyond_fp8.items():
        reasons.setdefault(why, []).append(label)
    lines += [f"FP8 cannot take {', '.join(names)}: {why}" for why, names in reasons.items()]
    lines += [f"Not counted: {what}" for what in table.left_out]
    counts = {"A": table.document_a, "B, compiled arms": table.document_b_compiled}
    lines += [
        f"As document {name} would count (docs/sources.md): {flops / 1e9:.3f} GFLOP "
        f"({100 * flops / table.total:.0f} % of ours)"
        for name, flops in counts.items()
        if flops is not None
    ]
    return "\n".join(lines)
