"""What an answer holds: `fp8study.analysis.advice.advise` makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fp8study.analysis.advice.beside import Beside
from fp8study.analysis.advice.evidence import Verdict
from fp8study.analysis.advice.figures import MEASURED, Quantity
from fp8study.analysis.laws import account
from fp8study.analysis.laws.here import Measured
from fp8study.analysis.laws.room import HEADROOM

#: What `Option.interval_from` says where the interval is a `Beside`'s.
NEXT_TO_THIS = "where it was measured next to this"


@dataclass(frozen=True)
class Option:
    """One way to compute: BF16, or an FP8 recipe."""

    precision: str
    label: str
    gathers_fp8: bool
    tokens_per_second_per_gpu: Quantity
    lead_pct: Quantity | None
    """Over BF16; None for BF16 itself."""
    memory_gib: Quantity
    limit: str
    """What limits the step by the law, as `StepParts.limit`."""
    beside: Beside | None = None
    """What was measured next to a predicted lead."""
    interval_from: str = ""
    """Where the law was as far off as a predicted lead's interval has it, or why it has none."""
    error_points: float = 0.0
    """How far off it is taken to be, points."""
    times_wider: float = 1.0
    """By how much that is beyond what was measured, as `account.wider`."""
    ranges: str = ""
    """Over what else its interval ranges."""
    is_apart: bool = False
    """Whether its lead is over BF16 runs that are not of its session."""
    pairs_pct: tuple[float, float] | None = None
    """The lowest and the highest lead of its pairs, where it was measured."""

    def fits(self, capacity: float) -> bool:
        """Whether it runs in so much memory, GiB: what was predicted, with `HEADROOM` to spare."""
        spare = 0.0 if self.memory_gib.kind == MEASURED else HEADROOM
        return self.memory_gib.value <= (1 - spare) * capacity


@dataclass(frozen=True)
class Change:
    """Something that would change the answer, and what it would be then."""

    what: str
    then: Quantity
    """GiB of a remedy; else FP8's lead, or how much faster it is, %."""
    lead_pct: Quantity | None = None
    """FP8's with that, as it is answered where that is asked about."""
    tokens_per_second_per_gpu: Quantity | None = None
    """Of that FP8."""


@dataclass(frozen=True)
class Seeds:
    """How many seeds decided, or would, where pairs from random weights scatter as they did."""

    num_in_check: int
    models: str
    learning_rate: float
    """The known one that is nearest."""
    fewest: int
    most: int


@dataclass(frozen=True)
class LossCheck:
    """The study that compares FP8's losses with BF16's, if that is all that a verdict asks for."""

    command: str
    num_runs: int
    learning_rate: float
    micro_batch_size: int
    """As asked or, where BF16 does not fit so, the largest with room for both."""
    tokens: int
    """That a run reads."""
    gpu_hours: float
    """That the steps of all runs take, at the rates of the answer."""
    seeds: Seeds | None


@dataclass(frozen=True)
class Advice:
    """The answer for one model on one kind of GPU."""

    config: dict[str, Any]
    """The BF16 run that is spoken of, resolved."""
    settings: tuple[str, ...]
    """What is set in it so that it fits, is faster, or is a model that the tuned path takes."""
    gpu: str
    capacity_gib: float
    tokens: float
    """To train on, for the days that it takes: as asked, else 20 a weight that a token meets."""
    verdict: Verdict
    clipped: Verdict | None
    """With gradients clipped at 1, where they are not and more is known if they are."""
    nearest: tuple[Change, ...]
    """Where it was not measured: FP8's lead next to it, where that was."""
    elsewhere: tuple[Verdict, ...]
    """The same setting on other machines with this GPU, as the report has them."""
    fits: bool
    """Whether BF16 does, as `Option.fits`."""
    fp8_fits: bool
    """The same of any FP8 option."""
    memory_parts_gib: dict[str, Quantity]
    building_gib: float
    """Weights of the whole model, counted."""
    smaller: str
    """Where a run could not even build that: the largest preset of its kind that it could."""
    largest: str
    """Where neither precision fits: the largest preset of its kind that does on these GPUs."""
    remedies: tuple[Change, ...]
    """Where it does not fit: what would."""
    larger: Change | None
    """FP8 at a batch for which BF16 has no room, where that is faster: by what, %, than BF16 at the
    batch that is spoken of."""
    instead: Change | None
    """Where the verdict is open: a larger batch at which FP8 surely pays; how many tokens/s more it
    makes than as asked, %, and its lead then."""
    options: tuple[Option, ...]
    """BF16 first, then what was timed, by machine and lead, then what was not, by speed."""
    step_parts_ms: dict[str, dict[str, Quantity]]
    """Precision → part of the step → ms, by the law; of BF16 and of the FP8 of the verdict."""
    layers_saved_ms: dict[str, Quantity]
    """Linear layer that the FP8 of the verdict converts → what that saves of the GPU's time, a
    decoder layer and pass, by the law; below 0 it costs more than it saves."""
    kept_in_bf16: tuple[str, ...]
    """Patterns of linear layers that the FP8 of the verdict leaves in BF16, as a run does today."""
    unaligned: dict[int, tuple[str, ...]]
    """As `fp8study.analysis.laws.layer.unaligned`."""
    head_on_fewer: bool
    """As `fp8study.analysis.laws.nearby.has_head_on_fewer`."""
    measured: Measured | None
    """What was measured here in place of the law's constants, as `measure_here` returns it."""
    beyond: tuple[str, ...]
    """In what this goes beyond what was measured."""
    law_errors: tuple[account.LawErrors, ...]
    """How far the laws were off, as frozen, in the tests that speak of this kind of GPU."""
    left_out: tuple[str, ...]
    """What the laws leave out."""
    communication_pct: float
    """Of a BF16 step, waiting for communication and what that slows down, by the law."""
    alone: Change | None
    """What one GPU makes in BF16 and in FP8, tokens/s, where several without NVLink make much less
    each."""
    without_nvlink: str
    """FP8's leads on GPUs that left NVLink unused, where those asked about have none."""
    other_trainers: str
    """What FP8 gave them, of a model about as large; empty where none was timed."""
    loss_evidence: tuple[str, ...]
    from_weights: str
    """Of the nearest model that went on from trained weights; empty where none did."""
    loss_uncovered: tuple[str, ...]
    changes: tuple[Change, ...]
    """Other tasks in which FP8's lead would be another."""
    commands: tuple[str, ...]
    """What would check those that fit; empty where a run could not even build the model."""
    study: str
    """The study's file that the command needs, of several nodes."""
    learning_rate: float | None
    """As asked; None: the verdict is for the rate of the loss that it rests on."""
    loss_check: LossCheck | None

    @property
    def chosen(self) -> Option:
        """The FP8 of the verdict."""
        return next(option for option in self.options if option.label == self.verdict.label)
