"""FP8's lead over BF16 in every setting that one would use today, over all of its sessions.

A lead is a ratio of tokens per second, FP8 over BF16, of two runs that differ in precision alone
and ran in one session. Sessions on one machine differ by more than the repeats of one, so they are
pooled rather than replaced: the geometric mean of a session's paired ratios, and that over its
sessions. How far sessions differ is learnt from all settings of a machine and path that were timed
in several, and where none was, how far pairs differ from all that were timed in several blocks.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats as distributions

from fp8study.analysis.runs.frames import MIXED
from fp8study.analysis.runs.naming import BF16_GATHERED, FAST_ACCUMULATION, FP8_HEAD
from fp8study.analysis.runs.pairing import in_fp8, sessions_of, together, without_skips
from fp8study.analysis.small_steps import puts_head_in_fp8
from fp8study.core.presets import SWEPT
from fp8study.core.records import RESULTS

LEVEL = 0.95
#: Of each key an interval's ends, in %, and whether it is by how far sessions differ.
_Ends = dict[Hashable, tuple[float, float, bool]]

_RATE, _MEMORY, _ENERGY = "tokens_per_second_per_gpu", "memory_peak_gib", "energy_joule_per_token"
_MEASURED = [_RATE, _MEMORY, _ENERGY, "tflops_per_gpu", "step_time_ms_median"]
_RANGES = [f"{name}{side}{end}" for name in (_RATE, _MEMORY) for side in ("", "_bf16")
           for end in ("_low", "_high")]  # fmt: skip
#: What two runs share whose leads are pooled; studies may differ.
SETTING = [
    "machine", "gpu_name", "model", "num_gpus", "micro_batch_size", "gradient_accumulation_steps",
    "sequence_length", "master_dtype", "path", "setting", "version_torch", "max_grad_norm",
]  # fmt: skip
#: Of lengths that were timed the nearest to it is told; tokens a sequence.
USUAL_LENGTH = 4096
LEAD_COLUMNS = [
    *SETTING, "precision", "arm", "fp8_part", "fp8_all_gather", "tokens_per_gpu", "lead_pct",
    "lead_low_pct", "lead_high_pct", "ci_low_pct", "ci_high_pct", "ci_of_days", "num_pairs",
    "num_runs", "num_sessions", *_MEASURED, *(f"{name}_bf16" for name in _MEASURED), *_RANGES,
    "memory_change_pct", "energy_change_pct", "studies", "sessions", "run_ids",
]  # fmt: skip
#: What a setting says of several nodes.
_SPREAD = r"((?P<nodes>\d+) nodes(?:, sharded within each)?)"
SCALING_COLUMNS = [
    "machine", "model", "sequence_length", "micro_batch_size", "path", "master_dtype",
    "max_grad_norm", "precision", "num_gpus", "num_nodes", "fp8_all_gather", _RATE, "kept_pct",
    "of_one_node_pct", "run_ids",
]  # fmt: skip


def lead_pairs(runs: pd.DataFrame) -> pd.DataFrame:
    """Give every timed FP8 run the BF16 run of its seed and repeat, of the same session.

    Runs on GPUs that train every weight, are compiled and set no switch of their own: earlier forms
    of the code and trials of single switches have no vote. What the BF16 run measured stands in
    columns ``…_bf16``; ``ratio`` is missing where the allocator may have made either time, and
    ``unsteady`` says that a step time of theirs had not settled.
    """
    usable = (runs["device"] == "cuda") & ~runs["stale"] & ~runs["planted"]
    usable &= runs["compile"].fillna(False) & (runs["path"] != MIXED)
    usable &= runs["precision"].eq("bf16") | runs["optimizer_binding"].ne("before_conversion")
    usable &= runs["status"].isin(RESULTS)
    chosen = runs.assign(session=sessions_of(runs))[usable].fillna({"repeat": 0})
    newest = chosen.sort_values(["ended_at", "started_at"]).drop_duplicates(
        ["arm_key", "pair_key", "repeat", "session"], keep="last"
    )
    timed = newest[(newest["status"] == "completed") & newest[_RATE].notna()]
    key = ["pair_key", "repeat", "session"]
    bf16 = timed[timed["precision"] == "bf16"].drop_duplicates(key, keep="last").set_index(key)
    bf16 = bf16[[*_MEASURED, "timing_void", "run_ids", "unsteady"]].add_suffix("_bf16")
    pairs = timed[in_fp8(timed)].join(bf16, on=key, how="inner")
    void = pairs["timing_void"] | pairs["timing_void_bf16"]
    ratio = (pairs[_RATE] / pairs[f"{_RATE}_bf16"]).where(~void)
    return pairs.assign(ratio=ratio, unsteady=pairs["unsteady"] | pairs["unsteady_bf16"])


def leads_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Pool every setting's leads over the sessions of a machine.

    Returns:
        The columns of `LEAD_COLUMNS`, one row per setting and FP8 arm. ``lead_pct`` is the
        geometric mean over sessions of that of a session's paired ratios, less one, in %;
        ``sessions`` says each session's, ``lead_low_pct`` and ``lead_high_pct`` are the lowest and
        the highest pair, and the ``ci`` is that of `intervals`, with ``ci_of_days`` by how far
        sessions differ. Rates, memory and energy are medians over pairs, changes medians of paired
        ratios; memory and energy do not ask whether a time is void. ``tokens_per_gpu`` counts those
        of an optimizer step.
    """
    pairs = lead_pairs(runs)
    if pairs.empty:
        return pd.DataFrame(columns=LEAD_COLUMNS)
    pairs = without_skips(pairs)  # which arms are one, no study's names for them say
    names = [*SETTING, "precision", "bare_arm", "fp8_part"]
    pairs["log"] = np.log(pairs["ratio"].astype(float))
    pairs["key"] = pairs.groupby(names, dropna=False, sort=False).ngroup()
    pairs["baseline"] = pairs.groupby(SETTING, dropna=False, sort=False).ngroup()
    by_session = pairs.groupby(["key", "session"])["log"].mean().dropna()
    rows = []
    for key, group in pairs.groupby("key", sort=False):
        row = {name: group[name].iloc[0] for name in [*names, "kept", "fp8_all_gather"]}
        row["arm"] = min(group["arm"], key=len)
        row["tokens_per_gpu"] = math.prod(int(row[name]) for name in SETTING[4:7])
        rows.append(row | {"key": key} | _measured(group) | _lead(group, by_session))
    table = pd.DataFrame(rows)
    alike = table.duplicated([*SETTING, "precision", "arm"], keep=False)
    full = table["bare_arm"] + ", skips " + table["kept"]
    table["arm"] = full.where(alike & table["kept"].ne(""), table["arm"])
    # What one GPU varies by says nothing of several, which also wait for each other.
    ends = intervals(pairs, by_session, "machine", "path", pairs["num_gpus"] > 1)
    table = table.join(ends, on="key")
    by = ["machine", "model", "num_gpus", "micro_batch_size", "sequence_length", "setting", "arm"]
    return table.sort_values(by, kind="stable")[LEAD_COLUMNS].reset_index(drop=True)


def _measured(pairs: pd.DataFrame) -> dict[Any, Any]:
    """Return medians over the pairs of a setting, ranges over its runs, and who they are."""
    columns = [*_MEASURED, *(f"{name}_bf16" for name in _MEASURED)]
    row: dict[Any, Any] = pairs[columns].astype(float).median().to_dict()
    for name in _RANGES:
        column, _, end = name.rpartition("_")
        row[name] = pairs[column].min() if end == "low" else pairs[column].max()
    for name, column in (("memory", _MEMORY), ("energy", _ENERGY)):
        change = pairs[column] / pairs[f"{column}_bf16"] - 1
        row[f"{name}_change_pct"] = 100 * change.astype(float).median()
    ids = together([*pairs["run_ids"], *pairs["run_ids_bf16"]])
    row |= {"studies": ", ".join(sorted(set(pairs["study"])))}
    return row | {"num_runs": len(ids.split()), "run_ids": ids}


def _lead(pairs: pd.DataFrame, by_session: pd.Series) -> dict[str, object]:
    """Return the pooled lead of a setting, the range of its pairs, and their number."""
    known = pairs["log"].dropna()
    if known.empty:
        return {"num_pairs": 0, "num_sessions": 0, "sessions": ""} | dict.fromkeys(
            ("lead_pct", "lead_low_pct", "lead_high_pct"), math.nan
        )
    sessions = by_session[pairs["key"].iloc[0]]
    return {
        "lead_pct": _percent(sessions.mean()),
        "lead_low_pct": _percent(known.min()),
        "lead_high_pct": _percent(known.max()),
        "num_pairs": len(known),
        "num_sessions": len(sessions),
        "sessions": sessions_text(sessions.map(_percent)),
    }


def sessions_text(leads: pd.Series) -> str:
    """List each session's lead, in %."""
    return "; ".join(f"{at}: {lead:+.1f} %" for at, lead in leads.items())


def intervals(pairs: pd.DataFrame, by_session: pd.Series, *alike: str | pd.Series) -> pd.DataFrame:
    """Return the 95 % interval of each setting's lead, in %, by its key.

    `pairs` have a ``key``, a ``log``, the logarithm of their ratio, whether it is ``unsteady``, and
    a ``baseline``: keys that share it are ratios to the same runs. `by_session` are the logarithms'
    means. Settings pool that are `alike` in these columns.

    Student's t, on the logarithm. Its standard deviation is pooled over settings: that between
    their sessions if any was timed in several, else that between the pairs of the one session, so
    that two blocks of three settings tell more than each setting's own two. Of keys that share
    their baseline, whose runs move them alike, one counts for its degrees of freedom.

    Returns:
        ``ci_low_pct`` and ``ci_high_pct``, missing where nothing was repeated, and ``ci_of_days``:
        whether it is by how far sessions differ.
    """
    # One whose step time had not settled, as where the host is busy, has its own spread alone.
    moves = pairs.groupby("key")["unsteady"].transform("any")
    ends: _Ends = {}
    for _, group in pairs.groupby([*alike, pairs["key"].where(moves, -1)]):
        ends |= _pooled(group, by_session)
    names = ["ci_low_pct", "ci_high_pct", "ci_of_days"]
    return pd.DataFrame.from_dict(ends, orient="index", columns=names)


def _pooled(pairs: pd.DataFrame, by_session: pd.Series) -> _Ends:
    keys = list(pairs["key"].unique())
    by_pair = pairs.dropna(subset="log").set_index("key")["log"]
    of_days = any(key in by_session and len(by_session[key]) > 1 for key in keys)
    unit = by_session if of_days else by_pair
    samples: dict[Hashable, pd.Series] = {key: unit.loc[[key]] for key in keys if key in unit}
    spare = pd.Series({key: len(sample) - 1 for key, sample in samples.items()}, dtype=int)
    baseline = pairs.drop_duplicates("key").set_index("key")["baseline"]
    freedom = spare.groupby(baseline).max().sum()
    ends: _Ends = dict.fromkeys(keys, (math.nan, math.nan, of_days))
    if not freedom:
        return ends
    squares = sum(sample.var(ddof=0) * len(sample) for sample in samples.values())
    variance = squares / spare.sum()
    quantile = distributions.t.ppf(0.5 + LEVEL / 2, freedom)
    for key, sample in samples.items():
        half = quantile * math.sqrt(variance / len(sample))
        ends[key] = (_percent(sample.mean() - half), _percent(sample.mean() + half), of_days)
    return ends


def _percent(log_ratio: float) -> float:
    return 100 * math.expm1(log_ratio)


def to_decide(leads: pd.DataFrame) -> pd.DataFrame:
    """Leave out shapes that were made to show a trend alone, and what no run does unless told."""
    leads = leads[~leads["model"].isin(SWEPT) & ~leads["arm"].str.contains(FAST_ACCUMULATION)]
    return with_own_heads(leads)


def with_own_heads(leads: pd.DataFrame) -> pd.DataFrame:
    """Leave out a loss head in FP8 beside one in BF16, where the path has that unless told."""
    has_head = leads["arm"].str.contains(FP8_HEAD)
    alike = [leads[name] for name in (*SETTING, "precision")]
    has_other = (~has_head).groupby(alike, dropna=False).transform("any")
    by_hand = [
        beside and FP8_HEAD in row["arm"] and not puts_head_in_fp8(row)
        for (_, row), beside in zip(leads.iterrows(), has_other, strict=True)
    ]
    return leads[~np.array(by_hand, dtype=bool)]


def best_recipes(leads: pd.DataFrame) -> pd.DataFrame:
    """Keep of each setting to decide on the FP8 recipe with the largest lead."""
    leads = to_decide(leads)
    ranked = leads.sort_values("lead_pct", ascending=False, kind="stable")
    return leads.loc[leads.index.isin(ranked.drop_duplicates(SETTING).index)]


def scaling_table(leads: pd.DataFrame) -> pd.DataFrame:
    """Return tokens/s per GPU over the number of GPUs, of the models timed on several.

    The columns of `SCALING_COLUMNS`. Batch by batch, of a model's lengths, paths and clipping those
    timed on the most numbers of GPUs, then of the length nearest to 4,096 tokens, then of the tuned
    path, then the fastest recipe; weights are gathered as it is faster, as in `best_recipes`.
    ``kept_pct`` is the rate per GPU in % of that on the fewest GPUs: 100 is linear scaling.
    ``of_one_node_pct`` is that of runs on several nodes in % of that on the most GPUs of one node.
    """
    arm = leads["arm"].str.replace(f", {BF16_GATHERED}", "")
    timed = leads.assign(arm=arm)[leads["lead_pct"].notna()]
    timed = timed.sort_values("lead_pct", ascending=False).drop_duplicates([*SETTING, "arm"])
    timed = timed.sort_values("num_pairs", ascending=False, kind="stable")
    spread = timed["setting"].str.extract(_SPREAD)
    timed = timed.assign(
        _spread=spread[0], num_nodes=spread["nodes"].astype(float).fillna(1).astype(int)
    )
    alike = ["machine", "model", "micro_batch_size", "gradient_accumulation_steps",
             "sequence_length", "master_dtype", "path", "max_grad_norm", "arm"]  # fmt: skip
    timed = timed.drop_duplicates([*alike, "num_gpus", "_spread"])
    counts = timed.groupby(alike, dropna=False)["num_gpus"].transform("size")
    off = (timed["sequence_length"].astype(float) / USUAL_LENGTH).map(math.log2).abs()
    better = {"_counts": -counts, "_off": off, "_plain": timed["path"] != "tuned",
              "_lead": -timed["lead_pct"]}  # fmt: skip
    several = timed.assign(**better)[counts > 1]
    chosen = several.sort_values([*better], kind="stable").drop_duplicates(alike[:3])
    several = several.sort_values(["machine", "model", "micro_batch_size"], kind="stable")
    rows = []
    for _, group in several.merge(chosen[alike], on=alike).groupby(alike[:3], sort=False):
        group = group.sort_values(["num_gpus", "num_nodes"])
        for column, precision in ((f"{_RATE}_bf16", "bf16"), (_RATE, group["precision"].iloc[0])):
            rate = group[column]
            of_one = rate[group["num_nodes"] == 1].tail(1)
            share = 100 * rate / (of_one.iloc[0] if len(of_one) else math.nan)
            lines = group.assign(precision=precision, kept_pct=100 * rate / rate.iloc[0])
            lines["of_one_node_pct"] = share.where(group["num_nodes"] > 1)
            rows.append(lines.assign(**{_RATE: rate}))
    table = pd.concat(rows) if rows else pd.DataFrame(columns=SCALING_COLUMNS)
    return table[SCALING_COLUMNS].reset_index(drop=True)
