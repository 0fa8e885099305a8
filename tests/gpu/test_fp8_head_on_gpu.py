"""What only a GPU can show of an FP8 loss head: its GEMMs take the layouts that it writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8study.core.config import make_config
from fp8study.model import fp8_head
from fp8study.model.float8 import convert_to_float8
from fp8study.model.loss_head import replace_loss_head

pytestmark = pytest.mark.requires_gpu
DEVICE = torch.device("cuda")


class Ends(torch.nn.Module):
    """A model that is a loss head and what replacing it asks for."""

    def __init__(self, width: int, num_labels: int) -> None:
        super().__init__()
        self.lm_head = torch.nn.Linear(width, num_labels, bias=False)

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.lm_head


def gradients(
    precision: str, head: str, hidden_ND: torch.Tensor, labels_N: torch.Tensor
) -> tuple[float, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model: Any = Ends(hidden_ND.shape[1], 32_064).to(DEVICE, torch.bfloat16)
    config = make_config(
        {"model": "tiny-llama", "precision": precision, "skip": "", "loss_head": head,
         "fp8_all_gather": False}
    ).resolved()  # fmt: skip
    convert_to_float8(model, config)
    replace_loss_head(model, config)
    hidden = hidden_ND.clone().requires_grad_()
    loss = model.lm_head(hidden[None], labels_N[None])
    loss.backward()
    assert hidden.grad is not None
    return float(loss), hidden.grad.float(), model.lm_head.weight.grad.float()


@pytest.mark.parametrize("group", [16_384, 4096])
def test_its_gradients_are_those_of_torchaos_layer(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearer by far than BF16's are, over whole and broken chunks and groups."""
    monkeypatch.setattr(fp8_head, "GROUP", group)
    torch.manual_seed(1)
    hidden_ND = torch.randn(6160, 2048, device=DEVICE).bfloat16()
    labels_N = torch.randint(32_064, (6160,), device=DEVICE)
    loss, *wanted = gradients("fp8_tensorwise", "compiled", hidden_ND, labels_N)
    own_loss, *found = gradients("fp8_tensorwise", "chunked", hidden_ND, labels_N)
    _, *bf16 = gradients("bf16", "chunked", hidden_ND, labels_N)
    assert own_loss == pytest.approx(loss, rel=1e-4)
    for own, wide, exact in zip(found, bf16, wanted, strict=True):
        assert (own - exact).norm() < 0.3 * (wide - exact).norm()
