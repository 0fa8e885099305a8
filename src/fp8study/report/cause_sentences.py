"""What made document A's FP8 run fail, in words: the fault, the noise, the batch."""

from __future__ import annotations

import pandas as pd

from fp8study.analysis import attribution as effects
from fp8study.analysis.floors import AGAIN, FAULT, SEED
from fp8study.analysis.runs.pairing import DIVERGED, in_fp8
from fp8study.report.loss_sentences import diverged
from fp8study.report.words import (
    count,
    escape,
    how_to_get,
    in_words,
    missing,
    number,
    per_machine,
    place,
    span,
)

#: A share of a gap that counts as nearly all of it, given the noise of single runs, %.
NEARLY_ALL_PCT = 90
#: A gap beyond which FP8 did not learn, %; document A's is about 50 % and more.
FAILED_PCT = 10


def document_a(table: pd.DataFrame) -> str:
    """Say what became of document A's single-GPU failure, from `speed.document_a_table`."""
    if table.empty:
        return missing("Document A's failure", "document-a")
    on_cpu = (table["device"] == "cpu").all()
    parts = ["All arms ran on a CPU, with FP8 emulated."] if on_cpu else []
    for master, arms in table.groupby("master_dtype", sort=True):
        is_stale, is_bf16 = arms["stale"].astype(bool), arms["precision"] == "bf16"
        bf16, fp8 = _loss(arms[is_bf16 & ~is_stale]), _loss(arms[in_fp8(arms) & ~is_stale])
        if bf16 is not None and fp8 is not None:
            parts.append(
                f"With {str(master).upper()} master weights and a healthy optimizer BF16 ends at a "
                f"loss of {bf16:.3f} and FP8 at {fp8:.3f}."
            )
        if is_stale.any():
            parts.append(_stale(arms[is_stale], fp8, bf16))
    return " ".join([*parts, f"(n = {span(table['num_runs'], '.0f')} per arm.)"])


def _loss(arms: pd.DataFrame) -> float | None:
    return float(arms["loss_last20_mean"].mean()) if len(arms) else None


def _stale(arms: pd.DataFrame, fp8: float | None, bf16: float | None) -> str:
    share, stale = arms["parameters_outside_optimizer_pct"].max(), _loss(arms)
    amount = "an unknown share" if pd.isna(share) else f"{share:.1f} %"
    text = (
        f"With a stale optimizer {amount} of the parameters are outside it and FP8 ends at "
        f"{stale:.3f}."
    )
    if fp8 is None or bf16 is None or stale is None:
        return f"{text} An arm to compare it with is missing."
    if stale - bf16 < 0.02 * bf16:
        return f"{text} That is no higher than BF16's: the failure did not appear here."
    closed = 100 * (stale - fp8) / (stale - bf16)
    if closed >= NEARLY_ALL_PCT:
        return (
            f"{text} So the stale optimizer made the failure, not FP8's precision. Document A does "
            "not tell when its script made the optimizer."
        )
    most = "made most of the failure, but not all" if closed >= 50 else "does not explain it"
    return f"{text} So the stale optimizer {most}."


def main_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the setting to speak of: a GPU's, with most parts and pairs."""
    if table.empty:
        return table
    places = table.groupby("effect_key", sort=False).agg(
        gpu=("device", lambda devices: (devices == "cuda").all()),
        parts=("part", "size"),
        pairs=("num_pairs", "max"),
    )
    key = places.sort_values(["gpu", "parts", "pairs"], kind="stable").index[-1]
    return table[table["effect_key"] == key]


def corners(table: pd.DataFrame) -> str:
    """Say what the fault alone does to speed and memory: the stale arm against the healthy one."""
    fp8 = table[in_fp8(table) & (table["device"] == "cuda")]
    keys = ["machine", "study", "model", "masters"]
    healthy, stale = (fp8[fp8["stale"] == ill].set_index(keys) for ill in (False, True))
    both = stale.join(healthy.add_suffix("_healthy"), how="inner")
    if both.empty:
        return missing("Speed and memory", "corner-arms")
    speed, memory = (
        100 * (both[name] / both[f"{name}_healthy"] - 1)
        for name in ("tokens_per_second_per_gpu", "memory_peak_gib")
    )
    return (
        f"Against the healthy arm, the stale FP8 arm's tokens/s change by "
        f"{span(speed, '+.1f', ' %')} and its peak memory by {span(memory, '+.1f', ' %')} "
        f"({count(len(both), 'model')}): the optimizer's work that it leaves out."
    )


def attribution(table: pd.DataFrame) -> str:
    """Say what document A's gap is made of, and what is not known of it yet."""
    rows = main_rows(table)
    if rows.empty:
        return f"**No run with a fault yet:** {how_to_get('attribution')}."
    first = rows.iloc[0]
    text = [f"In {escape(first['model'])}, {place(first)}:", _whole(rows), _planted(rows)]
    if missing := effects.absent_parts(rows):
        names = in_words(", ".join(missing))
        text.append(f"Not measured there: {names}; {how_to_get('attribution')}.")
    return "\n\n".join(part for part in text if part)


def _row(rows: pd.DataFrame, part: str, masters: str = "BF16") -> pd.Series | None:
    chosen = rows[(rows["part"] == part) & (rows["masters"] == masters)]
    return chosen.iloc[0] if len(chosen) else None


def _whole(rows: pd.DataFrame) -> str:
    whole, stale = (_row(rows, part) for part in (effects.WHOLE_GAP, effects.STALE))
    if whole is None or stale is None:
        return "The stale run, or the arm that would take its gap apart, is missing."
    if whole["mean"] <= 0 or pd.isna(stale["share_pct"]):
        return "**The gap.** The stale FP8 run ends no higher than BF16: the failure is not there."
    share = float(stale["share_pct"])
    most = "most" if share >= 50 else "the lesser part"
    text = (
        f"**The gap.** The stale FP8 run ends {whole['mean_pct']:.2f} % above BF16 (n = "
        f"{whole['num_pairs']}). The stale optimizer is "
        f"{'nearly all' if share >= NEARLY_ALL_PCT else most} of it ({share:.1f} %)"
    )
    fp8 = _row(rows, effects.TENSORWISE)
    if fp8 is not None and pd.notna(fp8["share_pct"]):
        text += f", FP8 itself {fp8['share_pct']:.1f} %"
    return f"{text}."


def _planted(rows: pd.DataFrame) -> str:
    parts: list[str] = []
    for masters in ("BF16", "FP32"):
        fault, twin = (_row(rows, part, masters) for part in (effects.PLANTED, effects.TWIN))
        if fault is None:
            continue
        text = (
            f"With {masters} master weights the planted run ends {abs(fault['mean_pct']):.2f} % "
            f"{'above' if fault['mean_pct'] > 0 else 'below'} BF16."
        )
        if twin is not None:
            text = (
                f"{text[:-1]}, the stale FP8 run {number(float(twin['mean_pct']), '+.2f')} % from "
                f"it: {twin['verdict']}."
            )
            if twin["verdict"] == "equivalent" and fault["verdict"] == "different":
                text += " So the fault makes the failure, whatever the precision."
        parts.append(text)
    return f"**The fault without FP8.** {' '.join(parts)}" if parts else ""


def larger_batches(table: pd.DataFrame) -> str:
    """Say how a stale optimizer ends where an update has several sequences, from the effects."""
    sizes = table["setting"].str.extract(r"(batch (\d+)(?:, \d+ accumulation steps)?)")
    several = sizes[0].str.contains("accumulation") | (sizes[1].astype(float) > 1)
    rows = table[several & (table["part"] == effects.WHOLE_GAP)].join(sizes[0].rename("size"))
    if rows.empty:
        return f"No stale optimizer was tried at a larger batch: {how_to_get('stale-batch')}."
    ends = "; ".join(
        f"{escape(row['model'])}, {row['size']}: {number(row['mean_pct'], '+.1f')} % from BF16 "
        f"(n = {row['num_pairs']})"
        for _, row in rows.iterrows()
    )
    mends = (rows["mean_pct"] <= FAILED_PCT).sum()
    verdict = f"fixes it in {mends} of {len(rows)} settings" if mends else "does not fix it"
    return f"With a *stale* optimizer a larger batch {verdict}: {ends}."


def noise(rungs: pd.DataFrame) -> str:
    """Say whether a precision moved the loss less than the seed did."""
    if rungs.empty:
        return f"**Noise: no arm was run twice on a GPU yet:** {how_to_get('loss-parity')}."
    known, beyond = 0, []
    for _, group in rungs.groupby(["machine", "study", "model"], sort=False):
        medians = group.set_index("rung")["median_pct"]
        recipes = medians.drop([SEED, AGAIN, FAULT], errors="ignore")
        if SEED in medians and len(recipes):
            known += 1
            if above := ", ".join(recipes.index[recipes >= medians[SEED]]):
                beyond.append(f"{place(group.iloc[0])}: {escape(above)}")
    text = (
        f"Precision moved the loss by less than the seed did ({count(known, 'setting')}); a gap "
        "that every seed shares can still be real."
    )
    if beyond:
        text = f"Precision moved the loss more than the seed did in {'; '.join(beyond)}."
    if not (rungs["rung"] == AGAIN).any():
        again = f"No run was done again with its seed: {how_to_get('loss-parity')}."
        return f"{text} {again}" if known else again
    return text if known else ""


def effective_batch(table: pd.DataFrame, ways: pd.DataFrame) -> str:
    """Say whether the healthy gap depends on the effective batch or the way to it."""
    table = table[table["device"] == "cuda"]
    if table.empty:
        return missing("Effective batch", "effective-batch")
    return per_machine(table, lambda rows: _batches(rows, ways))


def _batches(rows: pd.DataFrame, ways: pd.DataFrame) -> str:
    parts = [diverged(rows)]
    failed = int(((rows["gap_pct"] > FAILED_PCT) | (rows["verdict"] == DIVERGED)).sum())
    if failed:
        parts.append(f"FP8 fails to learn in {count(failed, 'setting')}.")
    elif (rows["effective_batch"] == 1).any():
        parts.append("With a healthy optimizer FP8 learns at an effective batch of 1 too.")
    known = ways.loc[ways["machine"] == rows["machine"].iloc[0], "verdict"]
    if len(known):
        parts.append(
            f"Two ways to the same effective batch are equivalent in "
            f"{(known == 'equivalent').sum()} of {len(known)} cases."
        )
    return " ".join(filter(None, parts))
