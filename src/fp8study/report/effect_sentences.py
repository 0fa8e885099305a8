"""The findings on cause, noise and batch in words, in the manner of `fp8study.report.sentences`."""

from __future__ import annotations

import pandas as pd

from fp8study.analysis import attribution as effects
from fp8study.analysis.floors import AGAIN, FAULT, SEED
from fp8study.analysis.pairing import DIVERGED
from fp8study.report.words import count, escape, how_to_get, signed

#: A share of a gap that counts as nearly all of it.
NEARLY_ALL_PCT = 90
#: A gap beyond which FP8 did not learn; document A's is about 50 % and more.
FAILED_PCT = 10


def main_setting(table: pd.DataFrame) -> str | None:
    """Return the ``effect_key`` of the setting to speak of: a GPU's, with most parts and pairs.

    Args:
        table: From `fp8study.analysis.attribution.effect_table`.
    """
    if table.empty:
        return None
    places = table.groupby("effect_key", sort=False).agg(
        gpu=("device", lambda devices: (devices == "cuda").all()),
        parts=("part", "size"),
        pairs=("num_pairs", "max"),
    )
    return str(places.sort_values(["gpu", "parts", "pairs"], kind="stable").index[-1])


def attribution(table: pd.DataFrame) -> str:
    """Say what document A's gap is made of, and what is not known of it yet.

    Args:
        table: From `fp8study.analysis.attribution.effect_table`.
    """
    key = main_setting(table)
    if key is None:
        return f"**No run with a fault yet:** {how_to_get('attribution')}."
    rows = table[table["effect_key"] == key]
    first = rows.iloc[0]
    where = f"{escape(str(first['model']))} in the study {escape(str(first['study']))} on " \
            f"{escape(str(first['machine']))} ({escape(str(first['setting']))})"  # fmt: skip
    text = [f"What follows is for {where}.", _whole(rows), _planted(rows), *_others(rows)]
    if missing := effects.absent_parts(table, key):
        text.append(f"Not measured there: {', '.join(missing)}; {how_to_get('attribution')}.")
    return "\n\n".join(part for part in text if part)


def _row(rows: pd.DataFrame, part: str, masters: str | None = "BF16") -> pd.Series | None:
    chosen = rows[rows["part"] == part]
    if masters is not None:
        chosen = chosen[chosen["masters"] == masters]
    return chosen.iloc[0] if len(chosen) else None


def _whole(rows: pd.DataFrame) -> str:
    whole, stale = (_row(rows, part) for part in (effects.WHOLE_GAP, effects.STALE))
    if whole is None or stale is None:
        return "The stale run, or the arm that would take its gap apart, is missing."
    text = (
        f"**The gap.** The stale FP8 run ends {whole['mean']:.2f} nats ({whole['mean_pct']:.1f} %) "
        f"above BF16 (n = {whole['num_pairs']})."
    )
    if whole["mean"] <= 0 or pd.isna(stale["share_pct"]):
        return "**The gap.** The stale FP8 run ends no higher than BF16: the failure is not there."
    share = float(stale["share_pct"])
    amount = (
        "nearly all of it" if share >= NEARLY_ALL_PCT else "most" if share >= 50 else "the lesser"
    )
    text += f" The stale optimizer is {amount} ({share:.1f} %)"
    if (fp8 := _row(rows, effects.TENSORWISE)) is not None and pd.notna(fp8["share_pct"]):
        text += f", FP8 itself {fp8['share_pct']:.1f} %"
        added = _row(rows, effects.MASTERS_IN_FP8, None)
        if added is not None and pd.notna(added["share_pct"]):
            text += f", of which BF16 masters add {signed(float(added['share_pct']), 2)} %"
    return f"{text}."


def _planted(rows: pd.DataFrame) -> str:
    parts = []
    for masters in ("BF16", "FP32"):
        fault, twin = (_row(rows, part, masters) for part in (effects.PLANTED, effects.TWIN))
        if fault is None:
            continue
        text = (
            f"With {masters} masters, a BF16 run that leaves the same weights out of its optimizer "
            f"ends {signed(float(fault['mean_pct']), 1)} % from BF16"
        )
        whole = _row(rows, effects.WHOLE_GAP, masters)
        if whole is not None and whole["mean"] > 0:
            text += f", {100 * fault['mean'] / whole['mean']:.1f} % of the stale FP8 run's gap"
        text += "."
        if twin is not None:
            text += f" The stale FP8 run differs from it by {_numbers(twin)}."
            if twin["verdict"] == "equivalent" and fault["verdict"] == "different":
                text += " So the fault makes the failure, whatever the precision."
        parts.append(text)
    return f"**The fault without FP8.** {' '.join(parts)}" if parts else ""


def _others(rows: pd.DataFrame) -> list[str]:
    names = (effects.TENSORWISE, effects.ROWWISE, effects.ALL_GATHER, effects.MASTERS)
    lines = [
        f"- {name[0].upper()}{name[1:]} ({row['masters']} masters): {_numbers(row)}"
        for name in names
        for _, row in rows[rows["part"] == name].iterrows()
    ]
    return ["\n".join(lines)] if lines else []


def _numbers(row: pd.Series) -> str:
    """Write a difference with all that is needed to judge it."""
    text = f"{signed(float(row['mean_pct']), 2)} %"
    if pd.isna(row["p_holm"]):
        return f"{text} ({count(int(row['num_pairs']), 'pair')}: no interval)"
    found = (
        ""
        if row["verdict"] == "different"
        else f"; differences from {row['detectable_pct']:.2f} % on would have been found"
    )
    return (
        f"{text} (95 %: {row['interval']}; n = {row['num_pairs']}; {row['verdict']} at "
        f"±{row['margin_pct']:g} %{found})"
    )


def speed_apart(throughput: pd.DataFrame) -> str:
    """Say how much of a stale run's speed and memory is work that it skips.

    Args:
        throughput: From `fp8study.analysis.speed.throughput_table`.
    """
    keys = ["machine", "study", "model", "setting", "num_gpus"]
    rows = throughput[(throughput["device"] == "cuda") & (throughput["precision"] != "bf16")]
    rows = rows[rows["speedup_pct"].notna() & rows["setting"].str.contains("compiled")]
    lines = []
    for (machine, study, model, setting, _), group in rows.groupby(keys, sort=False):
        faulty = group["stale"].fillna(False).astype(bool)
        healthy = group[~faulty & (group["precision"] == "fp8_tensorwise")]
        if not faulty.any() or healthy.empty:
            continue
        stale, fair = group[faulty].iloc[0], healthy.iloc[0]
        lines.append(
            f"- **{escape(str(model))}** ({escape(str(study))} on {escape(str(machine))}; "
            f"{escape(str(setting))}): stale {_lead(stale)}; with every parameter trained "
            f"{_lead(fair)}. The work it skips is "
            f"{signed(float(stale['speedup_pct'] - fair['speedup_pct']), 1)} points of the speed "
            f"and {signed(float(stale['memory_change_pct'] - fair['memory_change_pct']), 1)} "
            "points of the memory."
        )
    if not lines:
        return (
            "No compiled stale run has a healthy FP8 run beside it yet: "
            f"{how_to_get('corner-arms')}."
        )
    return "Against BF16 with everything else equal, compiled:\n\n" + "\n".join(lines)


def _lead(row: pd.Series) -> str:
    return (
        f"{signed(float(row['speedup_pct']), 1)} % tokens/s and "
        f"{signed(float(row['memory_change_pct']), 1)} % peak memory"
    )


def noise(table: pd.DataFrame) -> str:
    """Say how the rungs of the ladder compare, by their medians.

    Args:
        table: From `fp8study.analysis.floors.ladder_table`.
    """
    if table.empty:
        return f"**Noise: no arm was run twice on a GPU yet:** {how_to_get('loss-parity')}."
    lines = []
    for (machine, study, model), group in table.groupby(["machine", "study", "model"], sort=False):
        medians = group.groupby("rung", sort=False)["difference_pct"].median()
        rungs = "; ".join(
            f"{escape(str(rung))} {medians[rung]:.3g} % (n = {int((group['rung'] == rung).sum())})"
            for rung in medians.sort_values().index
        )
        lines.append(
            f"- **{escape(str(model))}, {escape(str(study))} on {escape(str(machine))}:** {rungs}."
            f"{_below(medians)}"
        )
    again = (table["rung"] == AGAIN).any()
    missing = (
        "" if again else f"\n\nNo run was done again with its seed: {how_to_get('loss-parity')}."
    )
    return "Median differences of the final loss:\n\n" + "\n".join(lines) + missing


def _below(medians: pd.Series) -> str:
    """Say which precisions lie below the seed's rung, if that rung is known."""
    if SEED not in medians:
        return ""
    recipes = medians.drop([SEED, AGAIN, FAULT], errors="ignore")
    below = int((recipes < medians[SEED]).sum())
    if not len(recipes):
        return ""
    return (
        f" {below} of {count(len(recipes), 'precision')} "
        f"{'lies' if below == 1 else 'lie'} below the seed's rung."
    )


def gap_along(gaps: pd.DataFrame, spread: pd.DataFrame) -> str:
    """Say when the healthy gap was largest, and how it compares with the spread of seeds there.

    Args:
        gaps: From `fp8study.analysis.losses.gap_by_step`.
        spread: From `fp8study.analysis.losses.seed_spread`.
    """
    place = ["machine", "study", "model", "num_gpus", "setting"]
    bands = spread.groupby([*place, "step"], sort=False)["spread_pct"].mean()
    lines = []
    for (*where, arm), rows in gaps.groupby([*place, "arm"], sort=False):
        means = rows.groupby("step")["gap_pct"].mean()
        number = int(means.abs().to_numpy().argmax())
        largest, gap = means.index[number], float(means.iloc[number])
        band = bands.get((*where, largest))
        if band is None:
            continue
        machine, study, model, _, setting = (escape(str(part)) for part in where)
        side = "inside" if abs(gap) <= band else "outside"
        lines.append(
            f"- **{escape(str(arm))}, {model}** ({study} on {machine}; {setting}): largest at step "
            f"{largest}, {signed(gap, 2)} %, {side} one standard deviation of "
            f"the seeds ({band:.2f} %); at the end {signed(float(means.iloc[-1]), 2)} %."
        )
    if not lines:
        return f"No FP8 pair has BF16 seeds to compare its curve with: {how_to_get('loss-parity')}."
    return "Mean gaps over seeds, running means of the loss:\n\n" + "\n".join(lines)


def effective_batch(table: pd.DataFrame, ways: pd.DataFrame) -> str:
    """Say whether the healthy gap depends on the effective batch or the way to it.

    Args:
        table: From `fp8study.analysis.losses.effective_batch_table`.
        ways: From `fp8study.analysis.losses.ways_table`.
    """
    table = table[table["device"] == "cuda"]
    if table.empty:
        return f"**Effective batch: no records yet:** {how_to_get('effective-batch')}."
    verdicts = table["verdict"].value_counts()
    margins = " or ".join(f"±{m:g} %" for m in sorted(table["margin_pct"].dropna().unique()))
    said = ", ".join(f"{verdicts.get(v, 0)} {v}" for v in ("equivalent", "different", "undecided"))
    if gone := verdicts.get(DIVERGED, 0):
        said += f", {gone} diverged"
    text = f"Of {count(len(table), 'setting')}, at {margins}: {said}."
    sizes = table.groupby("effective_batch")["gap_pct"].mean().astype(float).dropna()
    at = "; ".join(f"{signed(gap, 2)} % at {size:g}" for size, gap in sizes.items())
    if at:
        text += f" Mean gap by effective batch: {at} (+: FP8 is worse)."
    failed = table[(table["gap_pct"].astype(float) > FAILED_PCT) | (table["verdict"] == DIVERGED)]
    if len(failed):
        text += f" FP8 fails to learn in {count(len(failed), 'setting')}."
    elif (sizes.index == 1).any():
        text += " With a healthy optimizer FP8 learns at an effective batch of 1 too."
    if len(ways):
        agree = ways["verdict"].value_counts().get("equivalent", 0)
        apart = ways["difference_pct"].astype(float).abs().max()
        text += (
            f" Of {count(len(ways), 'comparison')} of two ways to one effective batch, paired by "
            f"seed, {agree} {'is' if agree == 1 else 'are'} equivalent; their mean gaps differ by "
            f"at most {apart:.2f} points."
        )
    return text
