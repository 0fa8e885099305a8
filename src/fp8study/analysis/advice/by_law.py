"""What the law of speed says of a run, with how far it may be off."""

from __future__ import annotations

from collections.abc import Mapping

from fp8study.analysis.advice.answer import NEXT_TO_THIS
from fp8study.analysis.advice.evidence import MODELLED, PREDICTED, Beside, Quantity
from fp8study.analysis.laws import account, speed
from fp8study.analysis.laws.nearby import Law
from fp8study.core.config import ResolvedConfig


def predicted_speed(
    bf16: ResolvedConfig,
    way: ResolvedConfig,
    law: Law,
    errors: Mapping[bool, tuple[float, ...]],
    num_beyond: int,
    base: float | None = None,
    beside: Beside | None = None,
) -> tuple[Quantity, Quantity | None, str]:
    """Predict tokens/s and FP8's lead; tokens/s by that lead where BF16 was timed (`base`).

    `errors`: those of `account.nine_of_ten`; `num_beyond`: in how many things this is beyond what
    was measured. With `Option.interval_from`.
    """
    kind, wider = MODELLED if num_beyond else PREDICTED, account.wider(num_beyond)
    step = law(way)
    busy = step.host_shows
    lead_error, step_error = errors[busy]
    basis = "where the host is busy" if busy else "where the GPU decides"
    if beside and beside.off_points > lead_error:
        lead_error, basis = beside.off_points, NEXT_TO_THIS
        step_error = max(step_error, lead_error)
    lead_error, step_error = wider * lead_error, wider * step_error
    lead = speed.lead_pct(law(bf16).total, step.total)
    rate, error = 1000 * way.tokens_per_step / way.num_gpus / step.total, step_error / 100
    if base is not None:
        rate, error = base * (1 + lead / 100), lead_error / (100 + lead)
    rates = Quantity(rate, kind, max(0.0, rate * (1 - error)), rate * (1 + error))
    leads = Quantity(lead, kind, max(-100.0, lead - lead_error), lead + lead_error)
    return rates, leads if way.is_fp8 else None, basis if way.is_fp8 else ""
