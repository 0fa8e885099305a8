"""Which runs belong together, and what they are called.

Arms, repeats of a seed, FP8 runs with their BF16 partners. The keys that this goes by are made in
`fp8study.analysis.frames`.

A run that trains part of its model keeps the words "stale optimizer (x % of parameters not
trained)" in its ``arm`` in every table, so that it never passes for an FP8 speed-up or loss gap.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from fp8study.core.config import completed
from fp8study.core.fields import DEFAULTS, FIELDS, PLAIN
from fp8study.core.recipes import GATHERED_IN_FP8, RECIPES, SIXTEEN_BIT
from fp8study.core.records import RESULTS, RunRecord
from fp8study.core.switches import RETIRED

#: What an FP8 run leaves in BF16 unless it says otherwise; an arm that differs is named so.
DEFAULT_SKIP = list(DEFAULTS["skip"])

PRECISION_LABELS: dict[str, str] = {name: recipe.label for name, recipe in RECIPES.items()}
#: What the report says of a switch that is true or false.
_SAID = {True: "on", False: "off"}
#: What the setting of a record says whose path has got switches since.
EARLIER_FORM = "earlier form"
#: What the tuned path set before it updated in one pass; what its other switches did followed.
BEFORE = {"update_kernel": "torch"}
#: What a setting of today's tuned path says where that differs from the path `BEFORE`.
IN_ONE_PASS = "updated in one pass"
#: Switches that it set later still, as it was before: a setting names what differs.
_LATER = {name: PLAIN[name] for name in ("collectives", "gradient_norm")}
#: They plant faults or repeat them, at a learning rate of 1e-5.
FAILURE_STUDIES = ("attribution", "corner-arms", "document-a", "stale-batch")
#: What an arm says that converts to FP8 and gathers BF16 weights.
BF16_GATHERED = "BF16 all-gather"
#: What an arm says of FP8 alone, so that it is no part of a setting, which BF16 has too: that its
#: SwiGLU writes FP8, as on the tuned path since entry 69 of docs/log.md, or how it adds up.
SWIGLU_KERNELS, FAST_ACCUMULATION = "SwiGLU kernels", "fast accumulation"
#: What a setting says of two GPUs without NCCL, as the tuned path has them since entry 70.
COPY_ENGINES = "collectives by copy engines"
#: And what it says of the kernel that found the norm, on one GPU and on two, since entry 72.
NORMS = NORM_BY_KERNEL, NORM_AS_SUMMED = "gradients' norm by kernel", "gradients' norm as summed"
#: The verdict on an arm that lost seeds by diverging: what is left is no fair sample.
DIVERGED = "diverged"
#: A session ends where a host did nothing for so long.
SESSION_GAP = pd.Timedelta(minutes=30)
#: What the name of a study has when it is done again on a machine: CONTRIBUTING.md.
_FURTHER = r"-\d+$"
#: Where a comparison was made.
_CONTEXT = ["machine", "device", "gpu_name", "study", "model", "strategy", "num_gpus", "setting"]
#: What names an arm in a table.
ARM = [*_CONTEXT, "path", "precision", "arm", "stale", "arm_key"]
#: What an FP8 run says of the layers that it keeps out of FP8, inside its ``arm``.
_SKIPS = r", skips ([^,]*)"


def arm_label(record: RunRecord) -> str:
    """Name the precision of a run, and say so if part of its model was not trained."""
    config = record.config
    precision = str(config.get("precision", "unknown precision"))
    parts = [PRECISION_LABELS.get(precision, precision)]
    if precision not in SIXTEEN_BIT:
        gathers = config.get("strategy") == "fsdp2" and (config.get("num_gpus") or 0) > 1
        if precision in GATHERED_IN_FP8 and gathers and config.get("fp8_all_gather") is False:
            parts.append(BF16_GATHERED)
        if schedule := config.get("precision_schedule"):
            parts.append(f"schedule {' '.join(schedule).replace(precision, 'fp8')}")
        skip = config.get("skip")
        if skip is not None and list(skip) != DEFAULT_SKIP:
            parts.append(f"skips {' '.join(skip) or 'nothing'}")
        asks_for_kernels = config.get("path") == "tuned" and config.get("swiglu") == "kernels"
        if asks_for_kernels and not any(each.startswith("swiglu: ") for each in record.warnings):
            parts.append(SWIGLU_KERNELS)
        parts += [FAST_ACCUMULATION] * (config.get("fast_accumulation") == "all")
    note = stale_note(record)
    if note:
        parts.append(note)
    elif config.get("optimizer_binding") == "before_conversion":
        parts.append("optimizer made before conversion")
    return ", ".join(parts)


def setting_label(config: dict[str, Any], says_clipping: bool = True) -> str:
    """Say in a few words what two compared runs have in common, besides model and GPUs."""
    strategy = config.get("strategy")
    parts = ["not sharded" if strategy == "none" else str(strategy).upper()] if strategy else []
    if (config.get("num_nodes") or 1) > 1:
        hybrid = ", sharded within each" if config.get("sharding") == "hybrid" else ""
        parts.append(f"{config['num_nodes']} nodes{hybrid}")
    if config.get("sequence_length"):
        parts.append(f"{config['sequence_length']} tokens")
    if config.get("micro_batch_size"):
        parts.append(f"batch {config['micro_batch_size']}")
    if (config.get("gradient_accumulation_steps") or 1) > 1:
        parts.append(f"{config['gradient_accumulation_steps']} accumulation steps")
    if config.get("compile") is not None:
        parts.append("compiled" if config["compile"] else "eager")
    if config.get("activation_checkpointing"):
        parts.append("activation checkpointing")
    if config.get("master_dtype"):
        parts.append(f"{config['master_dtype'].upper()} masters")
    if (config.get("optimizer_state") or "fp32") != "fp32":
        parts.append(f"{config['optimizer_state'].upper()} optimizer states")
    if says_clipping and config.get("max_grad_norm") is not None:
        parts.append(f"gradients clipped at {config['max_grad_norm']:g}")
    if config.get("path") == "tuned":
        parts.append("tuned")
    return ", ".join(parts + unusual_switches(config))


def stale_note(record: RunRecord) -> str | None:
    """The words that go with every number of a run that trains only part of its model."""
    share = record.model.get("parameters_outside_optimizer_pct")
    planted = bool(record.config.get("untrained"))
    if isinstance(share, int | float) and share > 0:
        fault = "planted" if planted else "stale optimizer"
        return f"{fault} ({share:.1f} % of parameters not trained)"
    if share is None and planted:
        return "planted (share of parameters not trained unknown)"
    asked_for = record.config.get("optimizer_binding") == "before_conversion"
    if share is None and asked_for and record.config.get("precision") not in SIXTEEN_BIT:
        return "stale optimizer (share of parameters not trained unknown)"
    return None


def unusual_switches(config: dict[str, Any]) -> list[str]:
    """Name, in words, the switches of a recorded run that its path would have set otherwise.

    Held to the tuned path as it was `BEFORE`, or to today's, which `IN_ONE_PASS` says, where that
    leaves a part of these switches. A switch that came later was not set; if the path sets it
    today, the record is of an earlier form of the path. An arm says what made its SwiGLU;
    what came later is named though the path sets it (`_LATER`).
    """
    before = set_besides(config, BEFORE)
    if not before:
        return before
    besides = set_besides(config, {})
    return [IN_ONE_PASS, *besides] if {*besides} < {*before} else before


def has_usual_path(config: dict[str, Any]) -> bool:
    """Return whether a run sets no switch of its own: of today's tuned path, or an earlier one."""
    by_gpus = {1: [NORM_BY_KERNEL], 2: [COPY_ENGINES, NORM_AS_SUMMED]}
    later = by_gpus.get(config.get("num_gpus", 0), [])
    forms = [[IN_ONE_PASS, *later[:number]] for number in range(len(later) + 1)]
    return unusual_switches(config) in ([], *forms)


def set_besides(config: dict[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Name the switches that differ from what the path decides with some `given`."""
    switches = {name: (FIELDS | RETIRED)[name].words for name in PLAIN}
    others = {name: value for name, value in config.items() if name not in PLAIN}
    # Of a configuration that is refused today, nothing is known to be usual.
    undecided = dict.fromkeys(name for name in PLAIN if name in FIELDS)
    usual = completed(others | undecided | dict(given)) | _LATER
    values = PLAIN | config
    unusual = {n for n in PLAIN if values[n] is not None and values[n] != usual.get(n, values[n])}
    unusual -= {name for name in PLAIN if usual.get(name) is None}
    unusual -= {"swiglu"} if config.get("path") == "tuned" else set()
    texts = [
        switches[name].format(_SAID.get(value, str(value).replace("_", " ")))
        for name, value in config.items()
        if name in unusual
    ]
    return texts if unusual <= config.keys() else [*texts, EARLIER_FORM]


def shorten_arms(runs: pd.DataFrame) -> pd.DataFrame:
    """Leave out of the arms' names what tells no two of them apart.

    When a BF16 run made its optimizer says nothing: nothing is converted. Which layers stay out
    of FP8 is said once per study, if all of its FP8 runs agree: in ``kept_in_bf16``, a column
    that is added and missing elsewhere.
    """
    arm = runs["arm"].astype(object)
    is_bf16 = runs["precision"] == "bf16"
    arm = arm.where(~is_bf16, arm.str.removesuffix(", optimizer made before conversion"))
    kept = arm.str.extract(_SKIPS, expand=False).astype(object)
    agreed = kept[~is_bf16].fillna("").groupby(runs["study"]).nunique() == 1
    shorten = kept.notna() & runs["study"].map(agreed).eq(True)
    short = arm.str.replace(_SKIPS, "", regex=True)
    return runs.assign(arm=arm.where(~shorten, short), kept_in_bf16=kept.where(shorten, None))


def in_fp8(runs: pd.DataFrame) -> pd.Series:
    """Tell the runs, or arms, in FP8: FP16 is a baseline as BF16 is, and has no gap or lead here.

    A precision that is not known counts as FP8.
    """
    return ~runs["precision"].isin(SIXTEEN_BIT)


def newest_per_seed(runs: pd.DataFrame) -> pd.DataFrame:
    """Keep the newest result of every seed of an arm: a repeat is no further seed.

    Of repeats it is the first that counts, whichever was done last.
    """
    results = runs[runs["status"].isin(RESULTS)].sort_values(
        ["repeat", "ended_at"],
        ascending=[False, True],
        kind="stable",
        key=lambda column: column.fillna(0) if column.name == "repeat" else column,
    )
    newest = results.drop_duplicates(["arm_key", "pair_key"], keep="last")
    return runs[runs.index.isin(newest.index)]


def pairs_of(runs: pd.DataFrame, value: str) -> pd.DataFrame:
    """Give every FP8 run the `value` of the BF16 run that differs in precision alone.

    Each seed of an arm counts once, see `newest_per_seed`. The FP8 rows that have a partner, stale
    ones too, get its run_id, value, peak memory and whether its timing is void in columns
    ``…_bf16``, and its ``run_ids`` after their own; ``diverged`` says of an arm that a seed of it
    did so alone.
    """
    newest = newest_per_seed(runs)
    usable = newest[(newest["status"] == "completed") & newest[value].notna()]
    baseline = (
        usable[(usable["precision"] == "bf16") & ~usable["stale"]]
        .sort_values("ended_at", kind="stable")
        .drop_duplicates("pair_key", keep="last")
        .set_index("pair_key")[["run_id", "run_ids", value, "memory_peak_gib", "timing_void"]]
        .add_suffix("_bf16")
    )
    pairs = usable[in_fp8(usable)].merge(baseline, on="pair_key", how="inner")
    pairs["run_ids"] += " " + pairs.pop("run_ids_bf16")
    has_diverged = pairs["arm_key"].isin(set(diverged_alone(runs)["arm_key"])).rename("diverged")
    return pd.concat([pairs, has_diverged], axis=1)


def paired_losses(runs: pd.DataFrame) -> pd.DataFrame:
    """Return `pairs_of` by the final training loss, ``loss_last20_mean``."""
    return pairs_of(runs, "loss_last20_mean")


def diverged_alone(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the FP8 runs that diverged where the BF16 run of the same seed did not."""
    newest = newest_per_seed(runs)
    sound = (newest["status"] == "completed") & newest["loss_last20_mean"].notna()
    baseline = newest.loc[sound & ~newest["stale"] & (newest["precision"] == "bf16"), "pair_key"]
    gone = newest[(newest["status"] == "diverged") & in_fp8(newest)]
    return gone[gone["pair_key"].isin(set(baseline))]


def sessions_of(runs: pd.DataFrame) -> pd.Series:
    """Name each run's session: when, and on which host, the period began without a long pause.

    Takes the columns machine, host_hash, started_at and ended_at.
    """
    table = runs.sort_values("started_at", kind="stable")
    starts, ends = (pd.to_datetime(table[name]) for name in ("started_at", "ended_at"))
    hosts = [table["machine"], table["host_hash"].fillna("")]
    idle_since = ends.fillna(starts).groupby(hosts).cummax().groupby(hosts).shift()
    begins = idle_since.isna() | (starts - idle_since > SESSION_GAP)
    first = starts.where(begins).groupby(hosts).ffill()
    where = hosts[1].map(lambda host: f" on {host}" if host else "")
    return (first.dt.strftime("%Y-%m-%d %H:%M") + where)[runs.index]


def as_one_study(runs: pd.DataFrame) -> pd.DataFrame:
    """Give the runs of a study's further sessions, ``<study>-2``, its own name, in keys as well.

    What a record calls its study stays in ``box``. Seeds keep their partners: ``pair_key`` stays.
    """
    first = runs["study"].str.replace(_FURTHER, "", regex=True)
    there = {*runs[["machine", "study"]].itertuples(index=False, name=None)}
    study = [
        new if (machine, new) in there else old
        for machine, new, old in zip(runs["machine"], first, runs["study"], strict=True)
    ]
    keys = {
        name: [
            key.replace(f"{json.dumps(old)}]", f"{json.dumps(new)}]", 1)  # the last of a place
            for key, old, new in zip(runs[name], runs["study"], study, strict=True)
        ]
        for name in ("arm_key", "switch_key")
    }
    return runs.assign(box=runs["study"], study=study, **keys)


def medians_by(
    table: pd.DataFrame, keys: list[str], columns: Sequence[str], names: Sequence[str] = ARM
) -> pd.DataFrame:
    """Return one row per group: `names` of its first run, ``num_runs``, medians of `columns`.

    And ``run_ids``, where the `table` has them. The `keys` are the index; missing values are left
    out of the medians.
    """
    groups = table.groupby(keys, sort=False)
    result = groups[[name for name in names if name not in keys]].first()
    result["num_runs"] = groups.size()
    if "run_ids" in table:
        result["run_ids"] = groups["run_ids"].agg(together)
    return result.join(groups[list(columns)].median()) if columns else result


def calm(runs: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Leave out the rows whose timing is void, but where all that are alike in `keys` are."""
    return runs[~runs["timing_void"] | runs.groupby(keys)["timing_void"].transform("all")]


def medians_of_repeats(runs: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Return one row for each seed of an arm that measured the first of the `columns`.

    Each column is the median over the seed's repeats, of each the newest result; ``num_repeats`` is
    their number and ``run_ids`` are theirs. Repeats whose timing is void count only where all are,
    which ``timing_void`` says.
    """
    seed = ["arm_key", "pair_key"]
    results = runs[runs["status"].isin(RESULTS)].fillna({"repeat": 0})
    newest = results.sort_values("ended_at", kind="stable").drop_duplicates(
        [*seed, "repeat"], keep="last"
    )
    each = newest[newest[columns[0]].notna() & (newest["status"] == "completed")]
    each = calm(each, seed)
    measured = medians_by(each, seed, columns, names=()).rename(columns={"num_runs": "num_repeats"})
    kept = newest_per_seed(each).drop(columns=[*columns, "run_ids"])
    return kept.merge(measured.reset_index(), on=seed, how="left", validate="one_to_one")


def medians_of_seeds(
    seeds: pd.DataFrame, pairs: pd.DataFrame, columns: Sequence[str], names: Sequence[str] = ARM
) -> pd.DataFrame:
    """Return `medians_by` arm of the rows of `medians_of_repeats`; ``num_runs`` counts repeats too.

    The ids of the runs in an arm's `pairs` follow its own.
    """
    table = medians_by(seeds, ["arm_key"], columns, names)
    table["num_runs"] = seeds.groupby("arm_key", sort=False)["num_repeats"].sum()
    paired = pairs.groupby("arm_key")["run_ids"].agg(together)
    table["run_ids"] = [together([own, paired.get(key)]) for key, own in table["run_ids"].items()]
    return table


def together(run_ids: Iterable[object]) -> str:
    """Join the run ids of rows, each once, in the order in which they come."""
    texts = [text for text in run_ids if isinstance(text, str)]
    return " ".join(dict.fromkeys(" ".join(texts).split()))


def ordered(table: pd.DataFrame) -> pd.DataFrame:
    """Sort by context, BF16 first and stale arms last, and drop nothing.

    The studies of document A's failure come last: nobody would use their setting.
    """
    rank = (table["precision"] != "bf16").astype(int) + 2 * table["stale"].astype(int)
    last = table["study"].fillna("").str.startswith(FAILURE_STUDIES)
    by = ["machine", "_last", "study", "model", "setting", "num_gpus", "_rank", "arm"]
    ordered = table.assign(_rank=rank, _last=last).sort_values(by, kind="stable")
    return ordered.drop(columns=["_rank", "_last"]).reset_index(drop=True)
