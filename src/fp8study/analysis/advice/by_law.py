"""What the law of speed says of a run, with how far it may be off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fp8study.analysis.advice.answer import NEXT_TO_THIS, Change, Option
from fp8study.analysis.advice.beside import Beside
from fp8study.analysis.advice.figures import MODELLED, PREDICTED, Quantity
from fp8study.analysis.decision import WORTH_PCT
from fp8study.analysis.laws import account, speed
from fp8study.analysis.laws.nearby import Law
from fp8study.core.config import ResolvedConfig


@dataclass(frozen=True)
class ByLaw:
    """What the laws say of what is asked, and how far they may be off."""

    law: Law
    halved: Mapping[float, Law]
    """What it would be with slower networks, by their Gbit/s, which intervals include."""
    links: Sequence[Law]
    """The same with slower and faster links in a box."""
    errors: account.NineOfTen
    """Those of this GPU."""
    beyond: Callable[[ResolvedConfig], list[str]]
    """In what a run is beyond what was measured."""
    unknown: str
    """Why it is unknown how far the laws are off, where there are no intervals."""

    def wider(self, way: ResolvedConfig) -> float:
        """Return how much wider than usual an interval is."""
        return account.wider(len(self.beyond(way)))

    @property
    def ranges(self) -> str:
        """Return over what intervals range, beside how far the law may be off."""
        network = "the network as it is assumed and half of that" * bool(self.halved)
        links = "links as they are assumed, half and twice as fast" * bool(self.links)
        return " and ".join(filter(None, [network, links]))

    def figure(self, way: ResolvedConfig, value: float) -> Quantity:
        """Return a figure of a run without an interval."""
        return Quantity(value, MODELLED if self.beyond(way) else PREDICTED)

    def around(self, found: Change, way: ResolvedConfig, is_lead: bool = False) -> Change:
        """Say how far a lead, or a rate over that of another run, may be off."""
        if self.unknown:
            return found
        lead_error, step_error = self.errors.at(busy_pct(way, self.law(way)))
        value = found.then.value
        error = lead_error if is_lead else (100 + value) * step_error / 100
        half = error * self.wider(way)
        return replace(found, then=replace(found.then, low=value - half, high=value + half))

    def rate_and_lead(
        self, bf16: ResolvedConfig, way: ResolvedConfig, base: float | None, beside: Beside | None
    ) -> tuple[Quantity, Quantity | None, str, float]:
        """Predict tokens/s and FP8's lead; tokens/s by that lead where BF16 was timed (`base`).

        With `Option.interval_from` and `error_points`. `beside`: how far the law is off next to
        this.
        """
        laws = (self.law, *self.halved.values(), *self.links)
        steps = [law(way) for law in laws]
        busy = busy_pct(way, steps[0])
        lead_error, step_error = self.errors.at(busy)
        shows = busy > speed.HOST_PCT
        basis = "where the host is busy" if shows else "where the GPU is the limit"
        if shows and busy < speed.LATE_PCT:
            basis = "where the host may be busy"
        if beside and beside.off_points > lead_error:
            lead_error, basis = beside.off_points, NEXT_TO_THIS
            step_error = max(step_error, lead_error)
        wider = self.wider(way)
        lead_error, step_error = wider * lead_error, wider * step_error
        leads = [
            speed.lead_pct(law(bf16).total, there.total)
            for law, there in zip(laws, steps, strict=True)
        ]
        rates = [1000 * way.tokens_per_step / way.num_gpus / there.total for there in steps]
        error = step_error / 100
        if base is not None:
            rates = [base * (1 + lead / 100) for lead in leads]
            error = lead_error / (100 + leads[0])
        rate, lead = self.figure(way, rates[0]), self.figure(way, leads[0])
        if self.unknown:
            basis = self.unknown
        else:
            low, high = min(leads) - lead_error, max(leads) + lead_error
            most = max(*leads, *(most_pct(law(bf16), law(way)) for law in laws))
            lead = replace(lead, low=max(-100.0, low), high=min(most, high))
            low, high = min(rates) * (1 - error), max(rates) * (1 + error)
            rate = replace(rate, low=max(0.0, low), high=high)
        return rate, *((lead, basis, lead_error) if way.is_fp8 else (None, "", 0.0))


def most_pct(bf16: speed.StepParts, fp8: speed.StepParts) -> float:
    """Return the lead if GEMMs and communication took half as long and casts no time, %."""
    least = fp8.device - fp8.casts - fp8.gemm - fp8.communication
    least += (bf16.gemm + bf16.communication) / 2
    return speed.lead_pct(bf16.device, least)


def busy_pct(way: ResolvedConfig, step: speed.StepParts) -> float:
    """Return what launching kernels takes, % of the GPU's time, by which an error is known.

    Of several nodes without communication: none were timed, and waiting makes nothing surer.
    """
    waits = step.communication if way.num_nodes > 1 else 0.0
    return 100 * step.host / (step.device - waits)


def _clamped(low_pct: float) -> float:
    return min(max(low_pct, -WORTH_PCT), WORTH_PCT)


def chosen(options: Sequence[Option]) -> Option:
    """Return the FP8 to speak of where none was timed.

    Of the recipe that is expected to be the fastest: of its ways to gather those that may pay, the
    one whose lead is surely the largest; of several that surely pay, or may all cost as much, the
    fastest.
    """
    leads = [(option, lead) for option in options if (lead := option.lead_pct)]
    recipe = max(leads, key=lambda each: each[1].value)[0].precision
    leads = [each for each in leads if each[0].precision == recipe]
    may_pay = [each for each in leads if (each[1].high or 0.0) > WORTH_PCT]
    return max(
        may_pay or leads,
        key=lambda each: (_clamped(each[1].low or 0.0), each[1].value),
    )[0]
