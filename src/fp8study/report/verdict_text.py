"""The first lines of an advice: what to train in, and what that rests on."""

from __future__ import annotations

import re

from fp8study.analysis.advice.answer import Advice, Option
from fp8study.analysis.advice.beside import Beside
from fp8study.analysis.advice.evidence import (
    BF16_HEAD,
    CLIPPED,
    COMPILED_SWIGLU,
    EARLIER_KERNELS,
    ONE_LAYOUT,
    Verdict,
)
from fp8study.analysis.advice.figures import MODELLED, Quantity
from fp8study.analysis.decision import CHECK, FP8, MORE, WORTH_PCT
from fp8study.analysis.laws.shape import EXPERTS_IN_BF16
from fp8study.analysis.runs.naming import GRAPH, IN_ONE_PASS, SHARED_POOL
from fp8study.core.path.choices import MOST_GPUS_OF_HEAD
from fp8study.core.recipes import ALIGNMENT
from fp8study.core.words import amount, rate
from fp8study.report.words import count, interval, machine_name, number

#: Of a step, what communication must take to be told.
_EXCHANGES_PCT = 25
#: What an FP8 was timed without → what the path gives it now, where the laws know of it.
_SINCE = {
    COMPILED_SWIGLU: "SwiGLU's kernels", ONE_LAYOUT: "FP8 in both layouts, and what came since",
    BF16_HEAD: "its loss head in FP8",
}  # fmt: skip


def answer_lines(advice: Advice) -> list[str]:
    """Write what to do, what that rests on, and what is known of settings next to it."""
    said = verdict_text(advice.verdict)
    if not advice.fits and not advice.fp8_fits:
        largest = (
            f"  largest model that fits, at batch 1, recomputing if need be: {advice.largest}"
        ) * bool(advice.largest)
        return [_too_large(advice), *_no_interval(advice), *filter(None, [largest])]
    if not advice.fits:
        cured = " or ".join(each.what for each in advice.remedies[:2])
        return [
            f"It does not fit in BF16; {advice.verdict.label} does. {said}",
            "  its lead is over BF16 as if that fitted",
            *[f"  BF16 fits with {cured}"] * bool(cured),
            *_no_interval(advice), *_kept_from(advice), *_loss(advice, advice.verdict),
        ]  # fmt: skip
    also = [f"  another machine: {verdict_text(other)}" for other in advice.elsewhere]
    near = [f"  nearest measurement, {c.what}: {lead_text(c.then, ' %')}" for c in advice.nearest]
    option, over = advice.chosen, "; over NVLink" * bool(advice.without_nvlink)
    beside = _beside(option.label, option.beside)
    return [
        said, *_no_interval(advice), *_unchecked(advice), *_kept_from(advice),
        *_instead(advice), *_other_norm(advice), *_own_memory(advice),
        *_loss(advice, advice.verdict), *_going_on(advice),
        *_clipped(advice), *also, *near, *_today(advice), *beside, *_larger(advice),
        *_slow_links(advice),
        *[f"  {advice.other_trainers}{over}"] * bool(advice.other_trainers),
    ]  # fmt: skip


def _slow_links(advice: Advice) -> list[str]:
    """Say what GPUs lose by exchanging, and what was measured without NVLink."""
    share, alone, said = advice.communication_pct, advice.alone, []
    if alone and alone.tokens_per_second_per_gpu:
        n, both = advice.config["num_gpus"], (advice.options[0], advice.chosen)
        one = (alone.then.value, alone.tokens_per_second_per_gpu.value)
        all_of_them = [n * option.tokens_per_second_per_gpu.value for option in both]
        few, many = (f"{r[0]:,.0f} tokens/s in BF16 and {r[1]:,.0f} in FP8"
                     for r in (one, all_of_them))  # fmt: skip
        said.append(f"  one GPU alone makes {few}; these {n} together {many}")
    if share >= _EXCHANGES_PCT:
        said.append(
            f"  communication takes {share:.0f} % of a step in BF16, by the law; a larger batch "
            "hides more of it"
        )
    return [*said, *[f"  {advice.without_nvlink}"] * bool(advice.without_nvlink)]


def _no_interval(advice: Advice) -> list[str]:
    """Say why it is unknown how far a predicted lead may be off, or whose times it rests on."""
    lead, why = advice.chosen.lead_pct, advice.chosen.interval_from
    if lead is None or not why:
        return []
    if lead.high is None:
        return [f"  how far that may be off is unknown: {why}"]
    return [f"  {each}" for each in advice.beyond if each.startswith(f"{advice.gpu}: ")]


def _unchecked(advice: Advice) -> list[str]:
    """Say so where no run can check it, and of which model one can."""
    if advice.building_gib <= advice.capacity_gib:
        return []
    instead = f": check a smaller one first, as {advice.smaller}" * bool(advice.smaller)
    return [f"  fp8study cannot build a model of this size on such a GPU{instead}"]


def _kept_from(advice: Advice) -> list[str]:
    """Say what keeps FP8 from more: experts, BF16 master weights, GPUs of which none was timed."""
    said = []
    if advice.head_on_fewer:
        said.append(
            f"  on more than {MOST_GPUS_OF_HEAD} GPUs the loss head stays in BF16: one in FP8 "
            "was never timed there"
        )
    if advice.config["num_gpus"] > 1 and not any(each.gathers_fp8 for each in advice.options):
        said.append(
            f"  no FP8 all-gather: the layers' rows do not divide by {advice.config['num_gpus']}"
        )
    said += [
        f"  in BF16 for {side:,}, which FP8 GEMMs cannot take: {', '.join(names)}; a multiple of "
        f"{ALIGNMENT} would do, as {side + -side % ALIGNMENT:,}"
        for side, names in advice.unaligned.items()
    ]
    if EXPERTS_IN_BF16 in advice.left_out:
        said.append(
            "  its experts stay in BF16, as fp8study converts none (torchao's prototype "
            "moe_training does, which nobody tried here): FP8 is attention's alone"
        )
    if advice.config["activation_checkpointing"]:
        said.append("  layers are recomputed: so torch's AdamW, FP8 casts in each pass, and the "
                    "loss head in BF16")  # fmt: skip
    if advice.config["master_dtype"] == "bf16":
        said.append("  BF16 master weights: so no CUDA graph, FP8 casts in each pass, and the loss "
                    "head in BF16")  # fmt: skip
    return said


def _instead(advice: Advice) -> list[str]:
    """Say in which other way to do the step the answer is not open."""
    found = advice.instead
    if found is None or found.lead_pct is None:
        return []
    # Of what is modelled nobody has timed the like.
    pays = "should pay" if found.lead_pct.kind == MODELLED else "surely pays"
    return [
        f"  With {found.what} FP8 {pays}: tokens/s {lead_text(found.lead_pct, ' %')} over the "
        f"faster BF16, {found.lead_pct.kind}, and {number(found.then.value, '.0f')} % more than "
        "here"
    ]


def _other_norm(advice: Advice) -> list[str]:
    """Say so where gradients were clipped at another norm than is asked about."""
    norm, timed_at = advice.config["max_grad_norm"], f"clipped at {CLIPPED:g}"
    is_other = norm not in (None, CLIPPED) and timed_at in advice.verdict.setting
    return [f"  timed, and its loss judged, with gradients {timed_at}"] * is_other


def _own_memory(advice: Advice) -> list[str]:
    """Say so where a graph was timed before its gradients shared the activations' memory."""
    setting = advice.verdict.setting
    shares = advice.config["gradient_pool"] == "shared"
    was_before = shares and GRAPH in setting and SHARED_POOL not in setting
    return ["  timed with gradients in memory of their own, as graphs had before"] * was_before


def _too_large(advice: Advice) -> str:
    """Say what would make it fit, and what FP8 gives then."""
    asked = "the speeds below are as if it fitted."
    bf16, fp8 = (option.memory_gib.value for option in (advice.options[0], advice.chosen))
    needs = (
        f"It does not fit: {bf16:,.0f} GiB a GPU in BF16 and {fp8:,.0f} in FP8, of "
        f"{advice.capacity_gib:,.0f}"
    )
    first = next(iter(advice.remedies), None)
    if first is None or first.lead_pct is None:
        return f"{needs}; {asked}"
    lead = first.lead_pct
    return (
        f"{needs}. With {first.what} it does: FP8 then {lead_text(lead, ' %', '+.0f')} "
        f"tokens/s, {lead.kind}. Without that {asked}"
    )


def _clipped(advice: Advice) -> list[str]:
    if advice.clipped is None:
        return []
    said = f"  clipped, --set max_grad_norm={CLIPPED:g}: {verdict_text(advice.clipped)}"
    return [said, *_loss(advice, advice.clipped)]


def _loss(advice: Advice, verdict: Verdict) -> list[str]:
    """Say at which learning rates FP8's loss was judged, where that was in this very setting."""
    loss = verdict.loss
    if verdict.action not in (FP8, CHECK) or not loss or not loss["loss_is_same"]:
        return []
    than = "equivalent to" if loss["loss_verdict"] == "equivalent" else "below"
    said = f"its loss is {than} BF16's at a learning rate of {rate(loss['loss_rate'])}"
    if verdict.action == CHECK:
        said = f"its loss: {loss['loss_verdict']}"
        if loss["loss_verdict"] == "undecided":
            said += f" ({number(loss['loss_gap_pct'], '+.2f')} % in training)"
        said += f" at a learning rate of {rate(loss['loss_rate'])}"
    before = IN_ONE_PASS in verdict.setting and not loss["loss_in_one_pass"]
    study = f"{loss['loss_machine']}/{loss['loss_study']}"
    seen = loss["loss_tokens"]
    of = f", {amount(seen)} tokens of {amount(advice.tokens)}" if seen else ""
    said += f" in {loss['loss_steps']:.0f} steps{of} ({study}"
    said += ", updated by torch's AdamW" * before + ")"
    if loss["loss_rate_above"] is not None:
        above = f"{loss['loss_machine_above']}/{loss['loss_study_above']}"
        said += f", {loss['loss_verdict_above']} at {rate(loss['loss_rate_above'])}"
        said += f" ({above})" * (above != study)
    ask = "; for yours add --set learning_rate=RATE" * (advice.learning_rate is None)
    return [f"  {said}{ask}"]


def _going_on(advice: Advice) -> list[str]:
    """Tell where FP8 is worth it how a training ended that goes on from trained weights."""
    known = advice.from_weights and advice.verdict.action in (FP8, CHECK)
    return [f"  {advice.from_weights}"] * bool(known)


def _today(advice: Advice) -> list[str]:
    """Say what is to be expected of the path's kernels, where FP8 was timed before it had them."""
    now = as_today(advice)
    if now is None or now.lead_pct is None:
        return []
    gives = next(gives for had, gives in _SINCE.items() if advice.verdict.label.endswith(had))
    lead = lead_text(now.lead_pct, " %")
    return [f"  with {gives}, as the tuned path is now: {lead}, {now.lead_pct.kind}"]


def as_today(advice: Advice) -> Option | None:
    """Return the verdict's FP8 by today's kernels, where it was timed before the path had them."""
    label = advice.verdict.label
    for kernels in EARLIER_KERNELS:
        label = label.removesuffix(f", {kernels}")
    if not advice.verdict.label.endswith(tuple(_SINCE)):
        return None
    return next((option for option in advice.options if option.label == label), None)


def _larger(advice: Advice) -> list[str]:
    larger = advice.larger
    if larger is None or (larger.then.low or 0.0) < 0:  # it may as well be slower
        return []
    faster = lead_text(larger.then, " %", "+.0f")
    saves = "" if advice.config["activation_checkpointing"] else "without saving more memory, "
    return [
        f"  {saves}only FP8 has memory for {larger.what}: tokens/s {faster} over BF16 at batch "
        f"{advice.config['micro_batch_size']}, {larger.then.kind}"
    ]


def _beside(label: str, beside: Beside | None) -> list[str]:
    if beside is None:
        return []
    clips = "" if beside.clips_alike else ", its gradients clipped otherwise"
    return [
        f"  {label}, measured next to it: {lead_text(beside.lead_pct, ' %')} on "
        f"{beside.num_gpus} GPUs, batch {beside.micro_batch_size}{clips}, where the law says "
        f"{number(beside.law_pct, '+.1f')} %"
    ]


def verdict_text(verdict: Verdict) -> str:
    """Write what to do, as the report's first page does, and why."""
    lead, where = verdict.lead_pct, verdict.machine and f" on {_where(verdict)}"
    says = f"tokens/s {lead_text(lead, ' %')}, {lead.kind}"
    void = unsteady = ""
    if verdict.num_void:
        void = (
            f" Not counted: {count(verdict.num_void, 'run')} of this setting, in which torch still "
            "allocated memory while it was timed."
        )
    if verdict.num_unsteady:
        unsteady = f" (steps of {count(verdict.num_unsteady, 'run')} had not settled)"
    action = f"{verdict.action[0].upper()}{verdict.action[1:]}"
    if lead.kind == MODELLED:
        action += " (extrapolated, not measured)"
    if verdict.action == MORE and lead.low is not None:
        action += f", as the lead may lie on either side of {WORTH_PCT:g} %"
    return f"{action}. {verdict.label}: {says}{where}{unsteady}.{void}"


def _where(verdict: Verdict) -> str:
    """Name the GPUs that were measured, of all that the machine has, and how often if but once.

    One pair tells nothing of its own spread: its interval is that of other settings.
    """
    machine = machine_name(verdict.machine)
    has = re.match(r"(\d+) × ", machine)
    of = f"{verdict.num_gpus} of " if has and verdict.num_gpus < int(has[1]) else ""
    once = ", once" if verdict.num_pairs == 1 else ""
    return f"{of}{machine}{once}"


def lead_text(figure: Quantity, unit: str = "", spec: str = "+.1f") -> str:
    """Write FP8's lead with its interval, if it has one."""
    ends = ""
    if figure.low is not None and figure.high is not None:
        ends = f" ({interval(figure.low, figure.high, spec)})"
    return f"{number(figure.value, spec)}{unit}{ends}"
