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
    orders or models.
``effect_key``
    equal for runs that differ by seed, repetition, precision (and what exists for FP8 only, but
    for the layers left out), masters and fault alone: the arms of an attribution.

``switch_key``
    equal for runs that differ by the switches of their training path alone.

Runs with equal ``arm_key`` and ``pair_key`` are repeats of one seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pandas as pd

from fp8study.analysis.switches import unusual_switches
from fp8study.core.config import completed
from fp8study.core.fields import DEFAULTS, varying
from fp8study.core.hardware import bf16_peak_tflops
from fp8study.core.recipes import RECIPES
from fp8study.core.records import RunRecord, StoredRun, read_metrics
from fp8study.core.startup import PARTS
from fp8study.core.studies import speed_only_studies

#: What an FP8 run leaves in BF16 unless it says otherwise; an arm that differs is named so.
DEFAULT_SKIP = list(DEFAULTS["skip"])

PRECISION_LABELS: dict[str, str] = {name: recipe.label for name, recipe in RECIPES.items()}

#: The ``path`` of a run that sets a switch of its own.
MIXED = "mixed"

_TEXT, _NUMBER, _COUNT, _FLAG = "object", "float64", "Int64", "boolean"

_CONFIG = {
    "model": _TEXT,
    "precision": _TEXT,
    "num_gpus": _COUNT,
    "strategy": _TEXT,
    "sequence_length": _COUNT,
    "micro_batch_size": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "num_steps": _COUNT,
    "num_warmup_steps": _COUNT,
    "learning_rate": _NUMBER,
    "lr_schedule": _TEXT,
    "seed": _COUNT,
    "compile": _FLAG,
    "activation_checkpointing": _FLAG,
    "master_dtype": _TEXT,
    "optimizer_binding": _TEXT,
    "fp8_all_gather": _FLAG,
    "repeat": _COUNT,
    "runs_per_gpu": _COUNT,
    "validation_sequences": _COUNT,
    "corpus": _TEXT,
}
_MACHINE = {
    "device": _TEXT,
    "num_gpus_on_machine": _COUNT,
    "gpu_name": _TEXT,
    "cpu_name": _TEXT,
    "gpu_memory_gib": _NUMBER,
    "driver": _TEXT,
}
_DATA = {
    "corpus_sha256": _TEXT,
    "vocab_size": _COUNT,
    "num_train_tokens": _COUNT,
    "num_tokens_seen": _COUNT,
    "epochs": _NUMBER,
}
_MODEL = {
    "num_parameters": _COUNT,
    "flops_per_token": _NUMBER,
    "num_linear": _COUNT,
    "num_linear_fp8": _COUNT,
    "parameters_outside_optimizer_pct": _NUMBER,
    "parameter_dtype": _TEXT,
}
_RESULTS = {
    "steps_completed": _COUNT,
    "startup_seconds": _NUMBER,
    "first_step_seconds": _NUMBER,
    "compile_seconds": _NUMBER,
    "num_timed_steps": _COUNT,
    "step_time_ms_median": _NUMBER,
    "step_time_ms_p10": _NUMBER,
    "step_time_ms_p90": _NUMBER,
    "tokens_per_second_per_gpu": _NUMBER,
    "tflops_per_gpu": _NUMBER,
    "bf16_peak_tflops": _NUMBER,
    "mfu_bf16_peak_pct": _NUMBER,
    "mixed_peak_tflops": _NUMBER,
    "mfu_mixed_peak_pct": _NUMBER,
    "mfu_achievable_pct": _NUMBER,
    "memory_peak_gib": _NUMBER,
    "num_alloc_retries": _NUMBER,
    "num_device_allocs": _NUMBER,
    "energy_joule_per_token": _NUMBER,
    "warm_up_seconds": _NUMBER,
    "compile_cache_hits": _NUMBER,
    "compile_cache_misses": _NUMBER,
    "loss_start": _NUMBER,
    "loss_last20_mean": _NUMBER,
    "validation_loss": _NUMBER,
}
#: What the instruments saw of the start-up; empty in older records.
_STARTUP = tuple(f"{part}_seconds" for part in PARTS)
_VERSIONS = ("python", "fp8study", "torch", "torchao", "transformers", "cuda", "nccl")
_IDENTITY = ("machine", "study", "run_id", "status", "status_detail", "started_at", "ended_at")
_DERIVED = {
    "model_vocab_size": _COUNT,
    "git_commit": _TEXT,
    "git_dirty": _FLAG,
    "stale": _FLAG,
    "planted": _FLAG,
    "arm": _TEXT,
    "setting": _TEXT,
    "arm_key": _TEXT,
    "asked_key": _TEXT,
    "pair_key": _TEXT,
    "effect_key": _TEXT,
    "switch_key": _TEXT,
    "path": _TEXT,
    "speed_only": _FLAG,
    "num_warnings": _COUNT,
}

#: Every column of `runs_frame` with its type.
RUN_COLUMNS: dict[str, str] = {
    **dict.fromkeys(_IDENTITY, _TEXT),
    **_CONFIG,
    **_MACHINE,
    **_DATA,
    **_MODEL,
    **_RESULTS,
    **{f"startup_{name}": _NUMBER for name in _STARTUP},
    **{f"version_{name}": _TEXT for name in _VERSIONS},
    **_DERIVED,
}

METRIC_COLUMNS: dict[str, str] = {
    "machine": _TEXT,
    "study": _TEXT,
    "run_id": _TEXT,
    "step": _COUNT,
    "loss": _NUMBER,
    "learning_rate": _NUMBER,
    "step_time_ms": _NUMBER,
    "tokens_per_second_per_gpu": _NUMBER,
    "tflops_per_gpu": _NUMBER,
    "tokens_seen": _COUNT,
    "timed": _FLAG,
}


def runs_frame(stored_runs: Iterable[StoredRun]) -> pd.DataFrame:
    """One row per run, whatever its end.

    Args:
        stored_runs: What `fp8study.core.records.load_runs` returned.

    Returns:
        The columns of `RUN_COLUMNS`, typed; a value that a record does not hold is missing.
        An empty input gives an empty frame with the same columns.

    Raises:
        UserError: The file of a study is invalid: it says whether losses are judged.
    """
    timed = speed_only_studies()
    rows = [_row(run) | {"speed_only": run.record.study in timed} for run in stored_runs]
    return _typed(rows, RUN_COLUMNS)


def metrics_frame(stored_runs: Iterable[StoredRun]) -> pd.DataFrame:
    """One row per logged step of every run, with the columns of `METRIC_COLUMNS`."""
    rows: list[dict[str, Any]] = []
    for run in stored_runs:
        place = {
            "machine": run.machine_label,
            "study": run.record.study,
            "run_id": run.record.run_id,
        }
        rows.extend({**line, **place} for line in read_metrics(run.run_dir))
    return _typed(rows, METRIC_COLUMNS)


def _typed(rows: list[dict[str, Any]], columns: dict[str, str]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=list(columns), dtype="object")
    for name, kind in columns.items():
        if kind in (_NUMBER, _COUNT):
            # A value of the wrong kind in one record must not take down the whole report.
            number = pd.to_numeric(frame[name], errors="coerce").astype("float64")
            frame[name] = number.round().astype("Int64") if kind == _COUNT else number
        elif kind == _FLAG:
            flags = frame[name].map(lambda value: value if isinstance(value, bool) else None)
            frame[name] = flags.astype("boolean")
        else:
            frame[name] = frame[name].where(frame[name].notna(), None)
    return frame


def _row(run: StoredRun) -> dict[str, Any]:
    record = run.record
    row: dict[str, Any] = {"machine": run.machine_label}
    row |= {name: getattr(record, name) for name in _IDENTITY if name != "machine"}
    sections = (
        (_CONFIG, record.config),
        (_MACHINE, record.machine),
        (_DATA, record.data),
        (_MODEL, record.model),
        (_RESULTS, record.results),
    )
    for names, content in sections:
        row |= {name: content.get(name) for name in names}
    startup = record.instruments.get("startup") or {}
    row |= {f"startup_{name}": startup.get(name) for name in _STARTUP}
    row |= {f"version_{name}": record.versions.get(name) for name in _VERSIONS}
    if row["bf16_peak_tflops"] is None:  # older records leave the denominator out
        row["bf16_peak_tflops"] = bf16_peak_tflops(record.machine.get("gpu_name"))
    row["model_vocab_size"] = record.model.get("vocab_size")
    row["git_commit"] = record.git.get("commit")
    row["git_dirty"] = record.git.get("dirty")
    row["stale"] = _stale_note(record) is not None
    row["planted"] = bool(record.config.get("untrained"))
    row["arm"] = arm_label(record)
    row["setting"] = setting_label(record.config)
    row["asked_key"] = _key(run, varying("repeat"))
    row["arm_key"] = row["asked_key"] + _trained(record) + _arithmetic(record)
    row["pair_key"] = _key(run, varying("pair")) + _trained(record)
    row["effect_key"] = _key(run, varying("effect")) + _trained(record)
    alone = ("strategy",) if record.config.get("num_gpus") == 1 else ()
    row["switch_key"] = _key(run, varying("switch") + alone) + _trained(record)
    row["path"] = MIXED if unusual_switches(record.config) else completed(record.config).get("path")
    row["num_warnings"] = len(record.warnings)
    return row


def _key(run: StoredRun, ignored: tuple[str, ...]) -> str:
    record = run.record
    config = completed(record.config, record.machine.get("device"))
    content = {k: v for k, v in config.items() if k not in ignored}
    place = [
        run.machine_label,
        record.machine.get("device"),
        record.machine.get("gpu_name"),
        record.versions.get("torch"),
        record.study,
    ]
    return json.dumps([place, content], sort_keys=True, default=str)


def _trained(record: RunRecord) -> str:
    """What was trained on what: one configuration may name a file that has changed since."""
    content = [
        record.data.get("corpus_sha256"),
        record.data.get("tokenizer_sha256"),
        record.model.get("num_parameters"),
        record.versions.get("transformers"),
    ]
    return json.dumps(content, default=str)


def _arithmetic(record: RunRecord) -> str:
    """What multiplied: FP8 seeds of two versions of torchao are no seeds of one arm."""
    is_fp8 = record.config.get("precision") != "bf16"
    return json.dumps(record.versions.get("torchao")) if is_fp8 else ""


def _stale_note(record: RunRecord) -> str | None:
    """The words that go with every number of a run that trains only part of its model."""
    share = record.model.get("parameters_outside_optimizer_pct")
    planted = bool(record.config.get("untrained"))
    if isinstance(share, int | float) and share > 0:
        fault = "planted" if planted else "stale optimizer"
        return f"{fault} ({share:.1f} % of parameters not trained)"
    if share is None and planted:
        return "planted (share of parameters not trained unknown)"
    asked_for = record.config.get("optimizer_binding") == "before_conversion"
    if share is None and asked_for and record.config.get("precision") != "bf16":
        return "stale optimizer (share of parameters not trained unknown)"
    return None


def arm_label(record: RunRecord) -> str:
    """Name the precision of a run, and say so if part of its model was not trained."""
    config = record.config
    precision = str(config.get("precision", "unknown precision"))
    parts = [PRECISION_LABELS.get(precision, precision)]
    if precision != "bf16":
        gathers = config.get("strategy") == "fsdp2" and (config.get("num_gpus") or 0) > 1
        if precision == "fp8_tensorwise" and gathers and config.get("fp8_all_gather") is False:
            parts.append("BF16 all-gather")
        skip = config.get("skip")
        if skip is not None and list(skip) != DEFAULT_SKIP:
            parts.append(f"skips {' '.join(skip) or 'nothing'}")
    note = _stale_note(record)
    if note:
        parts.append(note)
    elif config.get("optimizer_binding") == "before_conversion":
        parts.append("optimizer made before conversion")
    return ", ".join(parts)


def setting_label(config: dict[str, Any], says_clipping: bool = True) -> str:
    """Say in a few words what two compared runs have in common, besides model and GPUs.

    Args:
        config: Of either run.
        says_clipping: Whether to name the norm that gradients are clipped at.
    """
    strategy = config.get("strategy")
    parts = ["not sharded" if strategy == "none" else str(strategy).upper()] if strategy else []
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
    if says_clipping and config.get("max_grad_norm") is not None:
        parts.append(f"gradients clipped at {config['max_grad_norm']:g}")
    if config.get("path") == "tuned":
        parts.append("tuned")
    return ", ".join(parts + unusual_switches(config))
