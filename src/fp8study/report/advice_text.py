"""An advice as text for a terminal of 80 columns."""

from __future__ import annotations

from fp8study.analysis.laws.account import HOST_PCT
from fp8study.analysis.laws.advise import Advice, Option, Quantity
from fp8study.analysis.laws.here import Measured
from fp8study.analysis.laws.nearby import HEADROOM
from fp8study.report.words import number, recipe

#: What the parts of a step and of memory are called.
_PARTS = {
    "gemm": "GEMMs", "casts": "casts to FP8", "elementwise": "norms and activations",
    "sharding": "copies of weights", "loss": "loss", "update": "optimizer",
    "communication": "communication", "attention": "attention", "host": "the host's launches",
    "optimizer": "optimizer states", "loss_head": "loss head", "gathered": "gathered layers",
    "copies": "copies of weights",
}  # fmt: skip


def advice_text(advice: Advice) -> str:
    """Write an advice: the answer first, then what it rests on."""
    config = advice.config
    task = (
        f"{config['model']} on {config['num_gpus']} × {advice.gpu}: {config['sequence_length']:,} "
        f"tokens, batch {config['micro_batch_size']} a GPU"
    )
    if advice.settings:
        task += f"\nSo that it fits: {', '.join(advice.settings)}"
    sections = [
        ["", f"{_answer(advice)}"],
        _memory(advice),
        _options(advice),
        _limits(advice),
        _measured(advice.measured),
        _listed("Loss, nearest evidence:", advice.loss_evidence or ("none",)),
        _listed("About the loss nothing is known of:", advice.loss_uncovered),
        _listed("Beyond what was measured:", advice.beyond),
        _listed("Left out of these figures:", advice.left_out),
        _listed("FP8 tensorwise would lead in tokens/s, by the law, with:",
                [f"{what}: {number(lead, '+.0f')} %" for what, lead in advice.changes]),
        _listed("To check it:", advice.commands),
    ]  # fmt: skip
    return "\n".join([task, *(line for section in sections for line in section)])


def _answer(advice: Advice) -> str:
    leads = {o.label: o.lead_pct for o in advice.options if o.lead_pct}
    best = advice.best_fp8
    if not advice.fits:
        also = f"It does not fit in BF16; {best} does; tokens/s {_lead(leads[best])}."
        neither = "It does not fit; the speeds below are for GPUs that had the memory."
        return also if advice.fp8_fits else neither
    if not advice.is_clear:
        return f"BF16 or {best}: neither is clearly faster."
    if advice.choice in leads:
        return f"Use {advice.choice}: tokens/s {_lead(leads[advice.choice])}."
    return f"Use BF16: with FP8 at its best, {best}, tokens/s {_lead(leads[best])}."


def _lead(figure: Quantity) -> str:
    ends = ""
    if figure.low is not None and figure.high is not None:
        ends = f" ({number(figure.low, '+.0f')} to {number(figure.high, '+.0f')})"
    return f"{number(figure.value, '+.1f')} %{ends}, {figure.kind}"


def _memory(advice: Advice) -> list[str]:
    filled = advice.options[0].memory_gib
    share = 100 * filled.value / advice.capacity_gib
    lines = [
        "",
        f"Memory in BF16: {filled.value:,.1f} of {advice.capacity_gib:.0f} GiB a GPU "
        f"({share:,.0f} %), {filled.kind}" + ("" if advice.fits else "; 10 % should stay free"),
    ]
    parts = sorted(advice.memory_parts_gib.items(), key=lambda part: -part[1])
    named = [f"{_PARTS.get(name, name)} {gib:,.1f}" for name, gib in parts if gib >= 0.1]
    lines.append(f"  by the law  {', '.join(named)}")
    if advice.building_gib > advice.capacity_gib:
        lines.append(
            f"  building  {advice.building_gib:.0f} GiB: a run of fp8study first holds the whole "
            "model on each GPU, and would end there; other trainers need not"
        )
    if not advice.fits:
        lines.append(f"  would fit  {'; '.join(advice.remedies) or 'with nothing tried here'}")
    return lines


def _options(advice: Advice) -> list[str]:
    head = f"  {'':<34}{'tokens/s a GPU':>15}  {'FP8 over BF16, %':<18}{'GiB':>5}"
    usable = (1 - HEADROOM) * advice.capacity_gib
    rows = [_option(option, option.memory_gib.value > usable) for option in advice.options]
    return ["", head, *rows, *_sources(advice, any(row.endswith("!") for row in rows))]


def _option(option: Option, is_full: bool) -> str:
    rate, lead = option.tokens_per_second_per_gpu, option.lead_pct
    says = ""
    if lead is not None:
        says = number(lead.value, "+.1f")
        if lead.low is not None and lead.high is not None:
            says += f" ({number(lead.low, '+.0f')} to {number(lead.high, '+.0f')})"
    kind = {"measured": "m", "predicted": "p", "modelled": "x"}[rate.kind]
    row = f"{kind} {option.label:<34}{rate.value:>15,.0f}  {says:<18}"
    return f"{row}{option.memory_gib.value:>5.0f}{'!' * is_full}"


def _sources(advice: Advice, has_full: bool) -> list[str]:
    kinds = {option.tokens_per_second_per_gpu.kind for option in advice.options}
    said = {"measured": "m measured", "predicted": "p predicted", "modelled": "x modelled"}
    words = [text for kind, text in said.items() if kind in kinds]
    lines = ["  " + ", ".join(words + ["! does not fit"] * has_full)]
    for option in advice.options:
        ids = option.tokens_per_second_per_gpu.run_ids
        if ids:
            more = f" and {len(ids) - 1} more (--json)" if len(ids) > 1 else ""
            lines.append(f"  {option.label}: {ids[0]}{more}")
    return lines


def _limits(advice: Advice) -> list[str]:
    by = "law with what was measured here" if advice.measured else "law"
    lines = ["", f"What a step takes ({by}, ms):"]
    for precision, parts in advice.step_parts_ms.items():
        host = parts["host"]
        device = {name: ms for name, ms in parts.items() if name != "host"}
        total = sum(device.values())
        largest = sorted(device, key=lambda name: -device[name])[:4]
        named = ", ".join(f"{_PARTS[name]} {device[name]:,.0f}" for name in largest)
        word = "; the host limits it" if host > total else ""
        if host > HOST_PCT / 100 * total and not advice.measured:
            word = f"{word or '; the host may limit it'}, and --measure times it"
        lines.append(f"  {recipe(precision)}  GPU {total:,.0f}: {named}; host {host:,.0f}{word}")
    return lines


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


def _listed(head: str, items: list[str] | tuple[str, ...]) -> list[str]:
    return ["", head, *(f"  {item}" for item in items)] if items else []
