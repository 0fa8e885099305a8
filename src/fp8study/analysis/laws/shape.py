"""What the laws need to know of a model: its matrices, counted from its configuration."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from fp8study.core.errors import UserError
from fp8study.core.presets import PRESETS, hf_config, text_config

#: Kinds of transformers' models whose decoder layers are attention and a gated MLP.
DENSE = ("llama", "mistral", "qwen2", "qwen3")
#: The same with a mixture of experts in place of the MLP.
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
#: Those that normalise queries and keys.
_QK_NORM = ("qwen3", "qwen3_moe", "olmoe")


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
    num_experts: int = 1
    num_active_experts: int = 1

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Input and output features of a decoder layer's linear layers, one expert's MLP."""
        h, f, q, kv = self.hidden_size, self.intermediate_size, self.query_size, self.kv_size
        return {
            "self_attn.q_proj": (h, q), "self_attn.k_proj": (h, kv), "self_attn.v_proj": (h, kv),
            "self_attn.o_proj": (q, h),
            "mlp.gate_proj": (h, f), "mlp.up_proj": (h, f), "mlp.down_proj": (f, h),
        }  # fmt: skip

    @property
    def convertible(self) -> dict[str, tuple[int, int]]:
        """Those that torchao can make compute in FP8: of a mixture, attention's alone."""
        names = [name for name in self.linears if self.num_experts == 1 or name.startswith("self")]
        return {name: self.linears[name] for name in names}

    @property
    def convertible_parameters(self) -> int:
        """Weights of one decoder layer's `convertible`."""
        return sum(wide * high for wide, high in self.convertible.values())

    @property
    def head_parameters(self) -> int:
        """Weights of the loss head; as many as the embedding's."""
        return self.vocab_size * self.hidden_size

    @property
    def root_parameters(self) -> int:
        """Weights outside the decoder layers, but for the last norm."""
        return self.head_parameters * (1 if self.is_tied else 2)

    @property
    def layer_parameters(self) -> int:
        """Weights of one decoder layer's linear layers, all experts."""
        sizes = {name: wide * high for name, (wide, high) in self.linears.items()}
        mlp = sum(size for name, size in sizes.items() if name.startswith("mlp"))
        router = self.hidden_size * self.num_experts if self.num_experts > 1 else 0
        return sum(sizes.values()) + (self.num_experts - 1) * mlp + router

    @property
    def num_parameters(self) -> int:
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.has_qk_norm else 0)
        layers = self.num_layers * (self.layer_parameters + norms)
        return layers + self.hidden_size + self.root_parameters

    def modules(self) -> Iterator[tuple[str, int]]:
        """Yield every decoder layer's linear layers: full name and number of weights."""
        for number, (name, (wide, high)) in itertools.product(
            range(self.num_layers), self.linears.items()
        ):
            yield f"model.layers.{number}.{name}", wide * high

    @cache  # noqa: B019 (frozen, and few)
    def matched(self, patterns: tuple[str, ...]) -> int:
        """Return how many weights of decoder layers are in layers that a pattern names."""
        return sum(
            size for name, size in self.modules()
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        )  # fmt: skip


def shape_of(model: str) -> ModelShape:
    """Return the shape of a preset, a folder with a ``config.json``, or a hub id.

    Raises:
        UserError: As `hf_config`, or the model is of a kind that the laws do not know.
    """
    values: dict[str, Any] = PRESETS.get(model) or text_config(hf_config(model)).to_dict()
    kind = str(values.get("model_type"))
    if kind not in (*DENSE, *MIXTURES):
        raise UserError(
            f"model: '{model}' is a {kind}, of which no law is known here; give a model of the "
            f"kinds {', '.join((*DENSE, *MIXTURES))}"
        )
    is_mixture = kind in MIXTURES
    inner = (values.get("moe_intermediate_size") if is_mixture else None) or (
        values["intermediate_size"]
    )
    heads = int(values["num_attention_heads"])
    return ModelShape(
        name=model,
        hidden_size=int(values["hidden_size"]),
        intermediate_size=int(inner),
        num_layers=int(values["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(values.get("num_key_value_heads") or heads),
        head_dim=int(values.get("head_dim") or values["hidden_size"] // heads),
        vocab_size=int(values["vocab_size"]),
        is_tied=bool(values.get("tie_word_embeddings")),
        has_qk_norm=kind in _QK_NORM,
        num_experts=_count(values, "num_local_experts", "num_experts") if is_mixture else 1,
        num_active_experts=_count(values, "num_experts_per_tok") if is_mixture else 1,
    )


def _count(values: dict[str, Any], *names: str) -> int:
    """Return the first of these counts that a mixture's configuration gives."""
    found = next((values[name] for name in names if values.get(name)), None)
    if found is None:
        raise UserError(f"model: its configuration has no {' or '.join(names)}; add it")
    return int(found)
