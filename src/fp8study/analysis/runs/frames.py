"""From stored records to tidy frames: one row per run, one row per logged step.

The keys by which runs are compared are made here, once, from the configuration:

``arm_key``
    equal for the runs that differ by their seed or repetition alone; ``asked_key`` is the same,
    known before the run has seen its data and model, and without the version of torchao, which
    only an FP8 run computes with;
``pair_key``
    equal for runs that differ by their precision (and what exists for FP8 only) alone. It holds
    the seed, the study, the machine, the versions of torch and transformers, the data and the
    model's size, so that a comparison is never made across machines, installations, data, data
    orders or models; ``partner_key`` is the same without the seed: that of whole arms;
``effect_key``
    equal for runs that differ by seed, repetition, precision (and what exists for FP8 only, but
    for the layers left out), masters and fault alone: the arms of an attribution;
``switch_key``
    equal for runs that differ by the switches of their training path alone;
``format_key``
    equal for runs that differ by their precision, their optimizer's states and the switches that
    come with either alone;
``kernel_key``
    equal for runs that differ by their attention kernel and by compilation alone.

Runs with equal ``arm_key`` and ``pair_key`` are repeats of one seed.

``run_ids`` names a row's record as MACHINE/STUDY/RUN; where rows are put together the tables keep
the ids of all, those of the arm first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import pandas as pd

from fp8study.analysis.runs import naming
from fp8study.analysis.runs.pairing import together
from fp8study.core import record_shape
from fp8study.core.config import completed, set_by_hand
from fp8study.core.fields import BY_HAND, PLAIN, varying
from fp8study.core.hardware import bf16_peak_tflops
from fp8study.core.recipes import SIXTEEN_BIT
from fp8study.core.record_shape import COLUMNS, COUNT, FLAG, METRICS, NUMBER, PARTS, TEXT, kinds
from fp8study.core.records import LOSS_MARGIN_PCT, UNSTEADY, RunRecord, StoredRun

#: What chooses other kernels for the same arithmetic.
KERNEL_FIELDS = ("attention", "compile", "compile_mode")
#: Formats of arithmetic and of optimizer states, and what a training path makes of them.
FORMAT_FIELDS = ("optimizer_state", *PLAIN, *varying("pair"))
#: The ``path`` of a run that sets a switch of its own.
MIXED = "mixed"
#: The row of a `cost_table` that adds up a machine's others.
ALL_STUDIES = "all"

#: What names a run.
PLACE = ["machine", "study", "run_id"]
_ENDS = ("status", "status_detail", "started_at", "ended_at")
_SECTIONS = ("config", "machine", "data", "model", "results")
#: What the instruments saw of the start-up; empty in older records.
_STARTUP = tuple(f"{part}_seconds" for part in PARTS)
#: What a run does before it takes its GPUs.
_BEFORE = [f"startup_{part}_seconds" for part in ("launch", "imports", "gpu_wait")]
_VERSIONS = ("torch", "torchao", "transformers", "cuda")

#: Every column of `runs_frame` with its kind.
RUN_COLUMNS: dict[str, str] = {
    **dict.fromkeys((*PLACE, *_ENDS), TEXT),
    **{name: kind for section in _SECTIONS for name, kind in COLUMNS[section].items()},
    **{f"startup_{name}": NUMBER for name in _STARTUP},
    **{f"version_{name}": TEXT for name in _VERSIONS},
    **kinds(
        text="run_ids git_commit arm setting path fp8_part "
        "arm_key asked_key pair_key partner_key effect_key switch_key format_key "
        "kernel_key",
        count="model_vocab_size num_warnings",
        flag="git_dirty stale planted unsteady timing_void",
    ),
    **COLUMNS["judgement"],
}
METRIC_COLUMNS: dict[str, str] = {**dict.fromkeys(PLACE, TEXT), **METRICS}


def runs_frame(stored_runs: Iterable[StoredRun]) -> pd.DataFrame:
    """Return one row per run, whatever its end, with the columns of `RUN_COLUMNS`.

    A record's judgement (``margin_pct``, ``speed_only``) is that of its study when it was made.
    Runs without one are judged as the others of their study and machine, else by the defaults.
    Where those disagree about the margin, ``margin_pct`` is missing, a warning says so, and no
    verdict is given on their losses.
    """
    runs = list(stored_runs)
    rows = [_row(run) | {"host_hash": host} for run, host in zip(runs, _hosts(runs), strict=True)]
    frame = _typed({name: [row[name] for row in rows] for name in RUN_COLUMNS}, RUN_COLUMNS)
    frame["speed_only"] = frame["speed_only"].fillna(False)
    for _, group in frame.groupby(["machine", "study"], sort=False):
        stated = sorted(group["margin_pct"].dropna().unique()) or [LOSS_MARGIN_PCT]
        frame.loc[group.index, "margin_pct"] = stated[0] if len(stated) == 1 else math.nan
    return frame


def metrics_frame(stored_runs: Iterable[StoredRun]) -> pd.DataFrame:
    """Return one row per logged step of every run, with the columns of `METRIC_COLUMNS`."""
    columns: dict[str, list[Any]] = {name: [] for name in METRIC_COLUMNS}
    for run in stored_runs:
        for name in PLACE:
            columns[name] += [place_of(run)[name]] * len(run.metrics.get("step", ()))
        for name, values in run.metrics.items():
            columns[name] += values
    return _typed(columns, METRIC_COLUMNS)


def _typed(columns: Mapping[str, list[Any]], kind_of: Mapping[str, str]) -> pd.DataFrame:
    dtypes = {TEXT: "object", NUMBER: "float64", COUNT: "Int64", FLAG: "boolean"}
    return pd.DataFrame(
        {name: pd.Series(columns[name], dtype=dtypes[kind]) for name, kind in kind_of.items()}
    )


def _row(run: StoredRun) -> dict[str, Any]:
    record = run.record
    row: dict[str, Any] = place_of(run) | {name: getattr(record, name) for name in _ENDS}
    for section in (*_SECTIONS, "judgement"):
        row |= {name: getattr(record, section).get(name) for name in COLUMNS[section]}
    startup = record.instruments.get("startup", {})
    row |= {f"startup_{name}": startup.get(name) for name in _STARTUP}
    row |= {f"version_{name}": record.versions.get(name) for name in _VERSIONS}
    if row["bf16_peak_tflops"] is None:  # older records leave the denominator out
        row["bf16_peak_tflops"] = bf16_peak_tflops(record.machine.get("gpu_name"))
    had = record_shape.as_run(record.config, record.warnings)
    config = completed(had, record.machine.get("device"))
    alone = ("strategy",) if config.get("num_gpus") == 1 else ()
    trained = _trained(record)
    asked = _key(run, config, varying("repeat"))
    # What a path makes of these may follow from the precision.
    paired = config | {f"{name} by hand": set_by_hand(config, name) for name in BY_HAND}
    return row | {
        "lr_warmup_steps": config.get("lr_warmup_steps"),  # older records leave it out
        "run_ids": run_path(run),
        "model_vocab_size": record.model.get("vocab_size"),
        "num_warnings": len(record.warnings),
        "git_commit": record.git.get("commit"),
        "git_dirty": record.git.get("dirty"),
        "stale": naming.stale_note(record) is not None,
        "planted": bool(record.config.get("untrained")),
        "unsteady": any(warning.startswith(UNSTEADY) for warning in record.warnings),
        "timing_void": record.timing_is_void,
        "arm": naming.arm_label(record),
        "setting": naming.setting_label(had),
        "path": config.get("path") if naming.has_usual_path(had) else MIXED,
        "fp8_part": naming.fp8_part(config),
        "asked_key": asked,
        "arm_key": asked + trained + _arithmetic(record),
        "pair_key": _key(run, paired, varying("pair")) + trained,
        "partner_key": _key(run, paired, (*varying("pair"), "seed")) + trained,
        "effect_key": _key(run, paired, varying("effect")) + trained,
        "switch_key": _key(run, config, varying("switch") + alone) + trained,
        "format_key": _key(run, config, FORMAT_FIELDS) + trained,
        "kernel_key": _key(run, config, (*KERNEL_FIELDS, "repeat")) + trained,
    }


def _hosts(runs: Sequence[StoredRun]) -> list[str | None]:
    """Name each run's host: its hash, and what tells hosts apart that share it, as rented ones do.

    That is their kernel's boot. Older records do not have it, but the GPUs: a host has one at each
    index, and those of one run are of one host. A GPU that was in no run with others is of the host
    that has none at its index yet. Where there are several of these, it keeps a name of its own:
    nobody knows whose it is.
    """

    def gpus_of(run: StoredRun) -> dict[str, int]:
        return {gpu["uuid"]: gpu["index"] for gpu in run.record.machine.get("gpus") or []}

    def widest_first(item: tuple[int, StoredRun]) -> tuple[int, str]:
        return -len(gpus_of(item[1])), item[1].record.started_at

    # Of each name its hosts, and GPUs that may be of several of them.
    alike: dict[tuple[str, str | None], tuple[list[dict[str, int]], list[dict[str, int]]]] = {}
    boots: dict[tuple[str, str | None], set[str]] = {}
    found: dict[int, dict[str, int]] = {}
    for at, run in sorted(enumerate(runs), key=widest_first):
        label = (run.machine_label, run.record.machine.get("host_hash"))
        if boot := run.record.machine.get("boot_hash"):
            boots.setdefault(label, set()).add(boot)
            continue
        gpus = gpus_of(run)
        hosts, unplaced = alike.setdefault(label, ([], []))
        known = [host for host in hosts + unplaced if not host.keys().isdisjoint(gpus)]
        free = [host for host in hosts if set(host.values()).isdisjoint(gpus.values())]
        if len(may_be := known[:1] or free) != 1:
            kept, may_be = unplaced if may_be else hosts, [{}]
            kept += may_be
        may_be[0].update(gpus)
        found[at] = may_be[0]
    several = {name for (_, name), (hosts, _) in alike.items() if name and len(hosts) > 1}
    several |= {name for (_, name), of_name in boots.items() if name and len(of_name) > 1}
    several |= {name for _, name in boots.keys() & alike.keys() if name}

    def called(at: int, machine: Mapping[str, Any]) -> str | None:
        name, boot = machine.get("host_hash"), machine.get("boot_hash")
        own = f"booted {boot[:8]}" if boot else f"with {next(iter(found[at]), '')[:8]}"
        return f"{name} {own}" if name in several and (boot or found[at]) else name

    return [called(at, run.record.machine) for at, run in enumerate(runs)]


def place_of(run: StoredRun) -> dict[str, str]:
    """Return a run's machine, study and run id, by the names in `PLACE`."""
    place = (run.machine_label, run.record.study, run.record.run_id)
    return dict(zip(PLACE, place, strict=True))


def run_path(run: StoredRun) -> str:
    """Name a record among all: its machine, study and run id, quoted as in a URL."""
    return quote(f"{run.machine_label}/{run.record.study}/{run.record.run_id}")


def key_of(config: Mapping[str, Any], ignored: Iterable[str] = (), place: Any = None) -> str:
    """Write a completed configuration, but for `ignored` fields, and `place` as one text.

    Equal configurations at equal places have equal texts.
    """
    ignored = {*ignored}
    content = {name: value for name, value in config.items() if name not in ignored}
    return json.dumps([place, content], sort_keys=True, default=str)


def _key(run: StoredRun, config: Mapping[str, Any], ignored: tuple[str, ...]) -> str:
    machine, versions = run.record.machine, run.record.versions
    place = [run.machine_label, machine.get("device"), machine.get("gpu_name")]
    return key_of(config, ignored, [*place, versions.get("torch"), run.record.study])


def _trained(record: RunRecord) -> str:
    """What was trained on what: one configuration may name files that have changed since."""
    content = [
        record.data.get("corpus_sha256"),
        record.data.get("tokenizer_sha256"),
        record.model.get("num_parameters"),
        record.model.get("config_sha256"),
        record.versions.get("transformers"),
        *(record.model.get(f"init_{name}") for name in ("sha256", "step", "precision")),
    ]
    return json.dumps(content, default=str)


def _arithmetic(record: RunRecord) -> str:
    """What multiplied: FP8 seeds of two versions of torchao are no seeds of one arm."""
    is_fp8 = record.config.get("precision") not in SIXTEEN_BIT
    return json.dumps(record.versions.get("torchao")) if is_fp8 else ""


def provenance_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Say, for each machine and study, where its numbers come from.

    One row per machine, study and installation: hardware, versions, commit, dates and how many runs
    ended in which status.
    """
    hardware = runs["gpu_name"].fillna(runs["cpu_name"])
    commit = runs["git_commit"].astype("object").map(lambda c: c[:10] if isinstance(c, str) else "")
    dirty = runs["git_dirty"].map(lambda flag: " + uncommitted changes" if flag is True else "")
    frame = runs.assign(hardware=hardware, commit=commit + dirty)
    keys = ["machine", "study", "hardware", "driver", "version_torch", "version_torchao", "commit"]
    keys += ["version_cuda", "version_transformers"]
    groups = frame.groupby(keys, dropna=False, sort=False)
    table = groups.agg(
        first_run=("started_at", "min"),
        last_run=("ended_at", "max"),
        num_runs=("run_id", "size"),
        run_ids=("run_ids", together),
        statuses=(
            "status",
            lambda s: ", ".join(f"{n} {end}" for end, n in s.value_counts().items()),
        ),
    ).reset_index()
    for name in ("first_run", "last_run"):
        table[name] = table[name].astype(str).str[:16].str.replace("T", " ")
    return table


def held_seconds(runs: pd.DataFrame) -> pd.Series:
    """Return how long runs held their GPUs; missing where a record does not know since when."""
    lasted = pd.to_datetime(runs["ended_at"]) - pd.to_datetime(runs["started_at"])
    return lasted.dt.total_seconds() - runs[_BEFORE].sum(axis=1, skipna=False)


def cost_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return what each study held of its GPUs, hours; runs on a CPU have no row.

    One row per machine and study, and `ALL_STUDIES`: ``num_runs``, ``gpu_hours`` from a run's claim
    on its GPUs to its end, where the record knows when it had them (else from its start), times its
    GPUs; runs that shared a GPU share its time; and the days of the first and the last run.
    """
    gpu = runs[runs["device"] == "cuda"]
    lasted = pd.to_datetime(gpu["ended_at"]) - pd.to_datetime(gpu["started_at"])
    held = held_seconds(gpu).fillna(lasted.dt.total_seconds())
    share = gpu["num_gpus"].astype(float) / gpu["runs_per_gpu"].fillna(1).astype(float)
    gpu = gpu.assign(gpu_hours=held * share / 3600)
    both = pd.concat([gpu, gpu.assign(study=ALL_STUDIES)]).sort_values("machine", kind="stable")
    return (
        both.groupby(["machine", "study"], sort=False)
        .agg(
            num_runs=("run_id", "size"),
            gpu_hours=("gpu_hours", "sum"),
            first_run=("started_at", lambda times: times.min()[:10]),
            last_run=("ended_at", lambda times: times.max()[:10]),
            run_ids=("run_ids", together),
        )
        .reset_index()
    )


def failures_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Every run that did not complete, with what it says of itself."""
    columns = ["machine", "study", "model", "num_gpus", "arm", "seed", "run_id"]
    columns += ["status", "steps_completed", "status_detail", "run_ids"]
    return runs.loc[runs["status"] != "completed", columns].reset_index(drop=True)


def data_table(runs: pd.DataFrame) -> pd.DataFrame:
    """How much of which corpus the runs of each study saw."""
    keys = ["machine", "study", "corpus", "corpus_sha", "vocab_size"]
    seen = runs[runs["num_tokens_seen"].notna()]
    hashes = seen["corpus_sha256"].map(lambda h: h[:10] if isinstance(h, str) else "")
    return (
        seen.assign(corpus_sha=hashes)
        .groupby(keys, sort=False, dropna=False)
        .agg(
            num_train_tokens=("num_train_tokens", "max"),
            tokens_seen_max=("num_tokens_seen", "max"),
            epochs_max=("epochs", "max"),
            num_seeds=("seed", "nunique"),
            run_ids=("run_ids", together),
        )
        .reset_index()
    )
