"""Which models there are: published shapes, and transformers' configurations. No torch here.

And whether the Hugging Face hub can be asked for more, decided once and quickly: its client retries
an unreachable hub for most of a minute at every question, while GPUs wait.
"""

from __future__ import annotations

import fnmatch
import os
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fp8study.core.config_json.checking import check_content, mended
from fp8study.core.config_json.reading import config_file, read_file
from fp8study.core.errors import UserError, first_line, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from fp8study.core.config import RunConfig

#: Kinds of models → transformers' module of an MLP that, with SiLU, is SwiGLU and nothing else.
SWIGLU_MLPS = {"llama": "LlamaMLP", "mistral": "MistralMLP", "qwen2": "Qwen2MLP",
               "qwen3": "Qwen3MLP"}  # fmt: skip

# Hyperparameters as published in each model's config.json on the Hugging Face hub.
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
_LLAMA3 = {
    "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
_QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
_SIDES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "tie_word_embeddings")  # fmt: skip
_QWEN3_SIZES = {
    "0.6b": (1024, 3072, 28, 16, True), "1.7b": (2048, 6144, 28, 16, True),
    "4b": (2560, 9728, 36, 32, True), "8b": (4096, 12288, 36, 32, False),
    "14b": (5120, 17408, 40, 40, False), "32b": (5120, 25600, 64, 64, False),
}  # fmt: skip
# Small enough for two CPU cores; every dimension divides by 16, as FP8 asks.
_TINY = {
    "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip

_LLAMA_1B: dict[str, Any] = _LLAMA3 | {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "head_dim": 64, "rope_parameters": _LLAMA3_ROPE | {"factor": 32.0},
}  # fmt: skip

#: The 1B at other widths, its depth kept: what FP8 gains by width.
_WIDTHS: dict[str, dict[str, Any]] = {
    f"llama-1b-width-{width}": _LLAMA_1B | {
        "hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": width // 64,
        "num_key_value_heads": width // 256, "tie_word_embeddings": True,
    }
    for width in (512, 1024, 3072, 4096)
}  # fmt: skip

#: Presets that nobody trains: they show a trend, and are left out where a decision is taken.
SWEPT = frozenset(_WIDTHS)

PRESETS: dict[str, dict[str, Any]] = _WIDTHS | {
    "llama-3.2-1b": _LLAMA_1B | {"tie_word_embeddings": True},
    # For comparisons with trainers whose loss head cannot share the embedding's weight.
    "llama-3.2-1b-untied": _LLAMA_1B | {"tie_word_embeddings": False},
    "llama-3.2-3b": _LLAMA3 | {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
        "num_attention_heads": 24, "head_dim": 128, "tie_word_embeddings": True,
        "rope_parameters": _LLAMA3_ROPE | {"factor": 32.0},
    },
    "llama-3.1-8b": _LLAMA3 | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "head_dim": 128, "tie_word_embeddings": False,
        "rope_parameters": _LLAMA3_ROPE | {"factor": 8.0},
    },
    "llama-3.1-70b": _LLAMA3 | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "head_dim": 128, "tie_word_embeddings": False,
        "rope_parameters": _LLAMA3_ROPE | {"factor": 8.0},
    },
    "llama-3.1-405b": _LLAMA3 | {
        "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
        "num_attention_heads": 128, "head_dim": 128, "tie_word_embeddings": False,
        "rope_parameters": _LLAMA3_ROPE | {"factor": 8.0},
    },
    **{f"qwen3-{size}": _QWEN3 | dict(zip(_SIDES, sides, strict=True))
       for size, sides in _QWEN3_SIZES.items()},
    "tiny-llama": _TINY | {"model_type": "llama"},
    "tiny-qwen3": _TINY | {"model_type": "qwen3"},
}  # fmt: skip

#: Settings that make the logits something else than hidden states times a weight, by what value
#: they do nothing.
_RESHAPING = {
    "final_logit_softcapping": (None,), "logits_soft_cap": (None,), "logit_scale": (None, 1),
    "logits_scaling": (None, 1), "lm_head_multiplier": (None, 1),
    "output_router_logits": (None, False),
}  # fmt: skip

#: The linear layers in each decoder layer of a preset.
_PROJECTIONS = (
    "self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down",
)  # fmt: skip

#: Where each preset's own tokenizer lives; the tiny ones have none.
HUB_IDS = {
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama-3.2-1b-untied": "meta-llama/Llama-3.2-1B",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B",
    "llama-3.1-405b": "meta-llama/Llama-3.1-405B",
    **{f"qwen3-{size}": f"Qwen/Qwen3-{size.upper()}" for size in _QWEN3_SIZES},
}


#: Seconds to wait for the hub.
PATIENCE_S = 4.0


@cache
def is_reachable() -> bool:
    """Return whether the hub answers; if not, tell its client to use only what is cached.

    Call before the first import of `transformers` or `datasets`: they read the setting once.
    ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE`` are respected; behind a proxy we let the client try.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return True
    address = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=PATIENCE_S).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"
        return False
    return True


def check_model_name(model: str) -> None:
    """Refuse a name that is neither a preset, a folder nor a hub id, without importing torch.

    Raises:
        UserError: The name can be none of the three, or the folder holds no configuration.
    """
    if not model.strip():
        raise UserError(
            f"model: it is empty; choose one of {', '.join(PRESETS)}, or give a Hugging Face id "
            "(owner/name) or a folder"
        )
    folder = Path(model)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"model: '{model}' holds no config.json; give a folder that does")
    if model.startswith(("/", ".", "~")) and not folder.exists():
        raise UserError(f"model: there is no folder '{model}'; give one with a config.json")
    if model in PRESETS or folder.exists() or model.count("/") == 1:
        return
    raise UserError(
        f"model: '{model}' is no preset{nearest(model, PRESETS)}; give its Hugging Face id "
        f"(owner/name), a folder with its config.json, or one of {', '.join(PRESETS)}"
    )


def hf_config(
    model: str, check_kind: Callable[[PreTrainedConfig], None] | None = None
) -> PreTrainedConfig:
    """Return the transformers configuration of a preset, a hub id or a folder.

    `check_kind`: as `check_content` has it.

    Raises:
        UserError: The name is unknown or its configuration cannot be loaded.
    """
    check_model_name(model)
    if model not in PRESETS:
        read_file(config_file(model))
        is_reachable()
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, PreTrainedConfig

    given: dict[str, Any] = {}
    try:
        if model in PRESETS:
            values = dict(PRESETS[model])
            config = AutoConfig.for_model(values.pop("model_type"), **values)
        else:
            given = PreTrainedConfig.get_config_dict(model)[0]
            check_content(model, given, check_kind)
            config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (StrictDataclassError, KeyError, ArithmeticError) as error:
        raise UserError(f"model: '{model}' cannot be: {mended(error, given)}") from error
    except (OSError, ValueError) as error:
        presets = "" if config_file(model).is_file() else f"a preset ({', '.join(PRESETS)}), or "
        if preset := preset_of(model):
            presets = f"'{preset}', its preset, or "
        if "auto_map" in given:
            raise UserError(
                f"model: '{model}' needs code of its own (auto_map), which is not run here; give "
                "a folder with the config.json of a model of transformers"
            ) from error
        raise UserError(
            f"model: no configuration for '{model}' ({first_line(error)}); give {presets}"
            "a folder with the config.json of a model of transformers"
        ) from error
    config.use_cache = False
    return config


def preset_of(hub_id: str) -> str | None:
    """Return the preset that is a model of the hub, if one is."""
    return next((name for name, known in HUB_IDS.items() if known == hub_id), None)


def reshapes_logits(config: PreTrainedConfig) -> str | None:
    """Name a setting by which logits are more than one product, for which only ``plain`` fits."""
    for name, harmless in _RESHAPING.items():
        for settings in (config, text_config(config)):
            value = getattr(settings, name, None)
            if value not in harmless:
                return f"{name}={value}"
    return None


def needs_plain_head(model: str) -> bool:
    """Return whether a run of the tuned path would refuse a model unless ``loss_head=plain``."""
    return model not in PRESETS and reshapes_logits(hf_config(model)) is not None


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the part of a configuration that describes the language model."""
    part: PreTrainedConfig = config.get_text_config()
    return part


def near_settings(model: str) -> Mapping[str, Any]:
    """Return a model's settings as far as they are known without transformers and the hub.

    Those of a preset, also by its id on the hub, or of a folder's text model; else none. Whether
    embedding and loss head are one is left out where two places disagree, or one says nothing.
    """
    if model in PRESETS:
        return PRESETS[model]
    given: dict[str, Any] = {}
    with suppress(UserError, ValueError, RecursionError):  # told where the model is built
        given = read_file(config_file(model))
    if isinstance(part := given.get("text_config"), dict):
        ties = "tie_word_embeddings"
        is_sure = part.get(ties) is given.get(ties)
        return part if is_sure else {name: part[name] for name in part if name != ties}
    hub = preset_of(model)
    return given or (PRESETS[hub] if hub else {})


def _setting(model: str, name: str) -> Any:
    if model in PRESETS:  # needs no transformers
        return PRESETS[model][name]
    return getattr(text_config(hf_config(model)), name, None)


def model_vocab_size(model: str) -> int:
    """Return the size of a model's embedding.

    Raises:
        UserError: As `hf_config`.
    """
    return int(_setting(model, "vocab_size"))


def check_model(config: RunConfig) -> None:
    """Refuse what the run's model cannot do, without importing torch.

    Raises:
        UserError: As `hf_config`; there is no such tokenizer; the sequences are longer than the
            model has positions for; or ``skip`` or ``untrained`` names no layer of a preset (of
            other models, building tells).
    """
    check_model_name(config.model)
    name = config.tokenizer
    if (name.startswith(("/", ".", "~")) or name.count("/") > 1) and not Path(name).is_dir():
        raise UserError(f"tokenizer: there is no folder '{name}'; give one, or use tokenizer=bpe")
    longest = _setting(config.model, "max_position_embeddings")
    if longest is not None and config.sequence_length > longest:
        why = f"more than the {longest} positions of '{config.model}'; lower it to that"
        if not _names_positions(config.model):
            why = (
                f"more than the {longest} positions that transformers takes for '{config.model}', "
                "as its config.json names none; add max_position_embeddings, or lower this"
            )
        raise UserError(f"sequence_length: {config.sequence_length} is {why}")
    if config.model in PRESETS:
        numbers = range(PRESETS[config.model]["num_hidden_layers"])
        layers = [f"model.layers.{n}.{part}_proj" for n in numbers for part in _PROJECTIONS]
        check_patterns("skip", config.left_out, [*layers, "lm_head"])
        check_patterns("untrained", config.untrained, [*layers, "lm_head"])


def attention_window(values: Mapping[str, Any]) -> int | None:
    """Return how many tokens attention looks back at, in some layers or all; None: at all."""
    kinds = values.get("layer_types")
    if values.get("use_sliding_window") is False or (kinds and "sliding_attention" not in kinds):
        return None
    return values.get("sliding_window")


def _names_positions(model: str) -> bool:
    """Whether a model's own configuration says how many positions it has."""
    if model in PRESETS:
        return True
    from transformers import PreTrainedConfig

    given, config = PreTrainedConfig.get_config_dict(model)[0], text_config(hf_config(model))
    name = "max_position_embeddings"
    names = {name, config.attribute_map.get(name)}
    return bool(names & (given.get("text_config") or given).keys())


def check_patterns(field: str, patterns: Iterable[str], linears: Collection[str]) -> None:
    """Refuse a shell-style pattern over full module names that no layer has: it would do nothing.

    Raises:
        UserError: It names `field`, the configuration's, and the pattern.
    """
    for pattern in patterns:
        if not fnmatch.filter(linears, pattern):
            raise UserError(
                f"{field}: '{pattern}' matches no linear layer{nearest(pattern, linears)}; "
                f"patterns are shell-style over full module names, as '*.{pattern.split('.')[-1]}'"
            )
