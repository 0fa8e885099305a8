"""The findings of the report in words, written from the tables.

Each function returns Markdown. The words follow the sign of the numbers, and what is not there
yet is said together with the command that would make it.
"""

from __future__ import annotations

import pandas as pd

from fp8study.analysis.frames import MIXED
from fp8study.analysis.pairing import PRECISION_LABELS
from fp8study.analysis.speed import MEMORY_FULL, document_a_table
from fp8study.report.page import Report
from fp8study.report.words import count, escape, how_to_get, no_gpu_records, signed

__all__ = [
    "document_a",
    "epochs",
    "kept_in_bf16",
    "limits",
    "machines",
    "memory_summary",
    "no_gpu_records",
    "speed_details",
    "speed_summary",
    "unreadable",
]

#: A share of a gap that counts as all of it, given the noise of single runs.
NEARLY_ALL = 0.9


def machines(report: Report) -> str:
    """List the machines, each with its device and number of runs."""
    if report.runs.empty:
        return f"**There are no records yet:** {how_to_get('quick')}."
    lines = []
    for machine, group in report.runs.groupby("machine", sort=False):
        names = [str(name) for name in group["gpu_name"].dropna().unique()]
        names += ["CPU, FP8 emulated"] if (group["device"] == "cpu").any() else []
        devices = ", ".join(names) or "device unknown"
        done = int((group["status"] == "completed").sum())
        lines.append(
            f"- **{escape(str(machine))}** ({escape(devices)}): {count(len(group), 'run')}, "
            f"{done} completed."
        )
    text = "\n".join(lines)
    if report.gpu_runs.empty:
        text += f"\n\n**No GPU records yet:** {how_to_get('quick')}."
    return text


def unreadable(report: Report) -> str:
    """Name the records that could not be read, or say that all were."""
    if not report.unreadable:
        return "Every record could be read."
    lines = [f"- {escape(line)}" for line in report.unreadable]
    return "Records that could not be read:\n\n" + "\n".join(lines)


def _healthy(report: Report) -> pd.DataFrame:
    """The FP8 arms on GPUs that train every parameter and have a BF16 partner.

    Single switches of the tuned path are left out: nobody would set just one.
    """
    table = report.throughput[report.throughput["path"] != MIXED]
    alone = table["note"].str.contains("no BF16 partner")
    chosen = (table["device"] == "cuda") & (table["precision"] != "bf16") & ~alone
    return table[chosen & ~table["stale"].fillna(False).astype(bool)]


def _speedups(report: Report) -> pd.DataFrame:
    """The fair comparisons: neither of the two runs waited for memory."""
    table = _healthy(report)
    return table[table["speedup_pct"].notna()]


def speed_summary(report: Report) -> str:
    """Say in how many settings FP8 was faster, and by how much; compiled and eager apart."""
    rows = _speedups(report)
    if rows.empty:
        return (
            "**Speed: no answer yet.** No FP8 run on a GPU has a BF16 partner that differs in "
            f"precision alone: {how_to_get('quick')}."
        )
    eager, tuned = rows["setting"].str.contains("eager"), rows["path"] == "tuned"
    kinds = {
        "compiled": ~eager & ~tuned,
        "not compiled": eager & ~tuned,
        "on the tuned path": tuned,
    }
    parts = [_speed_sentence(rows[kind], how) for how, kind in kinds.items() if kind.any()]
    left_out = "Runs with a stale optimizer are not counted"
    if (report.throughput["path"] == MIXED).any():
        left_out += ", nor are single switches and earlier forms of the tuned path"
    return f"**Speed.** {' '.join(parts)} {left_out}."


def _speed_sentence(rows: pd.DataFrame, how: str) -> str:
    pct = rows["speedup_pct"].astype(float)
    faster, slower = int((pct >= 0.05).sum()), int((pct <= -0.05).sum())
    low, high = signed(pct.min(), 1), signed(pct.max(), 1)
    spread = f"{high} %" if low == high else f"{low} % to {high} %"
    return (
        f"{how.capitalize()}, FP8 was faster than BF16 in {faster} and slower in {slower} of "
        f"{count(len(rows), 'comparison')} ({spread})."
    )


def speed_details(report: Report) -> str:
    """One line for each model and recipe, over all settings; the table has each of them."""
    table = _healthy(report)
    kind = table["setting"].map(lambda s: "eager" if "eager" in s else "compiled")
    table = table.assign(how=kind.where(table["path"] != "tuned", kind + ", tuned path"))
    lines = []
    for values, group in table.groupby(["how", "model", "precision"], sort=True):
        how, model, precision = (str(value) for value in values)
        compared = group.dropna(subset="speedup_pct")
        parts = [_speed_range(compared)] if len(compared) else []
        if full := len(group) - len(compared):
            parts.append(f"{full} not compared, where memory was nearly full")
        name = PRECISION_LABELS.get(precision, precision)
        lines.append(f"- **{escape(model)}, {escape(name)}, {how}:** {'; '.join(parts)}.")
    return "\n".join(lines)


def _speed_range(compared: pd.DataFrame) -> str:
    """Say how far apart the comparisons are, and where the lowest and the highest were made."""
    ordered = compared.sort_values("speedup_pct", kind="stable")
    pct = [f"{signed(float(value), 1)} %" for value in ordered["speedup_pct"]]
    where = [f" ({count(n, 'GPU')}, {batch})" for n, batch in _places(ordered)]
    if len(set(where)) == 1:
        spread = " to ".join(dict.fromkeys((pct[0], pct[-1]))) + where[0]
    else:
        spread = f"{pct[0]}{where[0]} to {pct[-1]}{where[-1]}"
    return f"{spread} against BF16 in {count(len(pct), 'comparison')}"


def _places(table: pd.DataFrame) -> list[tuple[int, str]]:
    batch = table["setting"].str.extract(r"(batch \d+)", expand=False)
    return list(zip(table["num_gpus"].astype(int), batch, strict=True))


def memory_summary(report: Report) -> str:
    """Say what FP8 did to peak memory where every parameter is trained."""
    pct = _healthy(report)["memory_change_pct"].dropna().astype(float)
    if pct.empty:
        return f"No FP8 run on a GPU has a BF16 partner yet: {how_to_get('quick')}."
    return (
        f"In {count(len(pct), 'comparison')} FP8's peak differed from BF16's by "
        f"{signed(pct.min(), 1)} % to {signed(pct.max(), 1)} %, runs with a stale optimizer left "
        "out."
    )


def kept_in_bf16(report: Report, study: str = "") -> str:
    """Say which layers the FP8 runs keep out of FP8, where the arms' names do not.

    Args:
        report: The records.
        study: Speak of the studies of that name's beginning only.
    """
    runs = report.runs[report.runs["study"].fillna("").str.startswith(study)]
    lists = runs.dropna(subset="kept_in_bf16").groupby("study", sort=False)["kept_in_bf16"].first()
    if lists.empty:
        return ""
    names = [f"{' and '.join(f'`{n}`' for n in kept.split())} ({s})" for s, kept in lists.items()]
    rest = "" if study else "; elsewhere `lm_head`, unless an arm's name says otherwise"
    return f"Kept out of FP8: {'; '.join(names)}{rest}."


def document_a(report: Report) -> str:
    """Say what became of document A's single-GPU failure."""
    table = document_a_table(report.document_a)
    if table.empty:
        return f"**Document A's failure: no records yet:** {how_to_get('document-a')}."
    parts = ["All arms ran on a CPU, with FP8 emulated."] if _on_cpu(table) else []
    for master, arms in table.groupby("master_dtype", sort=True):
        stale = _loss(arms[arms["stale"].astype(bool)])
        healthy = arms[~arms["stale"].astype(bool)]
        fp8 = _loss(healthy[healthy["precision"] != "bf16"])
        bf16 = _loss(healthy[healthy["precision"] == "bf16"])
        parts.append(_arms(str(master).upper(), bf16, fp8))
        if stale is not None:
            share = arms.loc[arms["stale"].astype(bool), "parameters_outside_optimizer_pct"].max()
            parts.append(_stale(float(share), stale, fp8, bf16))
    low, high = int(table["num_runs"].min()), int(table["num_runs"].max())
    parts.append(f"(n = {low if low == high else f'{low} to {high}'} per arm.)")
    return " ".join(part for part in parts if part)


def _on_cpu(table: pd.DataFrame) -> bool:
    return bool((table["device"] == "cpu").all())


def _loss(arms: pd.DataFrame) -> float | None:
    return float(arms["loss_last20_mean"].mean()) if len(arms) else None


def _arms(master: str, bf16: float | None, fp8: float | None) -> str:
    if bf16 is None or fp8 is None:
        return ""
    return (
        f"With {master} masters and every parameter in the optimizer, the last 20 steps' loss is "
        f"{bf16:.2f} in BF16 and {fp8:.2f} in FP8 ({fp8 - bf16:+.3f})."
    )


def _stale(share: float, stale: float, fp8: float | None, bf16: float | None) -> str:
    amount = "an unknown share" if pd.isna(share) else f"{share:.1f} %"
    text = (
        f"With the optimizer made before the conversion, as document A does, {amount} of the "
        f"parameters are outside the optimizer and the loss is {stale:.2f}."
    )
    if fp8 is None or bf16 is None:
        return f"{text} An arm to compare it with is missing."
    if stale - bf16 < 0.02 * bf16:
        return f"{text} That is no higher than BF16's: the failure did not appear here."
    closed = (stale - fp8) / (stale - bf16)
    gap = f"Of its gap of {stale - bf16:.2f} to BF16, {100 * closed:.1f} % goes away"
    if closed >= NEARLY_ALL:
        reason = "so the stale optimizer made the failure, not FP8's precision"
    elif closed >= 0.5:
        reason = "so the stale optimizer made most of the failure, but not all"
    else:
        reason = "so the stale optimizer does not explain the failure"
    return f"{text} {gap} when the optimizer is made after the conversion, {reason}."


def limits(report: Report) -> str:
    """Say how little the answers rest on."""
    rows, gaps = _speedups(report), report.loss_gaps
    gaps = gaps[~gaps["stale"].fillna(False).astype(bool)]
    lines = []
    if len(rows):
        single = int((rows["num_runs"] == 1).sum())
        lines.append(
            f"- {single} of {count(len(rows), 'speed comparison')} "
            f"{'rests' if single == 1 else 'rest'} on one run per arm. Repeat before you rely on "
            "a difference of a few per cent."
        )
    if len(gaps):
        single = int((gaps["num_pairs"] < 3).sum())
        lines.append(
            f"- {single} of {count(len(gaps), 'loss comparison')} "
            f"{'has' if single == 1 else 'have'} fewer than three seeds and so no interval."
        )
    full = int(_healthy(report)["note"].str.contains(MEMORY_FULL).sum())
    if full:
        lines.append(
            f"- {count(full, 'speed comparison')} {'is' if full == 1 else 'are'} left out: an arm "
            "nearly filled the GPU's memory, and time in the allocator may pass for a speed-up."
        )
    lost = int((report.runs["status"] != "completed").sum())
    if lost:
        lines.append(f"- {count(lost, 'run')} did not complete: see [Methods](methods.qmd).")
    if len(report.cpu_runs):
        lines.append(
            "- Runs on a CPU emulate FP8. They test the pipeline; their timings mean nothing for "
            "GPUs, and no speed-up is computed from them."
        )
    steps = report.runs["num_steps"].max()
    if pd.notna(steps):
        lines.append(
            f"- No run is longer than {int(steps):,} steps. Nothing here speaks of a full "
            "pre-training run, of evaluation scores, or of late instabilities."
        )
    return "\n".join(lines) or "- There is nothing to limit yet: no records."


def epochs(report: Report) -> str:
    """Say whether the data were repeated."""
    seen = report.runs["epochs"].dropna()
    if seen.empty:
        return "No record says how much of its corpus it saw."
    if seen.max() <= 1:
        return f"No run saw its corpus more than once (at most {seen.max():.2f} passes)."
    repeated = int((seen > 1).sum())
    return (
        f"{count(repeated, 'run')} saw {'its' if repeated == 1 else 'their'} corpus more than "
        f"once (at most {seen.max():.1f} passes): a low loss there is partly memory. Pairs are "
        "still fair, since both arms saw the same data."
    )
