"""Models with random weights, from transformers' configurations; no hub needed."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from fp8study.core.checkpoints import is_checkpoint
from fp8study.core.config import ResolvedConfig
from fp8study.core.errors import UserError, one_line
from fp8study.core.presets import PRESETS, hf_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: What transformers says of weights that a model lacks, has no place for, or has in another shape.
_DIFFERING = ("missing_keys", "unexpected_keys", "mismatched_keys")

# transformers' models look for GPUs as they are imported, which must not be before the run has
# taken its own (`fp8study.run.gpu_lease`): so they are imported where they are used.


def build_model(
    model: str, dtype: torch.dtype, device: torch.device, seed: int, weights: str | None = None
) -> PreTrainedModel:
    """Build a causal language model with random weights, drawn on `device` from `seed`.

    Every rank draws the same weights, so sharding afterwards gives the same model whatever the
    number of GPUs. The device must hold all of them at once. Where `weights` is a folder of
    Hugging Face safetensors, they are its own; one of our checkpoints is read after sharding.

    Raises:
        UserError: As `hf_config`, it is no causal language model, or the `weights` do not fit it.
    """
    from transformers import AutoModelForCausalLM

    config = hf_config(model)
    torch.manual_seed(seed)
    if weights is not None and not is_checkpoint(Path(weights)):
        return _pretrained(model, weights, dtype).to(device).train()  # type: ignore[arg-type]
    try:
        with torch.device(device):  # attention: transformers' choice, sdpa where it is supported
            built: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of any kind, from a configuration that transformers lets pass
        raise UserError(
            f"model: '{model}' cannot be built ({one_line(error)}); mend its configuration"
        ) from error
    return built.train()


def _pretrained(model: str, folder: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model with the weights of a folder of safetensors, on the host."""
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=hf_config(model), dtype=dtype, local_files_only=True,
            use_safetensors=True, output_loading_info=True, trust_remote_code=False,
        )  # fmt: skip
        built, found = loaded
        if differing := [str(name) for kind in _DIFFERING for name in sorted(found[kind])]:
            raise ValueError(f"{len(differing)} weights differ, as {differing[0]}")
    except Exception as error:  # of any kind
        raise UserError(
            f"init_from: '{folder}' does not fit the model '{model}', or is damaged "
            f"({one_line(error)}); give whole weights of the same model, or set model to that "
            "folder"
        ) from error
    return cast("PreTrainedModel", built)


@contextmanager
def blaming_model(config: ResolvedConfig) -> Iterator[None]:
    """Blame a model of the user's own for what fails before its first step is done.

    transformers has models of more kinds than can be sharded, compiled or trained. Where the
    failure began is in the message.

    Raises:
        UserError: Anything but a user's error or exhausted memory, for a model that is no preset.
    """
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if config.model in PRESETS:
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"model: '{config.model}' cannot be trained under strategy={config.strategy}, "
            f"precision={config.precision}, compile={str(config.compile).lower()} "
            f"({type(error).__name__} in {Path(place.filename).name}:{place.lineno}: "
            f"{one_line(error)}); try strategy=none, precision=bf16 or compile=false"
        ) from error


def import_model_code(model: str) -> None:
    """Import what building a model needs, so that it costs no time later.

    Raises:
        UserError: As `hf_config`.
    """
    from transformers import AutoModelForCausalLM

    kind = type(hf_config(model))
    if kind in AutoModelForCausalLM._model_mapping:
        AutoModelForCausalLM._model_mapping[kind]  # a lazy mapping: looking is importing


@contextmanager
def on_four_tokens(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Give four token ids, int64[1, 4], to look at a model with: no dropout, no gradients."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield torch.arange(1, 5, device=next(model.parameters()).device)[None]
    finally:
        model.train(was_training)


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the repeated blocks of a language model: the longest uniform `ModuleList`.

    Found from the modules themselves, so that it holds for any architecture.

    Raises:
        UserError: The model has no list of equal blocks.
    """
    lists = [list(m) for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    uniform = [blocks for blocks in lists if len({type(block) for block in blocks}) == 1]
    if not uniform:
        raise UserError(f"model: {type(model).__name__} has no list of equal decoder layers")
    return max(uniform, key=lambda blocks: sum(p.numel() for b in blocks for p in b.parameters()))
