"""The loss on text that training never saw, scored in one arithmetic for all precisions.

A run's own losses are computed in the precision that it trains in, on what it trains on. To ask
whether FP8 leads to worse *weights*, the weights of every run are scored alike: rounded to BF16
and multiplied in BF16, on sequences at the corpus's end that no run has seen.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from accelerate import PartialState
from torch.distributed.tensor import DTensor

from fp8study.core.config import ResolvedConfig
from fp8study.data.tokens import batch
from fp8study.model.local import plain
from fp8study.model.shadows import rebuilt


def validation_loss(
    config: ResolvedConfig,
    trained: torch.nn.Module,
    tokens: npt.NDArray[np.uint32],
    blocks: list[int],
    state: PartialState,
) -> float:
    """Return the mean loss of the given blocks, in nats per token; every rank must call it.

    Each rank holds one whole BF16 copy of the weights while it scores its share of the blocks.

    The bare model, sharded or not, converted or not, is not changed; `tokens` is the corpus.
    """
    if state.device.type == "cuda":
        torch.cuda.empty_cache()  # the copy may need what training left in odd pieces
    weights = {
        name: torch.nn.Parameter(_whole_bf16(parameter), requires_grad=False)
        for name, parameter in trained.named_parameters()
    }
    model = rebuilt(config.model, trained, weights).eval()
    total = torch.zeros((), dtype=torch.float64, device=state.device)
    with torch.no_grad():
        for block in blocks[state.process_index :: state.num_processes]:
            ids_1T = torch.from_numpy(batch(tokens, [block], config.sequence_length))
            ids_1T = ids_1T.to(state.device)
            total += model(input_ids=ids_1T, labels=ids_1T).loss
    if state.num_processes > 1:
        torch.distributed.all_reduce(total)
    return float(total) / len(blocks)


def _whole_bf16(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a parameter's numbers in BF16 and in its full shape, gathered from all ranks."""
    numbers = plain(parameter).to(torch.bfloat16)
    return numbers.full_tensor() if isinstance(numbers, DTensor) else numbers
