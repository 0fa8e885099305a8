"""Studies: a question, and the runs that would answer it.

A study is a YAML file in ``pipelines/studies``. Its runs are the cross product of ``arms``
(each an override of ``base``, with seeds of its own where it names some), ``factors`` (each a list
of values of one field) and ``seeds``.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8study.core.config import ResolvedConfig, check_names, completed, make_config, save_config
from fp8study.core.errors import UserError, nearest
from fp8study.core.field_types import read_mapping, read_value
from fp8study.core.files import results_dir, studies_dir, writing
from fp8study.core.records import LOSS_MARGIN_PCT, RESULTS, NewerRecord, read_record, set_aside

#: What a study's file may hold; a list's items are of the type in brackets.
_KEYS: dict[str, Any] = {
    "question": str, "claims": [str], "expectation": str, "margin_pct": float, "base": dict,
    "arms": [dict], "factors": dict, "seeds": [int], "minutes_per_run": float,
    "reference": dict, "speed_only": bool,
}  # fmt: skip


@dataclass(frozen=True)
class PlannedRun:
    run_id: str
    config: ResolvedConfig
    """As on any machine: whether FP8 is emulated is still open."""
    run_dir: Path


@dataclass(frozen=True)
class Study:
    name: str
    question: str
    claims: tuple[str, ...]
    """Claims of the source documents that it speaks to."""
    runs: tuple[PlannedRun, ...]
    minutes_per_run: float
    """Rough length of one run on the machine it was written for, start-up included."""
    margin_pct: float = LOSS_MARGIN_PCT
    """Largest loss difference that counts as none, % of the BF16 loss, stated before the runs."""
    expectation: str = ""
    """What its author expected, written before the runs; empty if nothing was written."""
    reference: Mapping[str, Any] = field(default_factory=dict)
    """Field → its value in the arms that the others are divided by; empty if nothing was said."""
    speed_only: bool = False
    """Whether its few steps are there to be timed, so that their losses are not judged."""

    def pending(self) -> list[PlannedRun]:
        return [run for run in self.runs if _what_is_missing(run) is not None]

    def make_room(self) -> None:
        """Set aside the records that hold no result, so that their runs can be repeated."""
        for run in self.runs:
            path, reason = run.run_dir / "run.json", _what_is_missing(run)
            if reason is not None and path.exists():
                kept = set_aside(path, reason)
                if reason in ("corrupt", "other"):
                    print(f"{reason} record: '{path}' is not this run's; set aside as {kept.name}")

    def put_aside_earlier_call(self, possible: Collection[PlannedRun]) -> None:
        """Move the study's folder away unless it holds the unfinished beginning of this very call.

        Of `possible`, the runs that will be done here, one is unfinished then.
        """
        folder = results_dir() / "local" / self.name
        there = {path.parent.name for path in folder.glob("*/run.json")}
        is_unfinished = any(run in possible for run in self.pending())
        if not there or (is_unfinished and there <= {run.run_id for run in self.runs}):
            return
        # One level further down, so that it is no study of its own to `load_runs`.
        earlier = results_dir() / "local" / "earlier"
        earlier.mkdir(exist_ok=True)
        paths = (earlier / f"{self.name}-{number}" for number in itertools.count(1))
        target = next(path for path in paths if not path.exists())
        folder.rename(target)
        print(f"the earlier call is kept in {target}")

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


def study_names() -> list[str]:
    return sorted(path.stem for path in studies_dir().glob("*.yaml"))


def load_study(name: str, overrides: Mapping[str, Any] | None = None) -> Study:
    """Read a study and expand it into runs, with `overrides` over everything that the file says.

    Raises:
        UserError: There is no such study, or the file or a run in it is invalid.
    """
    path = studies_dir() / f"{name}.yaml"
    if not path.is_file():
        names = study_names()
        if not names:
            raise UserError(f"STUDY: there are none in '{path.parent}'; run in a checkout")
        raise UserError(
            f"STUDY: '{name}' is no study{nearest(name, names)}; choose one of {', '.join(names)}"
        )
    check_names(overrides or {}, "--set")
    content = _read(path)
    factors = content.get("factors", {})
    asked = (
        content.get("base", {})
        | {name: value for name, value in arm.items() if name != "seeds"}
        | dict(zip(factors, combination, strict=True))
        | {"seed": seed}
        | dict(overrides or {})
        for arm in content.get("arms") or [{}]
        for combination in itertools.product(*factors.values())
        for seed in arm.get("seeds") or content.get("seeds") or [0]
    )
    # An override of a factor makes its combinations equal: each is run once.
    configs = dict.fromkeys(make_config(values, str(path)).resolved() for values in asked)
    return Study(
        name=name,
        claims=content.get("claims", ()),
        runs=tuple(_planned(config, name) for config in configs),
        minutes_per_run=content.get("minutes_per_run", 1.0),
        reference=content.get("reference", {}),
        **_judgement(content),
    )


def judgement_of(study: str) -> dict[str, Any]:
    """Return how a study's runs are to be judged, for their records; empty without a file.

    Raises:
        UserError: The file is invalid.
    """
    path = studies_dir() / f"{study}.yaml"
    return _judgement(_read(path)) if path.is_file() else {}


def _judgement(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "margin_pct": content.get("margin_pct", LOSS_MARGIN_PCT),
        "speed_only": content.get("speed_only", False),
        "expectation": content.get("expectation", "").strip(),
        "question": content["question"].strip(),
    }


def _read(path: Path) -> dict[str, Any]:
    """Read a study's file: every value of its type, and no key that says nothing."""
    content = read_mapping(path, "study", f"with {', '.join(_KEYS)}")
    for key in content:
        if key not in _KEYS:
            raise UserError(
                f"{path}: unknown key '{key}'{nearest(str(key), _KEYS)}; known: {', '.join(_KEYS)}"
            )
    if not content.get("question"):
        raise UserError(f"{path}: question: missing; say what the runs are to decide")
    for key, kind in _KEYS.items():
        if content.get(key) is None:
            content.pop(key, None)
        elif isinstance(kind, list):
            content[key] = _read_list(f"{path}: {key}", content[key], *kind)
        else:
            content[key] = read_value(f"{path}: {key}", content[key], kind)
    margin = content.get("margin_pct", LOSS_MARGIN_PCT)
    if not 0 < margin < 100:
        raise UserError(
            f"{path}: margin_pct: {margin:g} is outside (0, 100); give % of the BF16 loss, "
            f"{LOSS_MARGIN_PCT} by default"
        )
    make_config(content.get("reference", {}), source=f"{path}: reference")
    factors, arms = content.get("factors", {}), content.get("arms", ())
    for name, values in factors.items():
        if not _read_list(f"{path}: factors: {name}", values):
            raise UserError(f"{path}: factors: {name}: the list is empty; give values or remove it")
    for arm in arms:
        _read_list(f"{path}: arms: seeds", arm.get("seeds", []), int)
    if any("seed" in part for part in (content.get("base", {}), factors, *arms)):
        raise UserError(f"{path}: seed: it would be overwritten; use the list 'seeds'")
    return content


def _read_list(name: str, value: Any, kind: Any = None) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise UserError(f"{name}: {value!r} is not a list; put it in brackets")
    return tuple(read_value(name, part, kind) if kind else part for part in value)


def _planned(config: ResolvedConfig, study: str) -> PlannedRun:
    model = config.model.rstrip("/").split("/")[-1]
    run_id = f"{model}-{config.precision}-{config.num_gpus}gpu-s{config.seed}-{config.digest()}"
    return PlannedRun(run_id, config, results_dir() / "local" / study / run_id)


def _what_is_missing(run: PlannedRun) -> str | None:
    """Return None for a run with a result, else what there is instead of one."""
    path = run.run_dir / "run.json"
    if not path.exists():
        return "nothing"
    try:
        record = read_record(path)
    except NewerRecord:
        return None  # a result that we cannot read is still one
    except UserError:
        return "corrupt"
    device = record.machine.get("device")
    if completed(record.config, device) != completed(run.config.to_dict(), device):
        return "other"
    return None if record.status in RESULTS else record.status


def estimated_minutes(study: Study, runs: list[PlannedRun], num_slots: int) -> float:
    """Return a rough wall-clock time of the given runs on `num_slots` GPUs, or CPU cores."""
    gpus = sum(run.config.num_gpus / run.config.runs_per_gpu for run in runs)
    return max(gpus * study.minutes_per_run / num_slots, study.minutes_per_run if runs else 0.0)
