"""Speed and memory of every arm: FP8's lead over BF16, what each switch gives, and at what use.

All tables are made of rows of `fp8study.analysis.runs.frames.runs_frame`. Timings that the
allocator may have made are compared with nothing; those of CPUs, where FP8 is emulated, say
nothing of it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from fp8study.analysis import stats
from fp8study.analysis.leads import intervals, sessions_text
from fp8study.analysis.runs.frames import MIXED
from fp8study.analysis.runs.naming import (
    BEFORE,
    EARLIER_FORM,
    FAST_ACCUMULATION,
    IN_ONE_PASS,
    KERNELS,
    set_besides,
    written_out,
)
from fp8study.analysis.runs.pairing import (
    ARM,
    DIVERGED,
    as_one_study,
    calm,
    healthy,
    medians_by,
    medians_of_repeats,
    medians_of_seeds,
    newest_per_seed,
    ordered,
    pairs_of,
    sessions_of,
    together,
)
from fp8study.core.config import make_config
from fp8study.core.recipes import SIXTEEN_BIT
from fp8study.core.records import RESULTS

#: The note of a run that came near the limit; its speed is compared with nothing.
MEMORY_FULL = "memory nearly full"

_RATE, _MEMORY, _LOSS = "tokens_per_second_per_gpu", "memory_peak_gib", "loss_last20_mean"
_MEASURED = [
    _RATE, "tflops_per_gpu", "mfu_bf16_peak_pct", "bf16_peak_tflops", "step_time_ms_median",
    _MEMORY,
]  # fmt: skip
THROUGHPUT_COLUMNS = [*ARM, "num_runs", *_MEASURED, "speedup_pct", "memory_change_pct", "note",
                      "run_ids"]  # fmt: skip
SWITCH_COLUMNS = [
    "machine", "study", "model", "num_gpus", "precision", "setting", "setting_plain", "num_runs",
    _RATE, f"{_RATE}_plain", "gain_pct", "gain_low_95", "gain_high_95", "num_blocks",
    "num_sessions", "sessions", _MEMORY, "memory_change_pct", "num_pairs", "loss_gap_pct",
    "low_95", "high_95", "verdict", "run_ids",
]  # fmt: skip


def throughput_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Speed and memory by arm: the median over seeds, of each the median over its repeats.

    Those that the allocator held up count only where an arm has no others.

    Returns:
        The columns of `THROUGHPUT_COLUMNS`. ``num_runs`` counts repeats too. ``speedup_pct`` is
        the median over pairs of how much more tokens per second the arm makes than BF16 with
        everything else equal, %; it is missing without a partner, on CPUs, and where either run
        nearly filled the GPU's memory. ``mfu_bf16_peak_pct`` is over the dense BF16 peak for every
        precision. ``note`` names what limits the comparison.
    """
    timed = calm(medians_of_repeats(runs, _MEASURED), ["arm_key"])
    if timed.empty:
        return pd.DataFrame(columns=THROUGHPUT_COLUMNS)
    pairs = pairs_of(timed, _RATE)
    pairs = pairs[pairs["device"] != "cpu"]
    table = medians_of_seeds(timed, pairs, _MEASURED)
    full = pairs["timing_void"] | pairs["timing_void_bf16"]
    speed, memory = (100 * (pairs[n] / pairs[f"{n}_bf16"] - 1) for n in (_RATE, _MEMORY))
    # A run that waits for the allocator makes its partner look fast.
    table["speedup_pct"] = speed.where(~full).groupby(pairs["arm_key"]).median()
    table["memory_change_pct"] = memory.groupby(pairs["arm_key"]).median()
    strained = set(pairs.loc[full, "arm_key"]) | set(timed.loc[timed["timing_void"], "arm_key"])
    paired = set(pairs["arm_key"])
    table["note"] = [
        _speed_note(row, key in strained, key in paired) for key, row in table.iterrows()
    ]
    return ordered(table.reset_index()[THROUGHPUT_COLUMNS])


def _speed_note(row: pd.Series, full: bool, paired: bool) -> str:
    if row["device"] == "cpu":
        return "CPU, FP8 emulated"
    notes = {
        "does less work per step": row["stale"],
        MEMORY_FULL: full,
        "no BF16 partner": row["precision"] not in SIXTEEN_BIT and not paired,
    }
    return "; ".join(note for note, holds in notes.items() if holds)


def document_a_table(runs: pd.DataFrame, study: str = "document-a") -> pd.DataFrame:
    """The arms of document A's single-GPU failure, with what their optimizers did not train.

    One row per machine and arm of the studies whose names begin with `study` and judge losses.
    """
    chosen = newest_per_seed(runs[runs["study"].str.startswith(study) & ~runs["speed_only"]])
    columns = ["parameters_outside_optimizer_pct", "loss_start", _LOSS]
    names = ["machine", "device", "study", "model", "master_dtype", "precision", "arm", "stale"]
    chosen = chosen[(chosen["status"] == "completed") & chosen[_LOSS].notna()]
    table = medians_by(chosen, ["arm_key"], [], names)
    table["masters"] = table["master_dtype"].str.upper()
    table[columns] = chosen.groupby("arm_key", sort=False)[columns].mean()
    speed = throughput_table(chosen).set_index("arm_key")
    for name in (_RATE, _MEMORY, "speedup_pct", "memory_change_pct"):
        table[name] = pd.to_numeric(speed[name].reindex(table.index), errors="coerce")
    both = (table["run_ids"], speed["run_ids"].reindex(table.index))
    table["run_ids"] = [together(ids) for ids in zip(*both, strict=True)]
    # A CPU's tokens per second with emulated FP8 say nothing; leave nothing to be quoted.
    table.loc[table["device"] == "cpu", _RATE] = math.nan
    rank = (table["precision"] != "bf16").astype(int) + table["stale"].astype(int)
    by = ["machine", "study", "model", "master_dtype", "_rank", "arm"]
    return table.assign(_rank=rank).sort_values(by).drop(columns="_rank").reset_index()


def switch_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Compare every arm on GPUs with the plain path's of the same precision.

    Where a study has the tuned path alone, as it is and with other switches, with that; where all
    of today's arms have other switches, with the one that has the fewest. On one GPU the strategy
    counts as a switch too, since there is nothing to share: the plain path is then FSDP2, as the
    documents have it, where that was run and had memory enough.

    Returns:
        The columns of `SWITCH_COLUMNS`; ``setting`` is what an arm has besides the plain one's. A
        study and its further sessions, ``<study>-2``, are one row. Speeds and memory are medians
        over all runs, repeats included; ``gain_pct`` is the geometric mean of a session's ratios of
        a seed and repeat (``num_blocks`` in all), then of sessions, which ``sessions`` lists. Its
        95 % interval is that of `fp8study.analysis.leads.intervals`, over all switches of a machine
        on one GPU, or on several. Runs short of memory have no part in it, and it is missing where
        no ratio is left. Losses are means of the last 20 steps, paired by seed, a seed's gap the
        mean over sessions, and missing where a study only asks for speed; for the verdict see
        `stats.judged`, where sessions state one margin, and `DIVERGED` where a seed did so that the
        plain path trained.
    """
    counts = runs["status"].isin(RESULTS) & (runs["device"] == "cuda")
    counted = healthy(runs.assign(session=sessions_of(runs))[counts])
    usable = as_one_study(counted.fillna({"repeat": 0}))
    named = [
        spelled_out(*each)
        for each in zip(usable["setting"], usable["precision"], usable["arm"], strict=True)
    ]
    usable = usable.assign(
        setting=named, path=usable["path"].where(usable["setting"] == named, MIXED)
    )
    rows: list[dict[str, Any]] = []
    for _, group in usable.groupby("switch_key", sort=False):
        # Sessions whose versions differ have no plain path in common.
        rows += _switch_rows(group) or [
            row for _, own in group.groupby("box", sort=False) for row in _switch_rows(own)
        ]
    table = pd.DataFrame(_with_gains(rows), columns=SWITCH_COLUMNS)
    return table.sort_values(["machine", "study", "model", "num_gpus", "precision"], kind="stable")


def spelled_out(setting: str, precision: str, arm: str) -> str:
    """Write a setting without `IN_ONE_PASS`: with the switches that this means instead.

    And with what the arm says of its kernels, and of how it adds up.
    """
    said = arm.split(", ")
    parts = [FAST_ACCUMULATION] * (FAST_ACCUMULATION in said)
    parts += [written_out(words, setting) for words in KERNELS if words in said]
    setting = ", ".join([setting, *parts])
    if IN_ONE_PASS not in setting.split(", "):
        return setting
    alone = {"path": "tuned", "strategy": "none", "precision": precision}
    values = alone | ({"strategy": "fsdp2", "num_gpus": 4} if "FSDP2" in setting else {})
    today = make_config(values).resolved()  # 4 GPUs, as a setting names two's copy engines itself
    return setting.replace(IN_ONE_PASS, ", ".join(set_besides(today.to_dict(), BEFORE)))


def _switch_rows(group: pd.DataFrame) -> list[dict[str, Any]]:
    """Compare the arms of one group with the plain path's among them, if there is one."""
    done, newest = group[group["status"] == "completed"], newest_per_seed(group)
    todays = done[~done["setting"].str.endswith(EARLIER_FORM)]
    num_parts = todays["setting"].str.count(", ")
    paths = [done[done["path"] == path] for path in ("plain", "tuned")]
    paths.append(todays[num_parts == num_parts.min()])
    plain = _plain(next((arms for arms in paths if len(arms)), paths[0]))
    if plain["arm_key"].nunique() != 1:
        return []
    arms = done[done["arm_key"] != plain["arm_key"].iloc[0]].groupby("arm_key", sort=False)
    return [_switch_row(arm, plain, newest) for _, arm in arms]


def _with_gains(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each row of a switch its gain, over all its blocks, with an interval."""
    if not rows:
        return rows
    pairs = pd.concat([
        row["pairs"].assign(key=key, baseline=row["baseline"], machine=row["machine"],
                            several=row["num_gpus"] > 1)
        for key, row in enumerate(rows)
    ])  # fmt: skip
    by_session = pairs.groupby(["key", "session"])["log"].mean()
    ends = intervals(pairs, by_session, "machine", "several").reindex(range(len(rows)))
    for key, row in enumerate(rows):
        logs = by_session.get(key, by_session[:0])
        gains = 100 * np.expm1(logs)
        row |= {
            "gain_pct": 100 * np.expm1(logs.mean()),
            "gain_low_95": ends.loc[key, "ci_low_pct"],
            "gain_high_95": ends.loc[key, "ci_high_pct"],
            "num_blocks": int((pairs["key"] == key).sum()), "num_sessions": len(gains),
            "sessions": sessions_text(gains),
        }  # fmt: skip
    return rows


def _plain(arms: pd.DataFrame) -> pd.DataFrame:
    """Choose among the plain path's arms, which differ in their strategy alone."""
    sharded, others = arms[arms["strategy"] == "fsdp2"], arms[arms["strategy"] != "fsdp2"]
    short = sharded.empty or (sharded["timing_void"].any() and len(others))
    return others if short else sharded


def _gain_pairs(arm: pd.DataFrame, plain: pd.DataFrame) -> pd.DataFrame:
    """Return the logarithms of an arm's rates over the plain one's, of runs of one block."""
    block = ["box", "seed", "repeat", "session"]
    ours, theirs = (
        runs[~runs["timing_void"]].groupby(block).agg({_RATE: "median", "unsteady": "any"})
        for runs in (arm, plain)
    )
    pairs = ours.join(theirs.add_suffix("_plain"), how="inner").reset_index()
    log = np.log((pairs[_RATE] / pairs[f"{_RATE}_plain"]).astype(float))
    pairs = pairs.assign(log=log, unsteady=pairs["unsteady"] | pairs["unsteady_plain"])
    return pairs.dropna(subset="log")


def _switch_row(arm: pd.DataFrame, plain: pd.DataFrame, newest: pd.DataFrame) -> dict[str, Any]:
    """Compare an arm's completed runs with the plain one's, and the `newest` of each seed."""
    row = {name: arm[name].iloc[0] for name in SWITCH_COLUMNS[:6]}
    ours, theirs = arm[[_RATE, _MEMORY]].median(), plain[[_RATE, _MEMORY]].median()
    usual = plain["setting"].iloc[0]
    own = [part for part in row["setting"].split(", ") if part not in usual.split(", ")]
    row |= {
        "setting": ", ".join(own),
        "setting_plain": usual,
        "num_runs": len(arm),
        _RATE: ours[_RATE],
        f"{_RATE}_plain": theirs[_RATE],
        "pairs": _gain_pairs(arm, plain),
        "baseline": plain["arm_key"].iloc[0],
        _MEMORY: ours[_MEMORY],
        "memory_change_pct": 100 * (ours[_MEMORY] / theirs[_MEMORY] - 1),
        "run_ids": together([*arm["run_ids"], *plain["run_ids"]]),
    }
    newest = newest[~newest["speed_only"]]
    own, base = (newest[newest["arm_key"] == part["arm_key"].iloc[0]] for part in (arm, plain))
    if own.empty:
        return row
    seed = ["box", "seed"]
    base = base[base["status"] == "completed"].set_index(seed)[_LOSS].rename("plain")
    pairs = own.join(base, on=seed, how="inner").dropna(subset="plain")
    lost = pairs["status"] == "diverged"
    gaps = (100 * (pairs[_LOSS] / pairs["plain"] - 1))[~lost].dropna()
    gaps = gaps.groupby(pairs["seed"]).mean().tolist()
    # Further sessions may state another margin.
    row |= stats.judged(gaps, stats.agreed(own["margin_pct"]), "loss_gap_pct")
    return row | ({"verdict": DIVERGED} if lost.any() else {})
