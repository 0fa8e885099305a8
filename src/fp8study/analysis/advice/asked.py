"""What is asked of advice, once all that was left open is chosen."""

from __future__ import annotations

from dataclasses import dataclass

from fp8study.analysis.laws.communication import NETWORK, Network
from fp8study.analysis.laws.nearby import as_fp8, changed
from fp8study.analysis.laws.shape import shape_of
from fp8study.analysis.runs.naming import BEFORE
from fp8study.core.config import ResolvedConfig
from fp8study.core.errors import UserError
from fp8study.core.hardware import GpuPeak
from fp8study.core.recipes import ARITHMETICS

#: The most tokens of a pass that are chosen for those who name no batch: GPUs are busy by then.
MOST_TOKENS = 32768


@dataclass(frozen=True)
class Question:
    """One model on one kind of GPU."""

    config: ResolvedConfig
    """In BF16, on the tuned path."""
    gpu: GpuPeak
    gpu_name: str | None
    """As its driver names the GPU that is here; None for one that is named."""
    capacity_gib: float
    """Of one GPU."""
    tokens: float | None = None
    """As `Advice.tokens`."""
    as_asked: bool = False
    """What is told beside it keeps its form of the path, as it was asked for."""
    keeps_step: bool = False
    """Its sequences a step were asked for, so passes follow from batch and GPUs."""
    learning_rate: float | None = None
    """At which FP8's loss must be known to be BF16's, if one is asked for."""
    network: Network = NETWORK
    """What joins the nodes; if assumed, also half as fast."""

    def layers_to_measure(self) -> list[ResolvedConfig]:
        """Return a run in BF16 and in each scaling of FP8, for `measure_here`.

        Raises:
            UserError: No GPU is here, another is asked about, or the model is a mixture.
        """
        if self.gpu_name is None:
            raise UserError(
                "--measure: times the GPU at hand, not one that is named; leave out --gpu there"
            )
        if shape_of(self.config.model).num_experts > 1:
            raise UserError(
                f"--measure: '{self.config.model}' is a mixture of experts, whose layers the law "
                "cannot part; leave out --measure"
            )
        bf16 = changed(self.config, BEFORE)  # layers by themselves keep no weights
        return [bf16, *(as_fp8(bf16, name, False) for name in ARITHMETICS[1:])]
