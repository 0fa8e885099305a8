"""The loss head: from the last hidden states to the mean cross-entropy, without whole logits.

With a vocabulary of 128,256 the logits of 4,096 tokens and their gradient are the largest tensors
of a step: transformers makes them in BF16 and again in FP32, several times over.

``compiled``
    one torch.compile over the GEMM and the cross-entropy: whole logits, in BF16 only.
``chunked``
    some tokens at a time, as `fp8study.model.chunked_head` and `fp8_head` do.

The new head replaces the `forward` of the loss head's module, and is called as a module, so that
whatever sharding hooks to that module (FSDP2 gathers its weight there) happens as before.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from fp8study.core.config import ResolvedConfig
from fp8study.core.errors import UserError
from fp8study.core.presets import reshapes_logits
from fp8study.model import chunked_head
from fp8study.model.build import on_four_tokens
from fp8study.model.chunked_head import IGNORED, chunked_cross_entropy
from fp8study.model.float8 import is_converted
from fp8study.model.fp8_head import fp8_cross_entropy


def check_loss_head(model: Any, config: ResolvedConfig) -> None:
    """Refuse a model whose loss is more than the cross-entropy of one GEMM.

    Known settings are looked up; anything else shows on four tokens, on which the model's own
    loss is held against that of its hidden states and its head (not on the meta device). Call it
    before the model is compiled, converted or sharded.

    Raises:
        UserError: The loss head of this model cannot be replaced.
    """
    if config.loss_head == "plain":
        return

    def refuse(reason: str) -> UserError:
        return UserError(
            f"loss_head: '{config.loss_head}' does not suit {type(model).__name__}: {reason}; "
            "use loss_head=plain"
        )

    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise refuse("its loss head is no nn.Linear")
    if getattr(head, "bias", None) is not None:
        raise refuse("its loss head has a bias")
    if model.base_model is model:
        raise refuse("it has no base model apart from its loss head")
    if setting := reshapes_logits(model.config):
        raise refuse(setting)
    if not head.weight.is_meta and not _is_cross_entropy_of_one_product(model):
        raise refuse("its loss is not the cross-entropy of its loss head's product")


def _is_cross_entropy_of_one_product(model: Any) -> bool:
    """Return whether model and decomposition give the same loss on four tokens."""
    head = model.get_output_embeddings()
    with on_four_tokens(model) as ids_BT:
        theirs = model(input_ids=ids_BT, labels=ids_BT)
        hidden_BTD = model.base_model(input_ids=ids_BT)[0]
        if hidden_BTD.shape[-1] != head.in_features:
            return False
        logits_BTV = head(hidden_BTD)
    loss = cross_entropy(logits_BTV[0].float(), next_tokens(ids_BT), ignore_index=IGNORED)
    is_same = torch.allclose(theirs.logits, logits_BTV, rtol=1e-5, atol=1e-6)
    return is_same and torch.allclose(theirs.loss.float(), loss, rtol=1e-4)


def replace_loss_head(model: Any, config: ResolvedConfig) -> None:
    """Make ``model(input_ids=…, labels=…).loss`` use the head that the run asks for, in place.

    Call it on a model that `check_loss_head` has let pass, after conversion to FP8, which replaces
    modules, and before sharding. The model then computes a loss and nothing else.

    An FP8 loss head stays one. With tensorwise scales `fp8study.model.fp8_head` computes its
    chunks; with others its GEMMs are its module's own, and chunks are run again in the backward
    pass, since FP8 has no GEMM that would add to a buffer.
    """
    if config.loss_head == "plain":
        return
    head = model.get_output_embeddings()
    product = type(head).forward  # sharding derives a class from this one

    def whole(
        self: Any, hidden_ND: torch.Tensor, targets_N: torch.Tensor, reduction: str = "mean"
    ) -> torch.Tensor:
        logits_NV = product(self, hidden_ND).float()
        return cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction=reduction)

    def chunked(self: Any, hidden_ND: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        return chunked_cross_entropy(hidden_ND, self.weight, targets_N, config.compile)

    def chunked_fp8(self: Any, hidden_ND: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        loss = hidden_ND.new_zeros((), dtype=torch.float32)
        size = chunked_head.CHUNK
        for chunk in zip(hidden_ND.split(size), targets_N.split(size), strict=True):
            loss = loss + checkpoint(
                whole, self, *chunk, "sum", use_reentrant=False, preserve_rng_state=False
            )
        return loss / (targets_N != IGNORED).sum()

    def chunked_tensorwise(
        self: Any, hidden_ND: torch.Tensor, targets_N: torch.Tensor
    ) -> torch.Tensor:
        return fp8_cross_entropy(self, hidden_ND, targets_N, config.compile)

    def forward(self: Any, hidden_BTD: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        targets_N = next_tokens(labels_BT)
        return loss_of(self, hidden_BTD.reshape(len(targets_N), -1), targets_N)

    if config.compile or config.loss_head == "compiled":
        whole = torch.compile(whole)
    loss_of: Callable[..., torch.Tensor] = whole
    if config.loss_head == "chunked":
        loss_of = chunked
        if is_converted(head):
            always = config.precision == "fp8_tensorwise" and not config.precision_schedule
            loss_of = chunked_tensorwise if always else chunked_fp8
    head.forward = MethodType(forward, head)
    model.forward = MethodType(_loss_only, model)


def _loss_only(self: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
    """Stand in for a causal language model's `forward` in training."""
    from transformers.modeling_outputs import CausalLMOutput

    hidden_BTD = self.base_model(input_ids=input_ids)[0]
    return CausalLMOutput(loss=self.get_output_embeddings()(hidden_BTD, labels))


def next_tokens(labels_BT: torch.Tensor) -> torch.Tensor:
    """Return what each position predicts: int64[B·T], the last of a sequence predicts nothing."""
    return torch.nn.functional.pad(labels_BT, (0, 1), value=IGNORED)[:, 1:].reshape(-1)
