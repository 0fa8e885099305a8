"""One question with what the laws and the records say of it: the ways to compute, and a verdict."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fp8study.analysis.advice.answer import Option
from fp8study.analysis.advice.asked import Question
from fp8study.analysis.advice.by_law import ByLaw
from fp8study.analysis.advice.evidence import Verdict
from fp8study.analysis.decision import NO_ROOM
from fp8study.analysis.laws.shape import ModelShape
from fp8study.core.config import ResolvedConfig


@dataclass(frozen=True)
class Case:
    """What is answered, without what could be asked otherwise."""

    asked: Question
    gpu_name: str
    """As its driver names it, where that is known."""
    shape: ModelShape
    by_law: ByLaw
    options: tuple[Option, ...]
    """As `Advice.options`."""
    verdicts: tuple[Verdict, ...]
    """The one to go by, whether or not a run fits, then those of other machines."""

    @property
    def config(self) -> ResolvedConfig:
        """The BF16 run."""
        return self.asked.config

    @property
    def fits(self) -> bool:
        """As `Advice.fits`."""
        return self.options[0].fits(self.asked.capacity_gib)

    @property
    def fp8_fits(self) -> bool:
        """As `Advice.fp8_fits`."""
        return any(option.fits(self.asked.capacity_gib) for option in self.options[1:])

    @property
    def verdict(self) -> Verdict:
        """What to do."""
        first = self.verdicts[0]
        return first if self.fits or self.fp8_fits else replace(first, action=NO_ROOM)

    @property
    def chosen(self) -> Option:
        """The FP8 of the verdict."""
        return next(each for each in self.options[1:] if each.label == self.verdicts[0].label)

    @property
    def rates(self) -> tuple[float, float]:
        """Tokens/s and GPU of BF16, and of that FP8."""
        bf16, fp8 = (each.tokens_per_second_per_gpu for each in (self.options[0], self.chosen))
        return bf16.value, fp8.value
