"""What the instruments saw, in words that follow the numbers."""

from __future__ import annotations

import math

import pandas as pd

from fp8study.analysis import instruments as tables
from fp8study.analysis import stats
from fp8study.analysis.instruments import break_even_table
from fp8study.report.words import count, how_to_get

_STUDY = "instruments"

#: A change of the energy per token by less is taken for none.
SAME_PCT = 1.0


def _missing(what: str) -> str:
    return f"**{what}: no records yet:** {how_to_get(_STUDY)}."


def _span(values: pd.Series, digits: int) -> str:
    low, high = f"{values.min():.{digits}f}", f"{values.max():.{digits}f}"
    return low if low == high else f"{low} to {high}"


def proof(frame: pd.DataFrame) -> str:
    """Say whether every run computed what it claims to compute.

    Args:
        frame: From `fp8study.analysis.instruments.instruments_frame`.
    """
    on_gpu = frame[frame["device"] == "cuda"]
    table = tables.kernels_table(on_gpu)
    if table.empty:
        return _missing("Proof that FP8 ran")
    seen = on_gpu[tables.numbers(on_gpu, "step.fp8_gemm_flops_pct").notna()]
    fp8, bf16 = seen[seen["precision"] != "bf16"], seen[seen["precision"] == "bf16"]
    expected = tables.numbers(fp8, "audit.fp8_gemm_flops_pct_expected")
    unjudged, fp8 = fp8[expected.isna()], fp8[expected.notna()]
    parts = []
    if len(unjudged):
        parts.append(
            f"{count(len(unjudged), 'profiled FP8 run')} cannot be judged: FP8 was emulated, or "
            "the record is too old to say what to expect."
        )
    if len(fp8):
        share = fp8["step.fp8_gemm_flops_pct"].astype(float)
        off = (share - expected[expected.notna()]).abs()
        silent = int((share == 0).sum())
        if silent:
            parts.append(f"**{count(silent, 'FP8 run')} did no product in FP8.**")
        parts.append(
            f"In {count(len(fp8), 'profiled FP8 run')}, {_span(share, 1)} % of the matrix "
            f"products' FLOPs were done in FP8, within {max(0.1, off.max()):.1f} points of what "
            "the converted layers should give."
        )
    if len(bf16):
        wrong = int((bf16["step.fp8_gemm_flops_pct"] > 0).sum())
        which = "no FP8 product" if not wrong else f"FP8 products in {wrong} of them"
        parts.append(f"In {count(len(bf16), 'profiled BF16 run')} there was {which}.")
    return " ".join(parts)


def audits(frame: pd.DataFrame) -> str:
    """Say how many audits found something, and what."""
    if "audit.num_trainable" not in frame or frame["audit.num_trainable"].dropna().empty:
        return _missing("Audits")
    audited = frame[frame["audit.num_trainable"].notna()]
    bad = audited[audited["audit.problems"].fillna("") != ""]
    text = f"{count(len(audited), 'run')} carried an audit. "
    if bad.empty:
        return text + "No problem was found."
    asked = bad["stale"].fillna(False).astype(bool)
    text += f"{count(len(bad), 'run')} failed it"
    if asked.all():
        return text + ", all of them runs that were asked to: document A's stale optimizer."
    names = ", ".join(f"`{name}`" for name in bad.loc[~asked, "run_id"])
    return text + f", of which {int((~asked).sum())} not on purpose: {names}."


def reach(frame: pd.DataFrame) -> str:
    """Hold the achievable rate against that of the same products inside the profiled step."""
    table = tables.product_rates(frame)
    if table.empty:
        return _missing("Achievable rates")
    pct = 100 * table["profiled_tflops"] / table["achievable_tflops"]
    text = (
        f"In the profiled step the products themselves ran at {_span(pct, 0)} % of their "
        f"achievable rate ({count(len(pct), 'run')})."
    )
    above = int((pct > 105).sum())
    if above:
        text += (
            f" In {above} of them by more than 5 %: the achievable rate is too low there, and the "
            "share of it that the run reached too high. Records made before products were timed "
            "from a full queue hold the launches of small ones."
        )
    return text


def gathered(frame: pd.DataFrame) -> str:
    """Say what the FP8 all-gather saves, and in what the gradients travel."""
    table = tables.communication_table(frame[frame["device"] == "cuda"])
    if table.empty:
        return _missing("Communication")
    in_fp8 = table[table["all_gather_dtypes"].str.contains("uint8|float8")]
    parts = []
    if len(in_fp8) and in_fp8["all_gather_change_pct"].notna().any():
        change = -in_fp8["all_gather_change_pct"].dropna()
        parts.append(
            f"With FP8 all-gather the gathered bytes fall by {_span(change, 0)} %. Layers that "
            "stay out of FP8, the embedding and the loss head first of all, still travel in BF16; "
            "FSDP2 packs FP8 weights as bytes, so NCCL calls them uint8."
        )
    dtypes = sorted({d for d in table["reduce_scatter_dtypes"].dropna() if d})
    if dtypes:
        where = "in every arm" if len(dtypes) == 1 else "depending on the arm"
        verdict = (
            " No gradient is reduced in FP8." if not any("float8" in d for d in dtypes) else ""
        )
        parts.append(f"Gradients are reduce-scattered in {' or '.join(dtypes)} {where}.{verdict}")
    return " ".join(parts)


def energy(frame: pd.DataFrame) -> str:
    """Say what a token costs in energy."""
    table = tables.energy_table(frame)
    change = table["change_pct"].dropna() if len(table) else pd.Series(dtype=float)
    if change.empty:
        return _missing("Energy")
    less, more = int((change < -SAME_PCT).sum()), int((change > SAME_PCT).sum())
    bf16 = table[(table["precision"] == "bf16") & ~table["stale"].fillna(False).astype(bool)]
    capped = int((bf16["power_cap_pct"] > 50).sum())
    text = (
        f"Against BF16, FP8 took less energy per token in {less} and more in {more} of "
        f"{count(len(change), 'comparison')} ({change.min():+.0f} % to {change.max():+.0f} %; "
        f"changes of up to {SAME_PCT:g} % count as neither)."
    ).replace("-", "\u2212")
    if capped:
        text += (
            f" {capped} of {count(len(bf16), 'BF16 arm')} ran at the power limit for more than "
            "half of the samples, so the datasheet's peak was out of reach for them."
        )
    return text


def overhead(frame: pd.DataFrame) -> str:
    """Say what measuring costs."""
    pairs = tables.overhead_pairs(frame)
    if len(pairs) < stats.MIN_FOR_MEDIAN_INTERVAL:
        return _missing("What measuring costs")
    interval = stats.median_interval(pairs, 0.95)
    middle = pd.Series(pairs).median()
    below = "less than 1 %" if interval.high < 1 else "not shown to be less than 1 %"
    return (
        f"Blocks of steps with and without the instruments, in turns ({len(pairs)} pairs of "
        f"blocks): the median difference is {middle:+.2f} % of a step (95 % interval "
        f"{interval.low:+.2f} to {interval.high:+.2f} %), so measuring costs {below}."
    ).replace("-", "\u2212")


def break_even(frame: pd.DataFrame) -> str:
    """Say after how many steps FP8's warm-up is paid for."""
    table = break_even_table(frame)
    if table.empty:
        return _missing("Break-even")
    never = table["break_even_steps"] == math.inf
    paid = table[~never]
    text = f"In {int(never.sum())} of {count(len(table), 'comparison')} FP8's step is no shorter."
    if len(paid):
        steps = _span(paid["break_even_steps"], 0)
        text += f" Elsewhere its longer warm-up is paid for after {steps} steps."
    return text


def with_steps(table: pd.DataFrame) -> pd.DataFrame:
    """Add the break-even as text to the table: infinite means never."""
    steps = [
        "never" if value == math.inf else f"{value:,.0f} steps"
        for value in table.get("break_even_steps", [])
    ]
    return table.assign(steps=steps)
