"""What would be answered if something else were asked: other batches, savers of memory, tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fp8study.analysis.advice.answer import Change
from fp8study.analysis.advice.asked import MOST_TOKENS
from fp8study.analysis.advice.case import Case
from fp8study.analysis.advice.evidence import CLIPPED, Verdict
from fp8study.analysis.decision import CHECK, FP8, MORE
from fp8study.analysis.laws.nearby import (
    SAVERS,
    Changed,
    as_reduced,
    changed,
    changes,
    cures,
    fastest,
    larger_alone,
    written,
)
from fp8study.analysis.laws.room import ROOMIER, fits, with_batch
from fp8study.analysis.small_steps import decided_anew
from fp8study.core.config import ResolvedConfig
from fp8study.core.errors import UserError

#: Fields as options of this command.
_OPTIONS = {
    "num_gpus": "--num-gpus {}", "micro_batch_size": "--micro-batch-size {}",
    **{name: f"--set {name}={{}}" for name in (*SAVERS, "gradient_accumulation_steps")},
}  # fmt: skip
#: Of one GPU's tokens/s, what each of several keeps where nothing is to be said.
_KEPT = 0.7


class Otherwise:
    """Answers to other questions, as far as they matter to the one that is asked.

    Args:
        case: What is asked.
        ask: Answers for another BF16 run.
    """

    def __init__(self, case: Case, ask: Callable[[ResolvedConfig], Case]) -> None:
        self.case, self.ask = case, ask
        self.config, self.shape, self.law = case.config, case.shape, case.by_law.law
        self.capacity = case.asked.capacity_gib
        # A step of one pass whose sequences are to stay has no other batch.
        self.may_grow = not case.asked.keeps_step or case.config.gradient_accumulation_steps > 1

    def clipped(self) -> Verdict | None:
        """Return the verdict with gradients clipped at 1, where that is surer."""
        surer = {CHECK: (FP8,), MORE: (FP8, CHECK)}.get(self.case.verdicts[0].action, ())
        if not surer or self.config.max_grad_norm == CLIPPED:
            return None
        verdict = self.ask(changed(self.config, {"max_grad_norm": CLIPPED})).verdict
        return verdict if verdict.action in surer else None

    def remedies(self) -> tuple[Change, ...]:
        """Tell what makes room for BF16, where it has none."""
        if self.case.fits:
            return ()
        asked = self.case.asked
        found = cures(
            self.config, self.shape, self.capacity, asked.keeps_step, asked.network.gpus_per_node
        )
        return tuple(map(self._remedy, found))

    def alone(self) -> Change | None:
        """Tell what one GPU makes, where several without NVLink make much less each."""
        config, asked = self.config, self.case.asked
        if config.num_gpus == 1 or config.num_nodes > 1 or asked.gpu.has_nvlink:
            return None
        with suppress(UserError):  # refused on one
            way = self._anew(changed(config, {"num_gpus": 1, "strategy": "none"}))
            if fits(way, self.shape, self.capacity):
                found = self.ask(way)
                if self.case.rates[0] < _KEPT * found.rates[0]:
                    bf16, fp8 = (each.tokens_per_second_per_gpu
                                 for each in (found.options[0], found.chosen))  # fmt: skip
                    return Change("--num-gpus 1", bf16, tokens_per_second_per_gpu=fp8)
        return None

    def larger(self) -> Change | None:
        """Tell by how much FP8 is faster at a batch for which BF16 alone has no room, if it is."""
        if not self.case.fits:
            return None
        found = larger_alone(self.config, self.shape, self.law, self.capacity, MOST_TOKENS)
        if found is None or not (self.may_grow or "micro_batch_size" not in found[0]):
            return None
        return self.case.by_law.around(self._change(found, {}), found[1])

    def instead(self) -> Change | None:
        """Return a larger batch at which FP8 surely pays and neither precision is slower.

        Where the verdict is open: how many tokens/s more FP8 makes there than as asked, %, and its
        lead there.
        """
        if self.case.verdicts[0].action != MORE or not self.case.fits or not self.may_grow:
            return None
        for fields, larger in self._larger():
            found = self.ask(way := self._anew(larger))
            faster = [r / before for r, before in zip(found.rates, self.case.rates, strict=True)]
            if found.verdict.action in (FP8, CHECK) and min(faster) >= 1:
                told = self._change((fields, way, 100 * (faster[1] - 1)), {})
                return replace(told, lead_pct=found.verdict.lead_pct)
        return None

    def changes(self) -> tuple[Change, ...]:
        """Tell FP8's lead in other tasks, as each would be answered."""
        found = changes(
            self.config, self.shape, self.law, self.capacity, self._decide, self.case.by_law.halved
        )
        return tuple(map(self._lead, found))

    def _change(self, each: Changed, words: Mapping[str, str]) -> Change:
        fields, way, value = each
        return Change(" ".join(written(fields, words)), self.case.by_law.figure(way, value))

    def _lead(self, each: Changed) -> Change:
        found = self._change(each, {"network": "--network {}"})
        if "network" not in each[0]:
            return replace(found, then=self.ask(each[1]).verdict.lead_pct)
        way = fastest(each[1], self.shape, self.law)
        return self.case.by_law.around(found, way, is_lead=True)

    def _remedy(self, cure: Changed) -> Change:
        fields, way, _ = cure
        found = self.ask(way if "update_kernel" in fields else self._anew(way))
        told = {"micro_batch_size": way.micro_batch_size} | fields
        if self.case.asked.keeps_step:
            told.pop("gradient_accumulation_steps", None)
        return replace(
            self._change((told, *cure[1:]), _OPTIONS),
            lead_pct=found.verdict.lead_pct,
            tokens_per_second_per_gpu=found.chosen.tokens_per_second_per_gpu,
        )

    def _decide(self, way: ResolvedConfig) -> ResolvedConfig:
        """Decide what the path makes of another run, unless a form of it is asked about."""
        return way if self.case.asked.as_asked else decided_anew(way, self.case.asked.gpu)

    def _anew(self, way: ResolvedConfig) -> ResolvedConfig:
        """As `_decide`, of a run with another batch or savers, also where that was said before."""
        if self.case.asked.as_asked:
            return way
        anew = as_reduced(way, {"update_kernel": None, "step_launch": None})
        return self._decide(changed(way, anew))

    def _larger(self) -> Iterator[tuple[dict[str, Any], ResolvedConfig]]:
        """Yield twice the batch, four times …, each with the first of `ROOMIER` by which it fits.

        Where a step has several passes it has fewer then, as long as they come out even.
        """
        config, batch = self.config, 2 * self.config.micro_batch_size
        while batch * config.sequence_length <= MOST_TOKENS:
            if not (resized := with_batch(config, batch)):
                return
            for roomier in ROOMIER:
                fields = resized | {
                    name: value for name, value in roomier.items() if getattr(config, name) != value
                }
                with suppress(UserError):  # refused on so many GPUs
                    way = changed(config, fields)
                    if fits(way, self.shape, self.capacity):
                        yield fields, way
                        break
            batch *= 2
