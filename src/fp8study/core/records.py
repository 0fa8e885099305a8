"""What a run leaves behind, and how it is read again.

A run owns one folder, ``results/<machine>/<study>/<run_id>/``:

``config.yaml``
    the resolved `fp8study.core.config.RunConfig`;
``metrics.jsonl``
    one line per logged step, flushed as it is written;
``run.json``
    the `RunRecord`, written once, atomically, when the run has ended, whatever its end;
``checkpoints/``
    of a run that saves its state, see `fp8study.core.checkpoints`.

``<machine>`` is ``local`` for what ran in this checkout and ``reference/<name>`` for what is
committed. Run ids are opaque: everything is read from the record, nothing from the name.
"""

from __future__ import annotations

import dataclasses
import datetime
import gzip
import json
import math
import os
import re
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8study.core import record_shape
from fp8study.core.audit_rules import timing_is_void
from fp8study.core.errors import UserError, one_line
from fp8study.core.files import is_held, write_whole

#: 2 added `RunRecord.judgement`; both are read.
SCHEMA_VERSION = 2
READABLE_VERSIONS = (1, 2)

#: Largest relative loss difference that counts as none, % of the BF16 loss, unless a study says
#: otherwise: DeepSeek-V3's published bound.
LOSS_MARGIN_PCT = 0.25
#: From here on an interval is given; below, the spread is not known well enough to be useful.
MIN_PAIRS_FOR_INTERVAL = 3

#: A run that ended in one of these has given its answer; it is not run again.
RESULTS = ("completed", "diverged", "out_of_memory")
#: These are failures of the infrastructure or of the code; a resumed study runs them again.
FAILURES = ("failed", "interrupted")
STATUSES = RESULTS + FAILURES
#: How a record's warning begins whose step time had not settled when timing began.
UNSTEADY = "timed before the step time was steady"

#: A list of numbers and nulls over many lines; the line break tells it from a text, which has none.
_NUMBERS = re.compile(r"(?<=\[)\n\s*(?:(?:[-+.\deE]+|null),?\s+)+(?=\])")
#: What reading a file raises that is damaged, whatever is wrong with it.
_UNREADABLE = (
    OSError, EOFError, zlib.error, ValueError, TypeError, LookupError, AttributeError,
    RecursionError, UserError,
)  # fmt: skip


class NewerRecord(UserError):
    """A record that another version of fp8study wrote in another layout: sound, but not ours."""


@dataclass(frozen=True)
class RunRecord:
    """Everything that the reporting half knows about one run.

    The dictionaries are open for new keys (a newer writer may add some) and are read with
    ``get``; the keys listed here are always written when the run got far enough to know them.
    """

    run_id: str
    """Opaque name, unique within its study."""
    study: str
    """The study that declared the run, ``adhoc`` for one started by hand; by `load_runs` and
    `read_runs`, the folder that it lies in."""
    status: str
    """One of `STATUSES`."""
    config: dict[str, Any]
    """The resolved configuration, field by field."""
    started_at: str
    """Start of the launcher, ISO 8601, UTC."""
    ended_at: str
    """End of the launcher, ISO 8601, UTC."""
    status_detail: str | None = None
    """One line that explains any status but ``completed``."""
    versions: dict[str, str | None] = field(default_factory=dict)
    """python, fp8study, torch, torchao, accelerate, transformers, triton, cuda, nccl …"""
    machine: dict[str, Any] = field(default_factory=dict)
    """device (``cuda`` or ``cpu``), gpu_name, num_gpus_on_machine, gpu_memory_gib, driver,
    compute_capability, power_limit_watts, clock_sm_max_mhz, clock_memory_max_mhz, gpu_link
    (``NV18``, ``PIX``, ``SHM`` …), cpu_name, num_cpus, memory_gib, platform, host_hash, boot_hash
    and gpus (of each its index, uuid and name); of several nodes also nodes (of each its host_hash
    and its ranks) and network_link. The rest describes the first."""
    git: dict[str, Any] = field(default_factory=dict)
    """commit (40 hex digits or null) and dirty (bool or null)."""
    data: dict[str, Any] = field(default_factory=dict)
    """corpus, corpus_sha256, tokenizer, tokenizer_sha256, vocab_size, num_train_tokens,
    num_tokens_seen, epochs, unigram_loss (of who knows the tokens' frequencies alone)."""
    model: dict[str, Any] = field(default_factory=dict)
    """vocab_size, num_parameters, num_matmul_parameters, flops_per_token, fp8_flops_per_token,
    num_linear, num_linear_fp8, parameters_outside_optimizer_pct, parameter_dtype; of a model that
    is no preset config_sha256, of its shape; of a run that began with given weights, init_sha256
    (`checkpoints.weights_sha256`) and, of a checkpoint's, init_step and init_precision."""
    results: dict[str, Any] = field(default_factory=dict)
    """Those of `record_shape.COLUMNS` that were measured, and validation_losses: a step and a loss
    for each point at which validation text was scored. Rates are over the timed window, warm-up
    left out; a run that shared its GPU or paused has none. resumed: from_step, num_gpus and at
    (UTC) for each time that the run went on from a checkpoint; its rates are those of the steps
    since the last time."""
    judgement: dict[str, Any] = field(default_factory=dict)
    """What the study's file said when the run was made: margin_pct (% of the BF16 loss),
    speed_only, expectation, question. Empty for runs outside a study and in older records."""
    audit: dict[str, Any] = field(default_factory=dict)
    """What `fp8study.measure.audit` saw around the first optimizer step; empty in older records."""
    instruments: dict[str, Any] = field(default_factory=dict)
    """startup, warm_up (`fp8study.train.pace`), memory (`memory.summarise_memory`), energy
    (`energy.summarise_energy`), step (one profiled step, `measure.trace.read_trace`), ceilings
    (`gemm_peaks.measure_ceilings`), overhead (`overhead.measure_overhead`), checkpoints
    (`train.checkpoint`), loss_scaling (num_skipped steps and the last scale, of FP16).
    What could not be measured is absent; empty in older records."""
    noise: dict[str, Any] = field(default_factory=dict)
    """What `measure.gradient_noise` measured; empty unless ``noise_at_steps`` asked for it."""
    warnings: list[str] = field(default_factory=list)
    """Every fallback that was taken and every defect that was asked for, one line each."""
    schema_version: int = SCHEMA_VERSION
    """Version of this layout."""

    def __post_init__(self) -> None:
        _check_version(self.schema_version)
        if self.status not in STATUSES:
            raise UserError(f"status: {self.status!r} is none of {', '.join(STATUSES)}")
        texts = ("run_id", "study", "started_at", "ended_at")
        mappings = (name for name, shape in record_shape.SHAPE.items() if isinstance(shape, dict))
        for kind, name in [*((str, n) for n in texts), *((dict, n) for n in mappings)]:
            if not isinstance(value := getattr(self, name), kind):
                what = "text" if kind is str else "mapping"
                raise UserError(f"{name}: {value!r} is not a {what}")

    @property
    def timing_is_void(self) -> bool:
        """Whether the allocator may have made the run's timing."""
        return timing_is_void(self.results, self.machine.get("gpu_memory_gib"))


def _check_version(version: object) -> None:
    if type(version) is int and version in READABLE_VERSIONS:
        return
    is_newer = type(version) is int and version > max(READABLE_VERSIONS)
    raise (NewerRecord if is_newer else UserError)(
        f"schema_version: {version!r} is none of {', '.join(map(str, READABLE_VERSIONS))}"
        + "; read it with the version of fp8study that wrote it" * is_newer
    )


def utc_now() -> str:
    """Return the time as records have it: ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def write_json(path: Path, content: Any) -> None:
    """Write `content` to `path`, the whole file or none.

    Non-finite floats become null: JSON has no NaN. Lists of numbers stay on one line.
    """
    text = json.dumps(finite(content), indent=1, allow_nan=False)
    text = _NUMBERS.sub(lambda found: " ".join(found.group().split()), text)
    write_whole(path, text + "\n")


def finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def write_record(record: RunRecord, run_dir: Path) -> None:
    """Write ``run.json`` atomically."""
    write_json(run_dir / "run.json", vars(record))


def read_run(run: Path) -> RunRecord:
    """Read a run by its folder, or by its record's path.

    Raises:
        UserError: It holds no record, or one that cannot be read, or that its metrics contradict.
    """
    path = run if run.suffix == ".json" else run / "run.json"
    if not path.is_file():
        raise UserError(
            f"run_dir: '{run}' holds no record; give the folder of a run that has ended, as "
            "results/local/<study>/<run_id>"
        )
    return read_whole(path, alone=True)[0]


def read_record(path: Path) -> RunRecord:
    """Read one ``run.json``.

    Raises:
        NewerRecord: Its ``schema_version`` is of a layout that came later.
        UserError: The file is not JSON, misses a field or holds a value of the wrong kind.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no mapping")
        version = content.setdefault("schema_version", 1)
        if isinstance(version, int):
            _check_version(version)  # before the fields, which another layout may lack
        fields = dataclasses.fields(RunRecord)
        required = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
        if missing := [name for name in required if name not in content]:
            raise ValueError(f"without {', '.join(missing)}")
        record = RunRecord(**{f.name: content[f.name] for f in fields if f.name in content})
        record_shape.check_content(vars(record))
        return record
    except NewerRecord as error:
        raise NewerRecord(f"{path}: {error}") from None
    except _UNREADABLE as error:
        raise UserError(
            f"{path}: not a run record ({one_line(error)}); move it away, and do that run again"
        ) from error


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read ``metrics.jsonl``: one dictionary per logged step, in order.

    Keys: step (from 1), loss (mean over ranks; null if not finite), learning_rate, gradient_norm
    (before clipping; null in most steps unless gradients are clipped), step_time_ms, tokens_seen
    (all ranks), tokens_per_second_per_gpu, timed (true inside the timed window). A half last line,
    as a killed run leaves it, is left out. Kept for good it may be ``metrics.jsonl.gz``.

    Raises:
        UserError: The file cannot be read, or a line holds something else.
    """
    path, packed = run_dir / "metrics.jsonl", run_dir / "metrics.jsonl.gz"
    try:
        path = path if path.exists() else packed
        if not path.exists():
            return []
        content = path.read_bytes()
        content = gzip.decompress(content) if path == packed else content
        lines = content.decode("utf-8").splitlines()
        try:  # at once: twice as fast as line by line
            rows = json.loads(f"[{','.join(lines)}]")
        except json.JSONDecodeError:
            rows = json.loads(f"[{','.join(lines[:-1])}]")
        if not all(type(row) is dict for row in rows):
            raise UserError("a line is no mapping")
        record_shape.check_columns(rows)
        return rows
    except _UNREADABLE as error:
        raise UserError(
            f"{path}: no metrics of a run ({one_line(error)}); move the run away, and do it again"
        ) from error


def read_whole(path: Path, alone: bool = False) -> tuple[RunRecord, list[dict[str, Any]]]:
    """Read a ``run.json`` and the metrics beside it; ``alone``: a record without any counts, too.

    Raises:
        UserError: As `read_record` and `read_metrics`, or the two contradict each other.
    """
    record, lines = read_record(path), read_metrics(path.parent)
    if lines or not alone:
        record_shape.check_whole(record, lines, path.parent)
    return record, lines


def last_logged_step(run_dir: Path) -> int:
    """Return how many steps a run has done as far as its metrics tell; 0 without any."""
    return max((row.get("step") or 0 for row in read_metrics(run_dir)), default=0)


@dataclass(frozen=True)
class StoredRun:
    """A record with the place it was read from."""

    record: RunRecord
    run_dir: Path
    machine_label: str
    """``local``, or the folder's name below ``results/reference``."""
    metrics: Mapping[str, list[Any]] = field(default_factory=dict)
    """The columns of `fp8study.core.record_shape.METRICS`, one value per logged step."""


def set_aside(path: Path, reason: str) -> Path:
    """Rename a file out of the pipeline's way, never over an earlier one, and say so."""
    for number in range(1, 1000):
        target = path.with_name(f"{path.stem}.{reason}{number}{path.suffix}")
        if not target.exists():
            path.rename(target)
            return target
    raise UserError(f"{path}: a thousand files set aside beside it already; remove some")


def load_runs(results_dir: Path) -> list[StoredRun]:
    """Read every record below `results_dir`, in a stable order.

    What is damaged, of another schema, a copy, closed to the reader or without a record is named
    in a warning and left out. Nothing is written or renamed.
    """
    found: list[StoredRun] = []
    seen: dict[tuple[str, ...], StoredRun] = {}
    left_out = []
    places = [(p.name, p) for p in sorted((results_dir / "reference").glob("*")) if p.is_dir()]
    for label, root in [*places, ("local", results_dir / "local")]:  # a copy there is not its own
        for folder in (root, *root.glob("*"), *root.glob("*/*")):
            # `glob` passes by in silence what it may not enter.
            if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
                left_out.append(f"{folder}: you may not read it; give yourself access")
        for folder in sorted({path.parent for path in root.glob("*/*/metrics.jsonl*")}):
            if not (folder / "run.json").exists() and not is_held(folder / ".lock"):
                left_out.append(f"{folder}: it ended without a record; run it again")
        here: list[tuple[bool, StoredRun]] = []
        for path in sorted(root.glob("*/*/run.json")):
            try:
                record, lines = read_whole(path)
            except UserError as error:
                left_out.append(str(error))
                continue
            placed = dataclasses.replace(record, study=path.parents[1].name)
            run = StoredRun(placed, path.parent, label, record_shape.as_columns(lines))
            here.append((placed.study != record.study, run))
        copies = set()
        for _, run in sorted(here, key=lambda one: one[0]):  # a copy's folder has another name
            keys = [(label, run.record.study, run.record.run_id), *record_shape.whence(run.record)]
            if first := next((seen[key] for key in keys if key in seen), None):
                left_out.append(f"{run.run_dir}: a copy of {first.run_dir}; remove one of them")
                copies.add(run.run_dir)
            else:
                seen |= dict.fromkeys(keys, run)
        found += [run for _, run in here if run.run_dir not in copies]
    for text in left_out:
        warnings.warn(f"left out: {text}", stacklevel=2)
    record_shape.complete_texts(run.record.data for run in found)
    return sorted(found, key=lambda run: run.machine_label != "local")
