"""What makes the gap of document A's FP8 run: its parts, each isolated by a pair of arms.

A part is a difference of arms that share the seed and everything but the part in question. The
parts add up: the whole gap is the stale optimizer plus FP8 itself, and FP8 itself is what it costs
with FP32 masters plus what BF16 masters add. The planted arms turn the question round: they have
the fault without FP8.

An arm is told by what its record says of it, not by what was asked for: *healthy* means that every
parameter is in the optimizer, whenever it was made.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fp8study.analysis import stats
from fp8study.analysis.runs.pairing import DIVERGED, newest_per_seed, together
from fp8study.core.recipes import GATHERED_IN_FP8


@dataclass(frozen=True)
class Part:
    """A difference of arms, named as by `_arm`: the sum of `plus` less that of `minus`, by seed."""

    name: str
    masters: str
    """As shown: ``BF16``, ``FP32`` or both."""
    plus: tuple[str, ...]
    minus: tuple[str, ...]
    reference: str
    """The BF16 arm whose loss is 100 %."""

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys([*self.plus, *self.minus, self.reference]))


WHOLE_GAP = "stale FP8 against BF16"
STALE = "the stale optimizer"
TENSORWISE = "FP8 itself, tensorwise"
ROWWISE = "FP8 itself, rowwise"
ALL_GATHER = "FP8 all-gather on against off"
PLANTED = "the fault planted in BF16"
TWIN = "stale FP8 against planted BF16"
MASTERS = "BF16 masters instead of FP32, in BF16"
MASTERS_IN_FP8 = "what BF16 masters add to FP8's cost"

EFFECT_COLUMNS = [
    "machine", "device", "gpu_name", "study", "model", "setting", "effect_key", "part", "masters",
    "num_pairs", "loss_reference", "mean", "mean_pct", "low_pct", "high_pct", "interval",
    "p_value", "p_holm", "margin_pct", "verdict", "detectable_pct", "share_pct", "run_ids",
]  # fmt: skip


def parts() -> list[Part]:
    """Return every part, in the order in which it is told.

    With FP32 masters there is no row for rowwise and for the all-gather: the study `attribution`
    leaves them out, and the table of loss gaps has what other studies know of them.
    """
    found = []
    for masters in ("bf16", "fp32"):
        bf16, healthy, stale, planted = _corners(masters)
        off, rowwise = f"{masters} fp8_tensorwise", f"{masters} fp8_rowwise"
        for name, more, less in (
            (WHOLE_GAP, stale, bf16), (STALE, stale, healthy), (TENSORWISE, healthy, bf16),
            (ROWWISE, rowwise, bf16), (ALL_GATHER, healthy, off), (PLANTED, planted, bf16),
            (TWIN, stale, planted),
        ):  # fmt: skip
            if masters == "bf16" or name not in (ROWWISE, ALL_GATHER):
                found.append(Part(name, masters.upper(), (more,), (less,), bf16))
    coarse, fine = _corners("bf16"), _corners("fp32")
    both = "BF16 and FP32"
    found.append(Part(MASTERS, both, coarse[:1], fine[:1], coarse[0]))
    found.append(Part(MASTERS_IN_FP8, both, (coarse[1], fine[0]), (coarse[0], fine[1]), coarse[0]))
    return found


def _corners(masters: str) -> tuple[str, str, str, str]:
    """Return the arms BF16, healthy FP8, stale FP8 and planted BF16."""
    bf16, fp8 = f"{masters} bf16", f"{masters} fp8_tensorwise gathered"
    return bf16, fp8, f"{fp8} stale", f"{bf16} planted"


def _arm(run: pd.Series) -> str:
    """Name an arm by its masters and precision, ``gathered`` if in FP8, and its fault."""
    gathers = run["precision"] in GATHERED_IN_FP8 and run["fp8_all_gather"] is True
    fault = "planted" if run["planted"] else "stale" if run["stale"] else ""
    parts = [run["master_dtype"], run["precision"], "gathered" if gathers else "", fault]
    return " ".join(filter(None, map(str, parts)))


def effect_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Take the gap of a faulty run apart, paired by seed.

    The columns of `EFFECT_COLUMNS`, where some run has a fault; a part whose arms share no seed has
    no row. ``mean`` is in nats per token, the columns in ``_pct`` in % of the paired BF16 loss; the
    interval is Student's at 95 %; ``p_holm`` is adjusted over the parts of one setting;
    ``detectable_pct`` is the smallest true difference that so many pairs of this spread find four
    times in five; ``verdict`` is the equivalence test's, or `DIVERGED` where a seed of an arm
    diverged; ``share_pct`` is the mean over that of the whole gap.
    """
    newest = newest_per_seed(runs)
    completed = (newest["status"] == "completed") & newest["loss_last20_mean"].notna()
    usable = newest[newest["seed"].notna() & (completed | (newest["status"] == "diverged"))]
    rows = []
    for _, group in usable.groupby("effect_key", sort=False):
        if group["stale"].any():
            rows += _setting_rows(group)
    table = pd.DataFrame(rows, columns=EFFECT_COLUMNS)
    table["p_holm"] = stats.adjusted(table, ["effect_key"])
    on_gpu_first = (table["device"] != "cuda").argsort(kind="stable")
    return table.iloc[on_gpu_first.to_numpy()].reset_index(drop=True)


def _setting_rows(group: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a setting in which some run has a fault, from its newest results."""
    arms = group.sort_values("ended_at", kind="stable").assign(arm=group.apply(_arm, axis=1))
    done = arms[arms["status"] == "completed"].drop_duplicates(["arm", "seed"], keep="last")
    losses, ids = (done.pivot(index="seed", columns="arm", values=name)
                   for name in ("loss_last20_mean", "run_ids"))  # fmt: skip
    lost = {*arms.loc[arms["status"] == "diverged", "arm"]}
    margin = float(group["margin_pct"].iloc[0])
    context = {name: group[name].iloc[0] for name in [*EFFECT_COLUMNS[:5], "effect_key"]}
    context["setting"] = re.sub(r", (BF16|FP32) masters", "", str(group["setting"].iloc[0]))
    if context["device"] == "cpu":
        context["setting"] += ", on a CPU with FP8 emulated"
    every, rows = parts(), []
    wholes = {p.reference: _differences(p, losses) for p in every if p.name == WHOLE_GAP}
    for part in every:
        apart = _differences(part, losses)
        if apart.empty:
            continue
        reference = losses.loc[apart.index, part.reference]
        pct = 100 * apart / reference
        found = stats.judged(pct.tolist(), margin)
        low, high, known = found["low_95"], found["high_95"], not pd.isna(found["low_95"])
        is_share = part.name in (STALE, TENSORWISE, MASTERS_IN_FP8)
        # However close the seeds that are left, a part of which one diverged is not judged.
        verdict = DIVERGED if lost & {*part.plus, *part.minus} else found["verdict"]
        rows.append(context | found | {
            "part": part.name, "masters": part.masters, "mean": apart.mean(),
            "loss_reference": reference.mean(), "low_pct": low, "high_pct": high,
            "interval": stats.interval_text(low, high) if known else "too few pairs",
            "share_pct": _share(apart, wholes[part.reference]) if is_share else None,
            "margin_pct": margin, "verdict": verdict,
            "run_ids": together(ids.loc[apart.index, part.arms].melt()["value"]),
        })  # fmt: skip
    return rows


def _differences(part: Part, losses: pd.DataFrame) -> pd.Series:
    """Return the part's difference, nats, by seed; only seeds that all of its arms have."""
    known = losses.reindex(columns=part.arms).dropna()
    return known[[*part.plus]].sum(axis=1) - known[[*part.minus]].sum(axis=1)


def _share(apart: pd.Series, whole: pd.Series) -> float | None:
    """Return a part's share of the whole gap with the same masters, %, over the same seeds."""
    shared = whole.index.intersection(apart.index)
    gap = whole[shared].sum()
    return 100 * apart[shared].sum() / gap if gap > 0 else None


def absent_parts(rows: pd.DataFrame) -> list[str]:
    """Name the parts that one setting has no pair for, from its rows of an `effect_table`."""
    present = set(zip(rows["part"], rows["masters"], strict=True))
    return [
        f"{p.name} ({p.masters} masters)" for p in parts() if (p.name, p.masters) not in present
    ]
