"""When a run measures its gradients' noise, on which sequences, and whether that fits."""

from __future__ import annotations

import time
from typing import Any

import psutil
import torch

from fp8study.core.config import ResolvedConfig
from fp8study.core.errors import UserError
from fp8study.data.tokens import BlockOrder, PreparedData, batch
from fp8study.measure.gradient_noise import SPAN, measure_noise


class NoiseMeter:
    """Measures the bare model in training when it is due; inert in a run that asked for nothing.

    Raises:
        UserError: Too few unseen sequences, or too little memory.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        data: PreparedData,
        trained: torch.nn.Module,
        device: torch.device,
    ) -> None:
        self._config, self._trained = config, trained
        self._points: list[dict[str, Any]] = []
        if not config.noise_at_steps:
            return
        self._blocks = BlockOrder(config, data.num_train_tokens).unseen(config.noise_samples)
        ids_NT = batch(data.tokens(), self._blocks, config.sequence_length)
        self._ids_NT = torch.from_numpy(ids_NT).to(device)
        sizes = [p.numel() for p in trained.parameters() if p.requires_grad]
        check_room(config.noise_samples, sizes, device)

    def measure_if_due(self, step: int) -> None:
        """Measure if `step` optimizer steps are one of the points asked for."""
        if step not in self._config.noise_at_steps:
            return
        started = time.perf_counter()
        point = measure_noise(self._config, self._trained, self._ids_NT)
        seconds = time.perf_counter() - started
        self._points.append({"step": step, "seconds": round(seconds, 2)} | point)

    def to_dict(self) -> dict[str, Any]:
        """Return the ``noise`` section of the record; empty where nothing was asked for.

        ``sample_blocks`` (block numbers of the sequences), ``tokens_per_sample``, ``emulated`` and
        ``points`` (see `measure_noise`; with ``step`` and ``seconds``).
        """
        if not self._config.noise_at_steps:
            return {}
        return {
            "sample_blocks": self._blocks,
            "tokens_per_sample": self._config.sequence_length,
            "emulated": bool(self._config.fp8_emulate),
            "points": self._points,
        }


def check_room(num_samples: int, sizes: list[int], device: torch.device) -> None:
    """Refuse a measurement that would not fit beside the training.

    Called before the first step, so Adam's two states (8 bytes a parameter) are counted too, and
    a tenth of what is free is left for activations. `sizes`: elements of each trainable parameter.

    Raises:
        UserError: It needs more than is free.
    """
    free = 0.9 * free_bytes(device)
    fixed = 16 * sum(sizes) + 16 * max(sizes) + 8 * num_samples * SPAN
    per_sample = 4 * sum(sizes)
    needed = fixed + num_samples * per_sample
    if needed <= free:
        return
    fitting = int((free - fixed) // per_sample)
    remedy = f"lower it to {fitting}" if fitting >= 4 else "use a smaller model"
    raise UserError(
        f"noise_samples: {num_samples} need {needed / 2**30:.1f} GiB beside the training, "
        f"but {free / 2**30:.1f} GiB of {device} can be used; {remedy}"
    )


def free_bytes(device: torch.device) -> int:
    """Return the memory that a new tensor could still take, what torch has cached included."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + cached)
