"""Where FP8's lead was measured next to a prediction, and how far the law was off there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8study.analysis.advice.figures import MEASURED, Quantity
from fp8study.analysis.laws.frozen import constants_of
from fp8study.analysis.laws.speed_constants import SpeedConstants
from fp8study.analysis.laws.speed_fit import Pair
from fp8study.analysis.runs.naming import has_usual_path
from fp8study.core.config import ResolvedConfig

#: What a prediction shares with the pairs that were measured next to it.
_BESIDE = ("model", "precision", "fp8_all_gather", "path", "strategy", "sequence_length",
           "master_dtype", "skip", "reshard_after_forward", "gradient_accumulation_steps",
           "step_launch")  # fmt: skip


@dataclass(frozen=True)
class Beside:
    """FP8's lead where it was measured next to a prediction, and the law's there."""

    num_gpus: int
    micro_batch_size: int
    lead_pct: Quantity
    law_pct: float
    clips_alike: bool

    @property
    def off_points(self) -> float:
        """How far the law was off there."""
        return abs(self.law_pct - self.lead_pct.value)


def measured_beside(pairs: Sequence[Pair], way: ResolvedConfig, gpu_name: str) -> Beside | None:
    """Return the pair next to an FP8 run on several GPUs where the law was most off; None: no pair.

    Next to it are any number of GPUs but one, at a batch of half to twice its own.
    """
    found, laws = [], constants_of(SpeedConstants, "speed")
    for pair in pairs:
        config, lead = pair.fp8.config, pair.lead_pct
        is_near = way.num_gpus > 1 and config.num_gpus > 1 and pair.fp8.gpu == gpu_name
        is_near &= 0.5 <= config.micro_batch_size / way.micro_batch_size <= 2
        is_near = is_near and all(getattr(config, n) == getattr(way, n) for n in _BESIDE)
        if is_near and has_usual_path(config.to_dict()):
            law, alike = pair.predicted_pct(laws), config.max_grad_norm == way.max_grad_norm
            if law is not None and lead is not None:
                measured = Quantity(lead, MEASURED, run_ids=(*pair.fp8.ids, *pair.bf16.ids))
                found.append(Beside(config.num_gpus, config.micro_batch_size, measured, law, alike))
    return max(found, key=lambda each: each.off_points, default=None)
