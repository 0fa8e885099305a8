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
from fp8study.analysis.small_steps import AS_GRAPH, decided_anew, launch_open, may_be_recorded
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
        """Return how FP8 surely pays where the verdict is open, if it does: the fastest such way.

        As one graph, with layers recomputed, or at a larger batch: how many tokens/s more FP8 makes
        so than as asked, %, and its lead over BF16 that way or as asked, whichever is faster.
        Without an interval of its lead nothing tells whether another way is surely better.
        """
        verdict = self.case.verdicts[0]
        if verdict.action != MORE or not self.case.fits or verdict.lead_pct.low is None:
            return None
        larger = ((f, self._anew(way)) for f, way in self._larger()) if self.may_grow else ()
        ways = [self._paying(*way) for way in self._of_this_step()]
        ways.append(next(filter(None, (self._paying(*way) for way in larger)), None))
        return max(filter(None, ways), key=lambda found: found.then.value, default=None)

    def _of_this_step(self) -> Iterator[tuple[dict[str, Any], ResolvedConfig]]:
        """Yield other ways to do the very step that is asked about, if none was asked for."""
        config, asked = self.config, self.case.asked
        if asked.as_asked:
            return
        with suppress(UserError):  # refused of such a run
            if may_be_recorded(launch_open(config), asked.gpu):
                yield dict(AS_GRAPH), changed(config, AS_GRAPH)
        with suppress(UserError):
            if not config.activation_checkpointing:
                recomputed = {"activation_checkpointing": True}
                yield recomputed, self._anew(changed(config, recomputed))

    def _paying(self, fields: dict[str, Any], way: ResolvedConfig) -> Change | None:
        found = self.ask(way)
        as_asked, so = self.case.rates, found.rates
        lead = found.verdict.lead_pct
        pays = found.verdict.action in (FP8, CHECK) and so[1] > as_asked[1]
        if not (pays and found.fits) or lead is None:
            return None
        lead = lead.over(max(1, as_asked[0] / so[0]))
        if min(lead.value, lead.value if lead.low is None else lead.low) <= 0:
            return None
        told = self._change((fields, way, 100 * (so[1] / as_asked[1] - 1)), {})
        return replace(told, lead_pct=lead)

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
