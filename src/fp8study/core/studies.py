"""Studies: a question, and the runs that would answer it.

A study is a YAML file in ``pipelines/studies``. Its runs are the cross product of ``arms``
(each an override of ``base``, with seeds of its own where it names some), ``factors`` (each a list
of values of one field) and ``seeds``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fp8study.core.config import ResolvedConfig, check_names, completed, make_config, save_config
from fp8study.core.errors import UserError, nearest
from fp8study.core.field_types import read_list, read_mapping, read_value, shown
from fp8study.core.files import own_results, studies_dir, write_whole, writing
from fp8study.core.presets import check_model_name
from fp8study.core.records import (
    LOSS_MARGIN_PCT,
    RESULTS,
    NewerRecord,
    RunRecord,
    read_whole,
    set_aside,
)

#: What a study's file may hold; a list's items are of the type in brackets.
_KEYS: dict[str, Any] = {
    "question": str, "claims": [str], "expectation": str, "margin_pct": float, "base": dict,
    "arms": [dict], "factors": dict, "seeds": [int], "minutes_per_run": float,
    "reference": dict, "speed_only": bool, "notes": [str], "session": dict,
}  # fmt: skip
#: What an arm may hold besides fields of a run.
_ARM_KEYS: dict[str, Any] = {"seeds": [int], "gpus": [int], "minutes": float, "why": str}
#: Where a run's steps may be.
_METRICS = ("metrics.jsonl", "metrics.jsonl.gz")
#: What is wrong with a record that is not its run's result, by the name it is set aside under.
WRONG = {"corrupt": "or its metrics are damaged", "other": "is not this run's"}
_EMPTY = "the list is empty; give values or remove it"


@dataclass(frozen=True)
class PlannedRun:
    run_id: str
    config: ResolvedConfig
    """As on any machine: whether FP8 is emulated is still open."""
    run_dir: Path
    minutes: float = 1.0
    """Rough length on the machine that its study was written for, start-up included."""
    gpus: tuple[int, ...] = ()
    """Places in the machine's list of GPUs of those that it has to have; empty: any."""
    why: str = ""
    """What it is there for, where its study says that of each run."""


@dataclass(frozen=True)
class Study:
    name: str
    question: str
    runs: tuple[PlannedRun, ...]
    margin_pct: float = LOSS_MARGIN_PCT
    """Largest loss difference that counts as none, % of the BF16 loss, stated before the runs."""
    expectation: str = ""
    """What its author expected, written before the runs; empty if nothing was written."""
    reference: Mapping[str, Any] = field(default_factory=dict)
    """Field → its value in the arms that the others are divided by; empty if nothing was said."""
    speed_only: bool = False
    """Whether its few steps are there to be timed, so that their losses are not judged."""
    claims: tuple[str, ...] = ()
    """Ids of the documents' claims that it speaks to; its plan checks that there are such."""
    notes: tuple[str, ...] = ()
    """What a reader of its plan must know besides, as what was left out and why."""
    content: Mapping[str, Any] | None = None
    """What its file is to hold, of a study that was made here instead of read."""
    on_gpu: bool = False
    """Whether GPUs are to do its runs: what a CPU did, with emulated FP8, is none of them then."""

    def pending(self) -> list[PlannedRun]:
        return [run for run in self.runs if self.missing(run)]

    def missing(self, run: PlannedRun) -> str | None:
        """Return None for a run with a result, else its status or what of `WRONG` it has."""
        path = run.run_dir / "run.json"
        if not path.exists():
            return "nothing"
        files = [path, *(run.run_dir / name for name in _METRICS)]
        stats = [file.stat() for file in files if file.exists()]
        written = tuple((s.st_ino, s.st_size, s.st_mtime_ns) for s in stats)
        try:
            record = _whole_record(run.run_dir, written)
        except NewerRecord:
            return None  # a result that we cannot read is still one
        except UserError:
            return "corrupt"
        device = record.machine.get("device")
        done, planned = (completed(c, device) for c in (record.config, run.config.to_dict()))
        if done != planned or (self.on_gpu and device == "cpu"):
            return "other"
        return None if record.status in RESULTS else record.status

    def make_room(self) -> None:
        """Set aside the records that hold no result, so that their runs can be repeated."""
        for run in self.runs:
            path, reason = run.run_dir / "run.json", self.missing(run)
            if reason is not None and path.exists():
                kept = set_aside(path, reason)
                if reason in WRONG:
                    print(f"{reason} record: '{path}' {WRONG[reason]}; set aside as {kept.name}")
                if reason == "corrupt":  # with what a new start would cut, or go on from
                    for part in (*_METRICS, "checkpoints"):
                        if (run.run_dir / part).exists():
                            set_aside(run.run_dir / part, reason)

    def put_aside_earlier_call(self, possible: Collection[PlannedRun]) -> None:
        """Move the study's folder away unless it holds the unfinished beginning of this very call.

        Of `possible`, the runs that will be done here, one is unfinished then.
        """
        folder = own_results() / self.name
        there = {path.parent.name for path in folder.glob("*/run.json")}
        is_unfinished = any(run in possible for run in self.pending())
        if there and not (is_unfinished and there <= {run.run_id for run in self.runs}):
            _put_aside(folder)

    def keep_content(self) -> None:
        """Write the file of a study that was made here, so that a later call goes on with it.

        What another session made, on other GPUs or with other fields set, is moved away.
        """
        if self.content is None:
            return
        path = chosen_path(self.name)
        if path.exists() and not continues(read_study(path), self.content):
            _put_aside(path.parent)
        with writing("results", path, "make the folder writable or free some space"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, yaml.safe_dump(dict(self.content), sort_keys=False))

    def write_configs(self) -> None:
        """Write each unfinished run's ``config.yaml``, which the pipeline hands to the notebook.

        Before any of them runs: a run writes its own, with what the machine decides.
        """
        for run in self.runs:
            path = run.run_dir / "config.yaml"
            if (run.run_dir / "run.json").exists():
                continue  # what a finished run was made of stays as it is
            with writing("results", path, "make the folder writable or free some space"):
                run.run_dir.mkdir(parents=True, exist_ok=True)
                save_config(run.config, path)


def _put_aside(folder: Path) -> None:
    earlier = own_results() / "earlier"  # one level down, where `load_runs` sees no study
    earlier.mkdir(exist_ok=True)
    paths = (earlier / f"{folder.name}-{number}" for number in itertools.count(1))
    target = next(path for path in paths if not path.exists())
    print(f"the earlier call is kept in {folder.rename(target)}")


def chosen_path(name: str) -> Path:
    """Return where the file of a study is that was made on this machine."""
    return own_results() / name / "study.yaml"


def continues(earlier: Mapping[str, Any], content: Mapping[str, Any]) -> bool:
    """Whether a study's content goes on with an earlier one: same GPUs, same fields set."""
    first, second = (each.get("session", {}) for each in (earlier, content))
    return all(first.get(name) == second.get(name) for name in ("gpus", "set"))


def study_names() -> list[str]:
    return sorted(path.stem for path in studies_dir().glob("*.yaml") if path.is_file())


def load_study(name: str, overrides: Mapping[str, Any] | None = None) -> Study:
    """Read a study and expand it into runs, with `overrides` over everything that the file says.

    Raises:
        UserError: There is no such study, or the file or a run in it is invalid.
    """
    path = _path_of(name)
    if Path(name).name != name or not path.is_file():  # a study is no path
        if not (names := study_names()):
            raise UserError(f"STUDY: there are none in '{studies_dir()}'; run in a checkout")
        close = nearest(Path(name).stem, names, 0.6)  # of a path to its file as well
        raise UserError(
            f"STUDY: '{name}' is no study{close}; choose a file of '{studies_dir()}', which "
            "`fp8study plan --list` lists"
        )
    if {*"{}"} & {*name}:  # Snakemake's wildcards
        raise UserError(f"STUDY: '{name}' cannot be run with braces in its name; rename '{path}'")
    check_names(overrides or {}, "--set")
    return expanded(name, read_study(path), str(path), overrides)


def expanded(
    name: str, content: Mapping[str, Any], source: str, overrides: Mapping[str, Any] | None = None
) -> Study:
    """Return the study that a file of this `content` describes; `source` is its name in errors.

    Raises:
        UserError: A run in it is invalid.
    """
    factors, minutes = content.get("factors", {}), content.get("minutes_per_run", 1.0)
    runs: dict[ResolvedConfig, PlannedRun] = {}
    for arm in content.get("arms") or [{}]:
        told = {"minutes": minutes} | {n: v for n, v in arm.items() if n in _ARM_KEYS}
        fields = {n: v for n, v in arm.items() if n not in _ARM_KEYS}
        told["gpus"] = tuple(told.get("gpus", ()))
        seeds = told.pop("seeds", None) or content.get("seeds") or [0]
        for combination, seed in itertools.product(itertools.product(*factors.values()), seeds):
            own = fields | dict(zip(factors, combination, strict=True)) | {"seed": seed}
            config = _config(content.get("base", {}) | own, source, overrides or {})
            if config in runs and not overrides and not content.get("session"):
                words = ", ".join(f"{field}={shown(value)}" for field, value in own.items())
                raise UserError(
                    f"{source}: '{words}' is planned already, as {runs[config].run_id}; drop it"
                )
            # An override of a factor makes its combinations equal: each is run once.
            runs.setdefault(config, _planned(config, name, told))
    return Study(
        name=name,
        runs=tuple(runs.values()),
        reference=content.get("reference", {}),
        claims=tuple(content.get("claims", ())),
        notes=tuple(content.get("notes", ())),
        **_judgement(content),
    )


def _config(values: Mapping[str, Any], source: str, overrides: Mapping[str, Any]) -> ResolvedConfig:
    """Return a run's configuration; an error names the file if it is there without overrides."""
    check_names(values, source)
    try:
        config = make_config({**values, **overrides}).resolved()
        if "/" not in config.model:  # a folder may be elsewhere when studies are listed
            check_model_name(config.model)
        return config
    except UserError as error:
        if not overrides:
            raise UserError(f"{source}: {error}") from None
        _config(values, source, {})
        raise


def judgement_of(study: str) -> dict[str, Any]:
    """Return how a study's runs are to be judged, for their records; empty without a file.

    Raises:
        UserError: The file is invalid.
    """
    path = _path_of(study)
    return _judgement(read_study(path)) if path.is_file() else {}


def _path_of(name: str) -> Path:
    """Return a study's file: one that was written, else one that was made on this machine."""
    written = studies_dir() / f"{name}.yaml"
    return written if written.is_file() else chosen_path(name)


def _judgement(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "margin_pct": content.get("margin_pct", LOSS_MARGIN_PCT),
        "speed_only": content.get("speed_only", False),
        "expectation": content.get("expectation", "").strip(),
        "question": content["question"].strip(),
    }


def read_study(path: Path) -> dict[str, Any]:
    """Read a study's file: every value of its type, and no key that says nothing.

    Raises:
        UserError: It cannot be read, or something in it is invalid.
    """
    content = read_mapping(path, "study", f"with {', '.join(_KEYS)}")
    for key in content:
        if key not in _KEYS:
            raise UserError(
                f"{path}: unknown key '{key}'{nearest(str(key), _KEYS)}; known: {', '.join(_KEYS)}"
            )
    if content.get("question") is None or not str(content["question"]).strip():
        raise UserError(f"{path}: question: missing; say what the runs are to decide")
    _read_values(str(path), content, _KEYS)
    margin = content.get("margin_pct", LOSS_MARGIN_PCT)
    if not 0 < margin < 100:
        raise UserError(
            f"{path}: margin_pct: {margin:g} is outside (0, 100); give % of the BF16 loss, "
            f"{LOSS_MARGIN_PCT} by default"
        )
    _config(content.get("reference", {}), f"{path}: reference", {})
    factors, arms = content.get("factors", {}), content.get("arms", ())
    for name, values in factors.items():
        if not read_list(f"{path}: factors: {name}", values):
            raise UserError(f"{path}: factors: {name}: {_EMPTY}")
    for arm in arms:
        check_names(arm, f"{path}: arms", also=_ARM_KEYS)
        if both := {*arm} & {*factors}:
            raise UserError(f"{path}: arms: {min(both)} is in factors, too; leave it out of one")
        _read_values(f"{path}: arms", arm, _ARM_KEYS)
    if any("seed" in part for part in (content.get("base", {}), factors, *arms)):
        raise UserError(f"{path}: seed: it would be overwritten; use the list 'seeds'")
    return content


def _read_values(source: str, content: dict[str, Any], kinds: Mapping[str, Any]) -> None:
    """Make each value of its kind in place; a key on which nothing is said goes."""
    for key, kind in kinds.items():
        if content.get(key) is None:
            content.pop(key, None)
        elif isinstance(kind, list):
            content[key] = read_list(f"{source}: {key}", content[key], *kind)
        else:
            content[key] = read_value(f"{source}: {key}", content[key], kind)
        if key in ("arms", "seeds") and content.get(key) == ():
            raise UserError(f"{source}: {key}: {_EMPTY}")
        if key in ("minutes_per_run", "minutes") and not 0 < content.get(key, 1) < 1e6:
            raise UserError(f"{source}: {key}: {content[key]:g} is no time; give minutes, as 2")


def _planned(config: ResolvedConfig, study: str, told: Mapping[str, Any]) -> PlannedRun:
    model = config.model.rstrip("/").split("/")[-1].replace("{", "").replace("}", "")  # wildcards
    run_id = f"{model}-{config.precision}-{config.num_gpus}gpu-s{config.seed}-{config.digest()}"
    return PlannedRun(run_id, config, own_results() / study / run_id, **told)


@functools.cache
def _whole_record(run_dir: Path, _written: tuple[tuple[int, ...], ...]) -> RunRecord:
    """Read a record and check its metrics, once for each time that they were written."""
    return read_whole(run_dir / "run.json")[0]


def estimated_minutes(runs: list[PlannedRun], num_slots: int) -> float:
    """Return a rough wall-clock time of the given runs on `num_slots` GPUs, or CPU cores."""
    shared = sum(r.minutes * r.config.num_gpus / r.config.runs_per_gpu for r in runs) / num_slots
    queues = (
        sum(run.minutes / run.config.runs_per_gpu for run in runs if gpu in run.gpus)
        for gpu in {gpu for run in runs for gpu in run.gpus}
    )
    return max(shared, *queues, *(run.minutes for run in runs), 0.0)
