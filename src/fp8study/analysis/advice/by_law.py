"""What the law of speed says of a run, with how far it may be off."""

from __future__ import annotations

from collections.abc import Sequence

from fp8study.analysis.advice.answer import NEXT_TO_THIS, Option
from fp8study.analysis.advice.evidence import Beside
from fp8study.analysis.advice.figures import MODELLED, PREDICTED, Quantity
from fp8study.analysis.decision import WORTH_PCT
from fp8study.analysis.laws import account, speed
from fp8study.analysis.laws.nearby import Law
from fp8study.core.config import ResolvedConfig


def predicted_speed(
    bf16: ResolvedConfig,
    way: ResolvedConfig,
    laws: Sequence[Law],
    errors: account.NineOfTen,
    num_beyond: int,
    base: float | None,
    beside: Beside | None,
) -> tuple[Quantity, Quantity | None, str]:
    """Predict tokens/s and FP8's lead; tokens/s by that lead where BF16 was timed (`base`).

    `laws`: the law, and what it would be with other networks, which the intervals include;
    `errors`: those of this GPU; `num_beyond`: in how many things this is beyond what was measured.
    With `Option.interval_from`.
    """
    kind, wider = MODELLED if num_beyond else PREDICTED, account.wider(num_beyond)
    steps = [law(way) for law in laws]
    step = steps[0]
    busy = busy_pct(way, step)
    lead_error, step_error = errors.at(busy)
    shows = busy > speed.HOST_PCT
    basis = "where the host is busy" if shows else "where the GPU decides"
    if shows and busy < speed.LATE_PCT:
        basis = "where the host may be busy"
    if beside and beside.off_points > lead_error:
        lead_error, basis = beside.off_points, NEXT_TO_THIS
        step_error = max(step_error, lead_error)
    lead_error, step_error = wider * lead_error, wider * step_error
    leads = [
        speed.lead_pct(law(bf16).total, there.total) for law, there in zip(laws, steps, strict=True)
    ]
    rates = [1000 * way.tokens_per_step / way.num_gpus / there.total for there in steps]
    error = step_error / 100
    if base is not None:
        rates = [base * (1 + lead / 100) for lead in leads]
        error = lead_error / (100 + leads[0])
    low, high = min(leads) - lead_error, max(leads) + lead_error
    lead = Quantity(leads[0], kind, max(-100.0, low), high)
    low, high = min(rates) * (1 - error), max(rates) * (1 + error)
    rate = Quantity(rates[0], kind, max(0.0, low), high)
    return rate, lead if way.is_fp8 else None, basis if way.is_fp8 else ""


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
