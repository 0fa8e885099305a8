"""What the laws need to know of a model: its matrices, counted from its configuration."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

from fp8study.core.errors import UserError
from fp8study.core.presets import (
    PRESETS,
    SWIGLU_MLPS,
    attention_window,
    hf_config,
    text_config,
)
from fp8study.core.recipes import ALIGNMENT, is_aligned

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: The linear layers of attention and of a gated MLP, each apart or as one matrix.
_ATTENTION = (("q_proj", "k_proj", "v_proj", "o_proj"), ("qkv_proj", "o_proj"))
_MLP = (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"))
_APART = tuple(f"self_attn.{name}" for name in _ATTENTION[0]) + tuple(f"mlp.{n}" for n in _MLP[0])
#: Kinds of transformers' models with a mixture of experts in place of the MLP.
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
#: Kinds that are planned like a Llama and hold other weights.
_UNLIKE = ("gemma4_unified_text", "helium", "hyperclovax", "muse_glimmer_text", "olmo",
           "phi4_multimodal")  # fmt: skip
#: A configuration of more weights is a slip.
_MOST_PARAMETERS = 1e14
#: Norms of a decoder layer, of a hidden size each, where they are not two.
_NORMS = {"cohere": 1, "cohere2": 1, "gemma2": 4, "gemma3_text": 4, "glm4": 4}
#: Kinds of attention that every key of the past, or of a window, takes part in.
_ATTENDING = ("full_attention", "sliding_attention", "chunked_attention")


@dataclass(frozen=True)
class ModelShape:
    """A decoder of equal layers: attention with grouped keys, and a gated MLP."""

    name: str
    hidden_size: int
    intermediate_size: int
    """Of one expert, where there are experts."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool
    """Whether the loss head shares the embedding's weight."""
    has_qk_norm: bool = False
    """Whether queries and keys are normalised."""
    layer_vectors: int = 0
    """Weights of one decoder layer's norms and biases."""
    parts: tuple[str, ...] = _APART
    """Names of a decoder layer's linear layers, one expert's MLP."""
    is_swiglu: bool = False
    """Whether its MLPs are SwiGLU without bias, of a kind whose SwiGLU can write FP8."""
    keeps_scores: bool = False
    """Whether attention keeps every score for its backward pass, as where scores are capped."""
    num_experts: int = 1
    num_active_experts: int = 1
    shared_size: int = 0
    """Intermediate size of an expert that every token goes to; 0: there is none."""
    window: int | None = None
    """Tokens that attention looks back at, in some layers or all; None: at all."""
    asks_gpu: bool = False
    """Whether its forward pass waits to see a number, as where RoPE is dynamic, or experts are."""
    left_out: tuple[str, ...] = ()
    """What it has that is no part of this."""

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @cached_property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Input and output features of `parts` and of a shared expert."""
        h, f, q, kv = self.hidden_size, self.intermediate_size, self.query_size, self.kv_size
        sizes = {
            "self_attn.q_proj": (h, q), "self_attn.k_proj": (h, kv), "self_attn.v_proj": (h, kv),
            "self_attn.qkv_proj": (h, q + 2 * kv), "self_attn.o_proj": (q, h),
            "mlp.gate_proj": (h, f), "mlp.up_proj": (h, f), "mlp.gate_up_proj": (h, 2 * f),
            "mlp.down_proj": (f, h),
        }  # fmt: skip
        found = {name: sizes[name] for name in self.parts}
        if self.shared_size:
            ends = {"gate_proj": (h, self.shared_size), "up_proj": (h, self.shared_size),
                    "down_proj": (self.shared_size, h)}  # fmt: skip
            found |= {f"mlp.shared_expert.{name}": size for name, size in ends.items()}
        return found

    @cached_property
    def convertible(self) -> dict[str, tuple[int, int]]:
        """Those that torchao can make compute in FP8: of a mixture, attention's alone."""
        return {
            name: size for name, size in self.linears.items()
            if (self.num_experts == 1 or name.startswith("self")) and is_aligned(*size)
        }  # fmt: skip

    @cached_property
    def convertible_parameters(self) -> int:
        """Weights of one decoder layer's `convertible`."""
        return sum(wide * high for wide, high in self.convertible.values())

    @property
    def active_parameters(self) -> int:
        """Weights of one decoder layer's linear layers that a token meets, but for the router."""
        return self._with_experts(self.num_active_experts)

    def _with_experts(self, number: int) -> int:
        return sum(
            wide * high * (number if name in self.parts and name.startswith("mlp") else 1)
            for name, (wide, high) in self.linears.items()
        )

    @property
    def head_parameters(self) -> int:
        """Weights of the loss head; as many as the embedding's."""
        return self.vocab_size * self.hidden_size

    @property
    def root_parameters(self) -> int:
        """Weights outside the decoder layers, but for the last norm."""
        return self.head_parameters * (1 if self.is_tied else 2)

    @property
    def router_parameters(self) -> int:
        """Weights that choose a token's experts, in one decoder layer."""
        routers = (self.num_experts if self.num_experts > 1 else 0) + bool(self.shared_size)
        return self.hidden_size * routers

    @cached_property
    def layer_parameters(self) -> int:
        """Weights of one decoder layer's linear layers, all experts."""
        return self._with_experts(self.num_experts) + self.router_parameters

    @cached_property
    def num_parameters(self) -> int:
        layers = self.num_layers * (self.layer_parameters + self.layer_vectors)
        return layers + self.hidden_size + self.root_parameters

    @property
    def num_active_parameters(self) -> int:
        """Those that a token meets: of a mixture's experts the active ones."""
        idle = self._with_experts(self.num_experts) - self.active_parameters
        return self.num_parameters - self.num_layers * idle

    @cache  # noqa: B019 (frozen, and few)
    def matched(self, patterns: tuple[str, ...]) -> int:
        """Return how many weights of decoder layers are in layers that a pattern names."""
        layers = itertools.product(range(self.num_layers), self.linears.items())
        return sum(
            wide * high for number, (name, (wide, high)) in layers
            if any(fnmatch.fnmatchcase(f"model.layers.{number}.{name}", p) for p in patterns)
        )  # fmt: skip


def shape_of(model: str) -> ModelShape:
    """Return the shape of a preset, a folder with a ``config.json``, or a hub id.

    Raises:
        UserError: As `hf_config`, the model is of a kind that the laws do not know, it is no model
            that can be, or FP8 can take none of its layers.
    """
    if model in PRESETS:
        found = _shape(model, PRESETS[model], _APART)
    else:
        config = hf_config(model, partial(_check_kind, model))
        values: dict[str, Any] = config.to_dict()
        plan = getattr(config, "base_model_tp_plan", None) or {}
        found = _shape(model, values, _parts(model, values, plan))
    if not found.convertible:
        raise UserError(
            f"model: no linear layer of '{model}' has two dimensions that divide by {ALIGNMENT}, "
            "as FP8 asks; train it in BF16"
        )
    if found.num_parameters > _MOST_PARAMETERS:
        raise UserError(
            f"model: '{model}' has {found.num_parameters:.2g} weights, more than "
            f"{_MOST_PARAMETERS:.0e}; mend its configuration"
        )
    return found


def _check_kind(model: str, usual: PreTrainedConfig) -> None:
    """Refuse a kind of model before its fields are looked at.

    Raises:
        UserError: No law is known of it.
    """
    if text_config(usual) is not usual:
        raise UserError(
            f"model: '{model}' takes more than text, of which no law is known here; give a "
            "folder whose config.json holds its text_config alone"
        )
    plan = getattr(usual, "base_model_tp_plan", None) or {}
    _parts(model, {"model_type": usual.model_type}, plan)


def _parts(model: str, values: Mapping[str, Any], plan: Collection[str]) -> tuple[str, ...]:
    """Return the names of a layer's linear layers, by which transformers plans to split a model.

    Raises:
        UserError: They are no attention and gated MLP, or not all layers are alike.
    """
    kind = str(values.get("model_type"))
    names = {name.removeprefix("layers.*.") for name in plan if not name.endswith("_norm")}
    if kind in MIXTURES:
        if (values.get("decoder_sparse_step") or 1) > 1 or values.get("mlp_only_layers"):
            raise UserError(
                f"model: '{model}' has experts in some of its layers only, of which no law is "
                "known here; give a model whose layers are all alike"
            )
        return _APART
    attends = {*(values.get("layer_types") or ())} <= {*_ATTENDING}
    for attention, mlp in itertools.product(_ATTENTION, _MLP):
        parts = (*(f"self_attn.{name}" for name in attention), *(f"mlp.{name}" for name in mlp))
        if {*parts} == names and attends and kind not in _UNLIKE:
            return parts
    raise UserError(
        f"model: '{model}' is a {kind}, of which no law is known here; give a decoder of attention "
        f"and gated MLPs, as Llama, Qwen3 or Gemma, or a mixture ({', '.join(MIXTURES)})"
    )


def _shape(model: str, values: Mapping[str, Any], parts: tuple[str, ...]) -> ModelShape:
    """Read a configuration's numbers.

    Raises:
        UserError: One is missing, none, or does not go with another.
    """

    def count(*names: str) -> int:
        found = next((values[name] for name in names if values.get(name) is not None), None)
        if not isinstance(found, int) or found < 1:
            raise UserError(
                f"model: the configuration of '{model}' has no {' or '.join(names)} of 1 or more; "
                "mend it"
            )
        return found

    kind = str(values.get("model_type"))
    is_mixture = kind in MIXTURES
    hidden, heads = count("hidden_size"), count("num_attention_heads")
    named = "num_key_value_heads"
    kv_heads = heads if values.get(named) is None else count(named)
    if heads % kv_heads:
        raise UserError(
            f"model: '{model}' has {heads} heads and {kv_heads} key-value heads; heads must be a "
            "multiple"
        )
    has_head_dim = values.get("head_dim") is not None
    if hidden % heads and not has_head_dim:
        raise UserError(
            f"model: '{model}' has a hidden_size of {hidden} and {heads} heads; hidden_size must "
            "be a multiple, or head_dim be given"
        )
    num_experts = count("num_local_experts", "num_experts") if is_mixture else 1
    num_active = count("num_experts_per_tok") if is_mixture else 1
    if num_active > num_experts:
        raise UserError(
            f"model: '{model}' sends a token to {num_active} of its {num_experts} experts; lower "
            "num_experts_per_tok"
        )
    shape = ModelShape(
        name=model,
        hidden_size=hidden,
        intermediate_size=count(
            *["moe_intermediate_size"] * (is_mixture and kind.startswith("qwen")),
            "intermediate_size",
        ),
        num_layers=count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=count("head_dim") if has_head_dim else hidden // heads,
        vocab_size=count("vocab_size"),
        is_tied=bool(values.get("tie_word_embeddings")),
        has_qk_norm=_qk_norm(kind, values) is not None,
        parts=parts,
        num_experts=num_experts,
        num_active_experts=num_active,
        shared_size=count("shared_expert_intermediate_size") if kind == "qwen2_moe" else 0,
        is_swiglu=kind in SWIGLU_MLPS
        and values.get("hidden_act", "silu") == "silu"
        and not values.get("mlp_bias"),
        keeps_scores=bool(values.get("attn_logit_softcapping")),
        window=attention_window(values),
        asks_gpu=num_experts > 1
        or "dynamic" in str(values.get("rope_parameters") or values.get("rope_scaling")),
    )
    return dataclasses.replace(
        shape, layer_vectors=_vectors(kind, values, shape), left_out=tuple(_left_out(shape, values))
    )


def _qk_norm(kind: str, values: Mapping[str, Any]) -> str | None:
    """Return what queries and keys are normalised over: each ``head``, ``all`` of them; or None."""
    if kind.startswith("olmo") or values.get("use_qk_norm"):
        return "all"
    return "head" if kind.startswith(("qwen3", "gemma3", "exaone4")) else None


def _vectors(kind: str, values: Mapping[str, Any], shape: ModelShape) -> int:
    """Return the weights of a decoder layer's norms and biases."""
    h, f, q, kv = shape.hidden_size, shape.intermediate_size, shape.query_size, shape.kv_size
    norms = _NORMS.get(kind, 2) * h
    norms += {"head": 2 * shape.head_dim, "all": q + kv, None: 0}[_qk_norm(kind, values)]
    everywhere = bool(values.get("use_bias"))
    of_queries = everywhere or bool(values.get("attention_bias")) or kind.startswith("qwen2")
    of_output = values.get(
        "attention_out_bias", of_queries and not kind.startswith(("qwen2", "glm"))
    )
    biases = (q + 2 * kv) * of_queries + h * bool(of_output)
    return norms + biases + (2 * f + h) * (everywhere or bool(values.get("mlp_bias")))


#: What is left out of every mixture, and decides of it.
EXPERTS_IN_BF16 = "FP8 for the experts, which is not trained in here: FP8 is attention's alone"
_MXFP8 = "MXFP8, Blackwell's own FP8, which is not trained in here"


def _left_out(shape: ModelShape, values: Mapping[str, Any]) -> Iterator[str]:
    if any("softcapping" in name and value for name, value in values.items()):
        yield "soft caps of scores and logits, but for the scores that attention then keeps"
    if _NORMS.get(str(values.get("model_type")), 2) > 2:
        yield "norms after attention and MLP, in the time of a step"
    if shape.num_experts > 1:
        yield "routing, moving tokens between experts, experts with more tokens than others"
        yield EXPERTS_IN_BF16


def left_out_of(shape: ModelShape, sequence_length: int, architecture: str) -> list[str]:
    """Say what the laws leave out of a model's sequences of so many tokens, on such GPUs."""
    found = [*shape.left_out, *[_MXFP8] * (architecture == "Blackwell")]
    if shape.window and shape.window < sequence_length:
        found.append(f"attention's window of {shape.window:,} tokens: it is counted over them all")
    return found
