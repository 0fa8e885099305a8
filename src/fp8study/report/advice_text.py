"""An advice as text for a terminal of 80 columns."""

from __future__ import annotations

from fp8study.analysis.advice.answer import NEXT_TO_THIS, Advice, Change, Option
from fp8study.analysis.advice.figures import MEASURED, MODELLED, PREDICTED
from fp8study.analysis.laws.account import (
    FEWEST_LEADS,
    MEMORY_PCT,
    OTHER_GPU,
)
from fp8study.analysis.laws.here import Measured
from fp8study.analysis.laws.speed import HOST_PCT
from fp8study.core.words import amount
from fp8study.report.advice_checks import listed, loss_check, speed_check
from fp8study.report.verdict_text import answer_lines, as_today, lead_text
from fp8study.report.words import count, number, recipe, span

#: What the parts of a step and of memory are called.
_PARTS = {
    "gemm": "GEMMs", "casts": "casts to FP8", "elementwise": "norms and activations",
    "sharding": "copies of weights", "loss": "loss", "update": "optimizer",
    "communication": "communication", "attention": "attention", "host": "the host's launches",
    "optimizer": "optimizer states", "loss_head": "loss head", "gathered": "gathered layers",
    "copies": "copies of weights",
}  # fmt: skip
#: The leads of pairs are told where they are so far apart.
_FAR_POINTS = 10
#: In the table, where a figure is from.
_LETTERS = {MEASURED: "m", PREDICTED: "p", MODELLED: "x"}
_MEANS = {
    MEASURED: "measured", PREDICTED: "predicted (by law)", MODELLED: "modelled (extrapolated)"
}  # fmt: skip
#: More than that would break the table's columns: characters of a label, and GiB.
_LABEL, _WIDEST_GIB = 33, 9999

#: How the shorter text ends.
_MORE = "--details adds memory and steps by part, layers in FP8, losses, the laws' errors"

#: Remedies that train otherwise, with what is to be known of them.
_CAUTIONS = {
    "optimizer_state=fp8": "FP8 optimizer states: known of a 1B's loss alone (docs/results.md), "
    "and not saved in checkpoints here",
    "master_dtype=bf16": "BF16 master weights round small updates away: check the loss first",
}


def advice_text(advice: Advice, in_full: bool = True) -> str:
    """Write an advice: the answer first, then what it rests on, and how to check it.

    Without `in_full` as much as a decision takes: what memory and steps consist of, which layers
    are in FP8, by how much the laws were off and the nearest losses are left out.
    """
    config = advice.config
    passes, batch = config["gradient_accumulation_steps"], config["micro_batch_size"]
    nodes = f" in {config['num_nodes']} nodes" * (config["num_nodes"] > 1)
    task = (
        f"{config['model']} on {config['num_gpus']} × {advice.gpu}{nodes}: "
        f"{config['sequence_length']:,} tokens, batch {batch} a GPU"
        + f", {passes} passes a step"
        * (passes > 1)
    )
    norm = config["max_grad_norm"]
    clips = f"clipped at {norm:g}" if norm else "not clipped (--set max_grad_norm=1 does)"
    number_of = batch * passes * config["num_gpus"]
    sequences = f"{count(number_of, 'sequence')} ({amount(number_of * config['sequence_length'])}"
    task += f"\nOn the tuned path, {sequences} tokens) a step, gradients {clips}"
    task += "; to change the step: --global-batch-size" * (config["num_gpus"] > 1 and passes == 1)
    if advice.settings:
        task += f"\nChosen for it: {', '.join(advice.settings)}"
    evidence = [
        _limits(advice),
        _layers(advice),
        _measured(advice.measured),
        listed("FP8's loss, nearest evidence:", advice.loss_evidence or ("none",)),
    ]
    sections = [
        ["", *answer_lines(advice)],
        _memory(advice, in_full),
        _options(advice, in_full),
        listed("Beyond what was measured:", advice.beyond),
        *(evidence if in_full else [_measured(advice.measured)]),
        listed("FP8's loss is not shown equal for:", advice.loss_uncovered),
        listed("Left out of these figures:", advice.left_out),
        listed("FP8's lead in tokens/s with other settings:",
                [f"{c.what}: {lead_text(c.then, ' %', '+.0f')}, {c.then.kind}"
                 for c in advice.changes]),
        loss_check(advice),
        speed_check(advice),
        [] if in_full else ["", _MORE],
    ]  # fmt: skip
    return "\n".join([task, *(line for section in sections for line in section)])


def _memory(advice: Advice, in_full: bool) -> list[str]:
    filled = advice.options[0].memory_gib
    share = 100 * filled.value / advice.capacity_gib
    spare = "" if filled.kind == MEASURED or advice.fits else "; 10 % should stay free"
    lines = [
        "",
        f"Memory in BF16: {filled.value:,.1f} of {advice.capacity_gib:.0f} GiB a GPU "
        f"({share:,.0f} %), {filled.kind}{spare}",
    ]
    parts = sorted(advice.memory_parts_gib.items(), key=lambda part: -part[1].value)
    whole = advice.config["gradient_accumulation_steps"] > 1 and advice.config["num_gpus"] > 1
    whole &= advice.config["gradient_reduction"] == "last_pass"
    words = _PARTS | {"gradients": "gradients, whole between passes"} if whole else _PARTS
    named = [f"{words.get(n, n)} {gib.value:,.1f}" for n, gib in parts if gib.value >= 0.1]
    if in_full:
        lines.append(f"  {parts[0][1].kind}  {', '.join(named)}")
    if whole and advice.config["master_dtype"] == "fp32":
        share = advice.memory_parts_gib["gradients"].value / advice.config["num_gpus"]
        lines.append(
            f"  --set gradient_reduction=each_pass keeps a GPU's share of gradients: {share:.1f}"
        )
    if not advice.fits:
        found = "; ".join(map(_remedy, advice.remedies))
        lines.append(f"  would fit  {found or 'with nothing tried here'}")
        told = " ".join(remedy.what for remedy in advice.remedies)
        lines += [f"  {caution}" for field, caution in _CAUTIONS.items() if field in told]
    return lines


def _remedy(change: Change) -> str:
    lead, rate = change.lead_pct, change.tokens_per_second_per_gpu
    assert rate is not None
    said = f"{change.what} ({change.then.value:.0f} GiB, {change.then.kind}"
    if lead is not None:
        said += f"; FP8 then {lead_text(lead, ' %', '+.0f')}, {lead.kind}"
    return f"{said}; {rate.value:,.0f} tokens/s a GPU in FP8)"


def _options(advice: Advice, in_full: bool) -> list[str]:
    head = f"{'':<{_LABEL}}{'tokens/s a GPU':>15} {'FP8 over BF16, %':<25}{'GiB':>3}"
    rows = [_option(option, option.fits(advice.capacity_gib)) for option in advice.options]
    legend, *sources = _sources(advice)
    rests_on = [*sources, _law_errors(advice), *_interval(advice.chosen)] if in_full else []
    return ["", head, *rows, legend, *rests_on, *_perhaps_faster(advice), _days(advice)]


def _law_errors(advice: Advice) -> str:
    """Say how far the laws were off where they could be tested, as the page of predictions does.

    Of leads only where that says something of this GPU's.
    """
    tests, told = advice.law_errors, [o.lead_pct for o in advice.options if o.lead_pct]
    speaks = any(lead.kind != MEASURED and lead.low is not None for lead in told)
    leads = [each for each in tests if each.num_leads and speaks]
    sizes = [each for each in tests if each.num_memory]
    said = []
    if leads:
        mean, most = (span([getattr(each, name) for each in leads], ".1f")
                      for name in ("mean_points", "most_points"))  # fmt: skip
        number_of = sum(each.num_leads for each in leads)
        within = f"nine of ten within {most}"
        if number_of < FEWEST_LEADS:
            within = "too few to say within what nine of ten are"
        where = f" on {' and '.join(leads[0].gpus)}s" if leads[0].test == OTHER_GPU else ""
        said.append(f"{count(number_of, 'lead')}{where} off by {mean} points on average, {within}")
    if sizes:
        missed, cells = sum(e.num_missed for e in sizes), sum(e.num_memory for e in sizes)
        said.append(
            f"memory by {span([e.mean_pct or 0.0 for e in sizes], '.1f')} % "
            f"({missed} of {cells} by more than {MEMORY_PCT:g} %)"
        )
    return (
        f"  predictions so far (page Predictions): {'; '.join(said) or 'untested on another GPU'}"
    )


def _interval(option: Option) -> list[str]:
    """Say by which of the law's errors a predicted lead has its interval."""
    lead = option.lead_pct
    if not option.interval_from or lead is None or lead.high is None:
        return []
    times = f", widened {option.times_wider:.2g} times" * (option.times_wider > 1)
    known = option.beside and option.interval_from == NEXT_TO_THIS
    error = "the law was as far off" if known else "nine of ten predictions were closer"
    about = f", about its leads with {option.ranges}" if option.ranges else ""
    is_capped = lead.value + option.error_points - lead.high > 0.05
    capped = "; no more than if FP8 halved all GEMMs and communication" * is_capped
    return [
        f"  interval of {option.label}: ±{option.error_points:.1f} points; {error} "
        f"{option.interval_from}{times}{about}{capped}"
    ]


def _perhaps_faster(advice: Advice) -> list[str]:
    """Name an FP8 that is expected to be faster than the one spoken of, which is surer to pay."""
    leads = [(option, lead) for option in advice.options if (lead := option.lead_pct)]
    best = max(leads, key=lambda each: each[1].value)[0]
    now = advice.chosen.lead_pct
    if advice.chosen.label == best.label or now is None or now.kind == MEASURED:
        return []
    return [f"  {best.label} may be faster, but is less sure to pay"]


def _days(advice: Advice) -> str:
    """Say how long the training takes in BF16 and in the FP8 of the verdict, also as it is now."""
    today = as_today(advice)
    told = {"BF16": "BF16" if advice.fits else "BF16, had it the memory"}
    told |= {advice.verdict.label: advice.verdict.label}
    told |= {today.label: f"{today.label}, as the path is now"} if today else {}
    rates = {
        told[option.label]: option.tokens_per_second_per_gpu.value * advice.config["num_gpus"]
        for option in advice.options
        if option.label in told
    }
    hours = {label: advice.tokens / rate / 3600 for label, rate in rates.items()}
    unit, each = ("days", 24) if max(hours.values()) >= 24 else ("hours", 1)
    spec = ",.1f" if min(hours.values()) >= 0.1 else ".2g"
    took = [f"{number / each:{spec}} in {label}" for label, number in hours.items()]
    return f"  {unit} for {amount(advice.tokens)} tokens (--tokens), at best: {', '.join(took)}"


def _option(option: Option, fits: bool) -> str:
    rate, lead, gib = option.tokens_per_second_per_gpu, option.lead_pct, option.memory_gib
    says = "" if lead is None else f"{lead_text(lead)} {_LETTERS[lead.kind]}"
    first, _, last = option.label.rpartition(", ")
    is_long = len(option.label) >= _LABEL
    label = f"  {last}" if is_long else option.label
    row = f"{first},\n" * is_long + f"{label:<{_LABEL}}"
    row += f"{rate.value:>10,.0f} {_LETTERS[rate.kind]}  {says:<25}"
    size = f"{gib.value:>4.0f}" if gib.value < _WIDEST_GIB else f">{_WIDEST_GIB}"
    return f"{row}{size} {_LETTERS[gib.kind]}{'!' * (not fits)}"


def _sources(advice: Advice) -> list[str]:
    figures = [(o.tokens_per_second_per_gpu, o.lead_pct, o.memory_gib) for o in advice.options]
    used = {figure.kind for row in figures for figure in row if figure}
    words = [f"{letter} {_MEANS[kind]}" for kind, letter in _LETTERS.items() if kind in used]
    if not all(option.fits(advice.capacity_gib) for option in advice.options):
        words.append("! does not fit")
    lines = ["  " + ", ".join(words)]
    for option in advice.options:
        ids = option.tokens_per_second_per_gpu.run_ids
        if ids:
            more = f" and {len(ids) - 1} more (--json)" if len(ids) > 1 else ""
            apart = "; no pair with BF16, so no interval" if option.is_apart else ""
            lines.append(f"  {option.label}: {ids[0]}{more}{apart}{_pairs(option)}")
    base = advice.options[0].tokens_per_second_per_gpu.value
    if any(_is_off(option, base) for option in advice.options):
        lines.append(
            "  tokens/s: medians of all runs; leads: means of paired ratios, session by session"
        )
    return lines


def _pairs(option: Option) -> str:
    """Say how far apart pairs are where that is far, as those of hosts of unlike speed are."""
    if option.pairs_pct is None or option.pairs_pct[1] - option.pairs_pct[0] < _FAR_POINTS:
        return ""
    return f"; pairs from {' to '.join(number(each, '+.1f') for each in option.pairs_pct)} %"


def _is_off(option: Option, base: float) -> bool:
    """Whether a measured lead is notably another than the ratio of the rates beside it."""
    lead, ratio = option.lead_pct, option.tokens_per_second_per_gpu.value / base
    if lead is None or lead.kind != MEASURED:
        return False
    return abs(100 * (ratio - 1) - lead.value) > 0.5


def _limits(advice: Advice) -> list[str]:
    by = "law with what was measured here" if advice.measured else "law"
    lines = ["", f"What takes the time of a step (by the {by}, ms):"]
    config, options = advice.config, (advice.options[0], advice.chosen)
    tokens = (config["micro_batch_size"] * config["sequence_length"]
              * config["gradient_accumulation_steps"])  # fmt: skip
    for (precision, parts), option in zip(advice.step_parts_ms.items(), options, strict=True):
        rate = option.tokens_per_second_per_gpu
        took = f"; measured {1e3 * tokens / rate.value:,.0f}" if rate.kind == MEASURED else ""
        host, kind = parts["host"].value, parts["host"].kind
        device = {name: part.value for name, part in parts.items() if name != "host"}
        total = sum(device.values())
        largest = sorted(device, key=lambda name: -device[name])[:4]
        if device["communication"] and "communication" not in largest:
            largest.append("communication")
        shown = {_PARTS[name]: device[name] for name in largest}
        if (other := total - sum(shown.values())) >= 1:
            shown["other"] = other
        named = ", ".join(f"{name} {took:,.0f}" for name, took in shown.items())
        word = "; the CPU is the limit" if host > total else ""
        if host > HOST_PCT / 100 * total and not advice.measured:
            word = f"{word or '; the CPU may be the limit'}: --measure times it"
        lines.append(
            f"  {recipe(precision)}, {kind}  GPU {total:,.0f}: {named}; host {host:,.0f}"
            f"{word}{took}"
        )
    return lines


def _layers(advice: Advice) -> list[str]:
    """Say which layers a run puts into FP8, and of which the law says that it does not pay."""
    saved = {name.rpartition(".")[2]: ms for name, ms in advice.layers_saved_ms.items()}
    kind = next(iter(saved.values())).kind
    losing = [f"{name} ({number(1e3 * ms.value, '+.0f')} µs)" for name, ms in saved.items()
              if 1e3 * ms.value <= -0.5]  # fmt: skip
    rest = "in each, GEMMs save more than casts cost"
    if losing:
        rest = f"these lose by themselves, as casts cost more than GEMMs save: {', '.join(losing)}"
    kept = ", ".join(advice.kept_in_bf16)
    others = f"; {kept} stays in BF16" if kept else ", and the loss head"
    return listed("Layers in FP8, unless `skip` says otherwise:", [
        f"{', '.join(saved)} of every decoder layer{others}",
        f"by the law, {kind}: {rest}",
    ])  # fmt: skip


def _measured(found: Measured | None) -> list[str]:
    """Say what was measured here, by whom it is kept, and how to measure it anew."""
    if found is None:
        return []
    times = {recipe(name): times for name, times in found["layers"].items()}
    rates = {recipe(name): rate for name, rate in (found.get("gemm_tflops") or {}).items() if rate}
    hosts = {name: times["host_ms"] for name, times in times.items() if times["host_ms"]}
    figures = {
        "a layer, GPU": (", ".join(f"{n} {t['device_ms']:.2f}" for n, t in times.items()), "ms"),
        "its GEMMs": (", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items()), "TFLOP/s"),
        "a layer, host": (", ".join(f"{name} {ms:.2f}" for name, ms in hosts.items()), "ms"),
        "copy": (f"{found['copy_tb_per_s']:.2f}" if found.get("copy_tb_per_s") else "", "TB/s"),
        "link": (f"{found['link_gb_per_s']:,.0f}" if found.get("link_gb_per_s") else "", "GB/s"),
    }  # fmt: skip
    when = found["at"][:16].replace("T", " ")
    return [
        "",
        f"Measured here, in place of the law's constants ({when} UTC, "
        f"batch {found['micro_batch_size']}, {found['sequence_length']:,} tokens a sequence):",
        *(f"  {what:<15}{text} {unit}" for what, (text, unit) in figures.items() if text),
        "  kept in results/local/measured.json; --measure does it anew",
    ]
