"""Which runs belong together: repeats of a seed, FP8 runs with their BF16 partners, sessions.

The keys that this goes by are made in `fp8study.analysis.runs.frames`, the names of arms in
`fp8study.analysis.runs.naming`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import pandas as pd

from fp8study.analysis.runs.naming import FROM_WEIGHTS
from fp8study.core.recipes import SIXTEEN_BIT
from fp8study.core.records import RESULTS

#: They plant faults or repeat them, at a learning rate of 1e-5.
FAILURE_STUDIES = ("attribution", "corner-arms", "document-a", "stale-batch")
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


def without_skips(runs: pd.DataFrame) -> pd.DataFrame:
    """Add ``bare_arm``, the name without layers kept out of FP8, and ``kept``: those layers."""
    kept = runs["arm"].str.extract(_SKIPS, expand=False)
    if "kept_in_bf16" in runs:
        kept = runs["kept_in_bf16"].where(kept.isna(), kept)
    bare = runs["arm"].str.replace(_SKIPS, "", regex=True)
    return runs.assign(bare_arm=bare, kept=kept.astype(object).where(kept.notna(), ""))


def in_fp8(runs: pd.DataFrame) -> pd.Series:
    """Tell the runs, or arms, in FP8: FP16 is a baseline as BF16 is, and has no gap or lead here.

    A precision that is not known counts as FP8.
    """
    return ~runs["precision"].isin(SIXTEEN_BIT)


def healthy(table: pd.DataFrame) -> pd.DataFrame:
    """Return the runs, or arms, that train every weight which they should."""
    return table[~table["stale"].eq(True)]


def goes_on(table: pd.DataFrame) -> pd.Series:
    """Tell which runs, or arms, go on from weights that another training left, by their setting."""
    return table["setting"].str.contains(FROM_WEIGHTS)


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
        healthy(usable[usable["precision"] == "bf16"])
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
    baseline = healthy(newest[sound & (newest["precision"] == "bf16")])
    gone = newest[(newest["status"] == "diverged") & in_fp8(newest)]
    return gone[gone["pair_key"].isin(set(baseline["pair_key"]))]


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
    table: pd.DataFrame, keys: list[str], columns: Sequence[str], names: Sequence[str]
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
