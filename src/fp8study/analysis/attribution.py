"""What makes the gap of document A's FP8 run: its parts, each isolated by a pair of arms.

A part is a difference of arms that share the seed and everything but the part in question. The
parts add up: the whole gap is the stale optimizer plus FP8 itself, and FP8 itself is what it costs
with FP32 masters plus what BF16 masters add. The planted arms turn the question round: they have
the fault without FP8.

An arm is told by what its record says of it, not by what was asked for: *healthy* means that every
parameter is in the optimizer, whenever it was made.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from fp8study.analysis import stats
from fp8study.analysis.pairing import DIVERGED, newest_per_seed, together
from fp8study.core.recipes import GATHERED_IN_FP8


class Cell(NamedTuple):
    """One arm of the attribution."""

    masters: str
    """``bf16`` or ``fp32``."""
    precision: str
    """As the configuration's."""
    all_gather: bool = False
    """Whether weights are gathered in FP8."""
    fault: str = ""
    """``stale``, ``planted``, or nothing for a healthy arm."""


@dataclass(frozen=True)
class Part:
    """A difference of arms: the sum of `plus` less the sum of `minus`, seed by seed."""

    name: str
    masters: str
    """As shown: ``BF16``, ``FP32`` or both."""
    plus: tuple[Cell, ...]
    minus: tuple[Cell, ...]
    reference: Cell
    """The BF16 arm whose loss is 100 %."""


#: Final loss, nats per token, by arm and seed.
Losses = Mapping[Cell, Mapping[int, float]]

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
        off, rowwise = healthy._replace(all_gather=False), Cell(masters, "fp8_rowwise")
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


def _corners(masters: str) -> tuple[Cell, Cell, Cell, Cell]:
    """Return the arms BF16, healthy FP8, stale FP8 and planted BF16."""
    healthy = Cell(masters, "fp8_tensorwise", all_gather=True)
    bf16 = Cell(masters, "bf16")
    return bf16, healthy, healthy._replace(fault="stale"), bf16._replace(fault="planted")


def effect_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Take the gap of a faulty run apart, paired by seed.

    The columns of `EFFECT_COLUMNS`, where some run has a fault; a part whose arms share no seed has
    no row. ``mean`` is in nats per token, the columns in ``_pct`` in % of the paired BF16 loss; the
    interval is Student's at 95 %; ``p_holm`` is adjusted over the parts of one setting;
    ``detectable_pct`` is the smallest true difference that so many pairs of this spread find four
    times in five; ``verdict`` is the equivalence test's, or `DIVERGED` where a seed of an arm
    diverged; ``share_pct`` is the mean over that of the whole gap.
    """
    rows = []
    for key, group in _faulty_settings(runs):
        rows += _setting_rows(key, group)
    table = pd.DataFrame(rows, columns=EFFECT_COLUMNS)
    on_gpu_first = (table["device"] != "cuda").argsort(kind="stable")
    return table.iloc[on_gpu_first.to_numpy()].reset_index(drop=True)


def _faulty_settings(runs: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield each setting in which some run has a fault, with its newest results."""
    newest = newest_per_seed(runs)
    completed = (newest["status"] == "completed") & newest["loss_last20_mean"].notna()
    usable = newest["seed"].notna() & (completed | (newest["status"] == "diverged"))
    for key, group in newest[usable].groupby("effect_key", sort=False):
        if group["stale"].any():
            yield str(key), group


def _setting_rows(key: str, group: pd.DataFrame) -> list[dict[str, Any]]:
    losses: dict[Cell, dict[int, float]] = {}  # by seed, the newest of each
    ids: dict[Cell, dict[int, str]] = {}
    diverged = set()
    for _, run in group.sort_values("ended_at", kind="stable").iterrows():
        if run["status"] == "completed":
            losses.setdefault(_cell(run), {})[int(run["seed"])] = float(run["loss_last20_mean"])
            ids.setdefault(_cell(run), {})[int(run["seed"])] = run["run_ids"]
        else:
            diverged.add(_cell(run))
    margin = float(group["margin_pct"].iloc[0])
    context = {name: group[name].iloc[0] for name in EFFECT_COLUMNS[:5]}
    context["setting"] = re.sub(r", (BF16|FP32) masters", "", str(group["setting"].iloc[0]))
    if context["device"] == "cpu":
        context["setting"] += ", on a CPU with FP8 emulated"
    rows = []
    for part in parts():
        by_seed = _differences(part, losses)
        if by_seed:
            row = context | {"effect_key": key, "part": part.name, "masters": part.masters}
            row |= _numbers(part, by_seed, losses, margin)
            arms = (*part.plus, *part.minus, part.reference)
            row["run_ids"] = together(ids[arm][seed] for arm in arms for seed in by_seed)
            if diverged & {*part.plus, *part.minus}:
                row["verdict"] = DIVERGED  # however close the seeds that are left
            rows.append(row)
    tested = [row for row in rows if not math.isnan(row["p_value"])]
    for row, adjusted in zip(tested, stats.holm([row["p_value"] for row in tested]), strict=True):
        row["p_holm"] = adjusted
    return rows


def _cell(run: pd.Series) -> Cell:
    fault = "planted" if run["planted"] else "stale" if run["stale"] else ""
    gathers = run["precision"] in GATHERED_IN_FP8 and run["fp8_all_gather"] is True
    return Cell(str(run["master_dtype"]), str(run["precision"]), gathers, fault)


def _differences(part: Part, losses: Losses) -> dict[int, float]:
    """Return the part's difference, nats, by seed; only seeds that all of its arms have."""
    cells = [losses.get(cell, {}) for cell in (*part.plus, *part.minus, part.reference)]
    return {
        seed: sum(losses[cell][seed] for cell in part.plus)
        - sum(losses[cell][seed] for cell in part.minus)
        for seed in sorted(set.intersection(*map(set, cells)))
    }


def _numbers(
    part: Part, by_seed: Mapping[int, float], losses: Losses, margin: float
) -> dict[str, Any]:
    reference = [losses[part.reference][seed] for seed in by_seed]
    pct = [100 * d / loss for d, loss in zip(by_seed.values(), reference, strict=True)]
    found = stats.judged(pct, margin)
    low, high = found["low_95"], found["high_95"]
    return {
        "num_pairs": len(by_seed),
        "loss_reference": statistics.fmean(reference),
        "mean": statistics.fmean(by_seed.values()),
        "mean_pct": statistics.fmean(pct),
        "low_pct": low,
        "high_pct": high,
        "interval": "too few pairs" if math.isnan(low) else stats.interval_text(low, high),
        "share_pct": _share(part, by_seed, losses),
        "margin_pct": margin,
        **{name: found[name] for name in ("p_value", "verdict", "detectable_pct")},
    }


def _share(part: Part, by_seed: Mapping[int, float], losses: Losses) -> float | None:
    """Return the part's share of the whole gap with the same masters, %, over the same seeds."""
    masters = part.reference.masters
    bf16, _, stale, _ = _corners(masters)
    if part.name not in (STALE, TENSORWISE, MASTERS_IN_FP8):
        return None
    whole = _differences(Part(WHOLE_GAP, masters, (stale,), (bf16,), bf16), losses)
    shared = whole.keys() & by_seed.keys()
    gap = sum(whole[seed] for seed in shared)
    return 100 * sum(by_seed[seed] for seed in shared) / gap if gap > 0 else None


def absent_parts(table: pd.DataFrame, effect_key: str) -> list[str]:
    """Return the parts that one setting of an `effect_table` has no pair for, by name."""
    rows = table[table["effect_key"] == effect_key]
    present = set(zip(rows["part"], rows["masters"], strict=True))
    return [
        f"{p.name} ({p.masters} masters)" for p in parts() if (p.name, p.masters) not in present
    ]
