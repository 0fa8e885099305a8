"""One run, described completely: as it was asked for, and as it is run.

`RunConfig` is what was asked: None where a field was left to the others, so that
`dataclasses.replace` means what it says. `RunConfig.resolved` decides every field; that is what
runs, what ``config.yaml`` and the record hold, and what names the run. Both are frozen and strict.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from fp8study.core.errors import UserError, nearest
from fp8study.core.field_types import read_mapping, read_value, refuse
from fp8study.core.fields import DEFAULTS, FIELDS, PLAIN_TODAY, TYPES, Fields
from fp8study.core.files import write_whole
from fp8study.core.path.switches import RETIRED, RETIRED_VALUES
from fp8study.core.recipes import ALIASES, RECIPES

FIELD_NAMES = tuple(FIELDS)

#: What is known here and cannot be had, with the reason; switched off, it is no error.
REFUSED = {
    "tensor_parallel_size": "FP8 with tensor parallelism is not supported: FP8 layers are "
    "sharded by FSDP2 alone; use strategy=fsdp2 with more num_gpus",
    "pipeline_parallel_size": "pipeline parallelism is not supported; use strategy=fsdp2",
} | {name: f"it was taken out: {field.meaning}; leave it out" for name, field in RETIRED.items()}


@dataclass(frozen=True)
class RunConfig(Fields):
    """What was asked of a run; `fp8study.core.fields` says what its fields are.

    Raises:
        UserError: A value has the wrong type or range, or two values exclude each other.
    """

    def __post_init__(self) -> None:
        for name in FIELDS:
            object.__setattr__(self, name, read_field(name, getattr(self, name)))
        self.resolved()  # refuses what cannot be

    def resolved(self, on_gpu: bool | None = None) -> ResolvedConfig:
        """Decide every field on which nothing was said.

        Where `on_gpu`, whether the machine has GPUs, is not known yet, ``fp8_emulate`` stays open;
        a run is named in that state, so that its name is the same everywhere. But for a model in a
        folder, of which the tuned path's ``skip`` follows from its config.json.
        """
        values = SimpleNamespace(**vars(self))
        for name, spec in FIELDS.items():
            if spec.decide is not None and getattr(values, name) is None:
                setattr(values, name, spec.decide(values))
        if on_gpu is not None and values.fp8_emulate is None:
            values.fp8_emulate = not on_gpu
        return ResolvedConfig(**vars(values))

    @property
    def is_fp8(self) -> bool:
        """Whether any linear layer computes in FP8."""
        return bool(RECIPES[self.precision].fp8_gemms)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Patterns of layers that stay out of FP8, as said or as the path decides."""
        return (self.resolved().skip if self.skip is None else self.skip) or ()

    @property
    def is_timed(self) -> bool:
        """Whether the steps' times say anything: all alike, and nothing else ran between them."""
        pauses = self.noise_at_steps or self.validation_points > 1
        return not (pauses or self.precision_schedule) and self.runs_per_gpu == 1

    @property
    def validation_steps(self) -> tuple[int, ...]:
        """Numbers of completed optimizer steps after which validation text is scored."""
        if not self.validation_sequences:
            return ()
        points = range(1, self.validation_points + 1)
        return tuple(round(self.num_steps * i / self.validation_points) for i in points)

    @property
    def frees_casts(self) -> bool:
        """Whether kept FP8 weights give their memory to the gradients of one backward pass."""
        after_one = self.gradient_accumulation_steps == 1
        return self.moves_weights and after_one and self.optimizer_step == "after_backward"

    @property
    def moves_weights(self) -> bool:
        """Whether kept weights may move between updates: a CUDA graph would not find them."""
        return self.compile_mode != "reduce-overhead" and self.step_launch != "as_graph"

    @property
    def gpus_per_node(self) -> int:
        return self.num_gpus // self.num_nodes

    @property
    def sequences_per_step(self) -> int:
        """Sequences in one optimizer step, over all GPUs: the effective batch."""
        return self.num_gpus * self.micro_batch_size * self.gradient_accumulation_steps

    @property
    def tokens_per_pass(self) -> int:
        """Tokens of one GPU in one forward and backward pass."""
        return self.micro_batch_size * self.sequence_length

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step, over all GPUs."""
        return self.sequences_per_step * self.sequence_length

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain YAML and JSON types."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}

    def digest(self) -> str:
        """Return eight hexadecimal digits that change with any field.

        Fields at their default are left out, so that a field that a later version adds does not
        rename the runs of an earlier one. So is ``strategy=fsdp2``, once the default on one GPU.
        """
        defaults = RunConfig(strategy="fsdp2").resolved().to_dict()
        values = self.resolved().to_dict()
        chosen = {k: v for k, v in values.items() if v != defaults[k]}
        text = json.dumps(chosen, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class ResolvedConfig(RunConfig):
    """A configuration in which every field is decided; made by `RunConfig.resolved`."""

    @property
    def num_shards(self) -> int:
        """GPUs over which each weight is split."""
        if self.strategy != "fsdp2":
            return 1
        return self.gpus_per_node if self.sharding == "hybrid" else self.num_gpus

    def resolved(self, on_gpu: bool | None = None) -> ResolvedConfig:
        if on_gpu is not None and self.fp8_emulate is None:
            return super().resolved(on_gpu)
        refuse(self, FIELDS.items())
        return self


_PLACES = ("model", "tokenizer", "init_from", "corpus")


def read_field(name: str, value: Any) -> Any:
    """Return an untyped value as a field has it, whatever the other fields are.

    Raises:
        UserError: The field cannot have it.
    """
    # A thousand records hold the same few values.
    is_scalar = value is None or isinstance(value, str | int | float)
    return (_read_once if is_scalar else _read)(name, value)


def _read(name: str, value: Any) -> Any:
    if name == "precision" and isinstance(value, str):
        value = ALIASES.get(value, value)
        if value.lower() in ALIASES:
            known = ", ".join([*ALIASES, *RECIPES])
            raise UserError(
                f"precision: '{value}' is not valid{nearest(value, ALIASES)}; choose one of {known}"
            )
    value = read_value(name, value, TYPES[name])
    if name == "precision_schedule":
        parts = (part.split(":") for part in value)
        value = tuple(":".join((ALIASES.get(p, p), *end)) for p, *end in parts)
    if name == "noise_at_steps":
        value = tuple(sorted(set(value)))
    FIELDS[name].check(name, value, DEFAULTS[name])
    if name in _PLACES and "/" in str(value):  # mine and mine/ are one folder, so one model
        *kind, place = str(value).rpartition("text:")
        here = "./" * place.startswith("./")  # tells a folder from an owner/name of the hub
        value = "".join([*kind, here, os.path.normpath(place)])
    return value


_read_once = lru_cache(maxsize=4096, typed=True)(_read)


def make_config(values: Mapping[str, Any], source: str = "parameters") -> RunConfig:
    """Build a `RunConfig` from untyped values, as a notebook, YAML or a command line gives them.

    Raises:
        UserError: An unknown name, or whatever `RunConfig` refuses; it names the `source`.
    """
    check_names(values, source)
    return RunConfig(**{name: value for name, value in values.items() if name not in REFUSED})


def check_names(values: Mapping[str, Any], source: str, also: Iterable[str] = ()) -> None:
    """Refuse names that are no field nor one of `also`, and what is known but cannot be had.

    Raises:
        UserError: With the `source`, and the nearest field or the reason.
    """
    for name, value in values.items():
        if name in REFUSED:
            off = [RETIRED[name].plain] if name in RETIRED else [False, 0, 1]
            if value is not None and (value is True or value not in off):
                raise UserError(f"{source}: {name}: {value!r}: {REFUSED[name]}")
        elif name not in (known := [*FIELDS, *also]):
            raise UserError(
                f"{source}: unknown parameter '{name}'{nearest(str(name), known)}; "
                "`fp8study fields` lists them"
            )


def completed(values: Mapping[str, Any], device: str | None = None) -> dict[str, Any]:
    """Return a recorded configuration with the fields that came after it, as they were then.

    Fields that are unknown here are kept; a configuration that would be refused today is returned
    as it is. Where the record's `device` (``cuda`` or ``cpu``) alone decided ``fp8_emulate``, that
    is None, as in older records: what was asked is the same on every machine.
    """
    known = {name: value for name, value in values.items() if name in FIELDS}
    if known.get("fp8_emulate") == {"cpu": True, "cuda": False}.get(device or ""):
        known["fp8_emulate"] = None
    # A switch that was not there yet was not set, whatever its path would choose today.
    retired = {name: field.plain for name, field in RETIRED.items() if name not in values}
    gone = {name: known[name] for name, to in RETIRED_VALUES.items() if known.get(name) in to}
    known |= {name: RETIRED_VALUES[name][value] for name, value in gone.items()}
    try:
        today = make_config(PLAIN_TODAY | known).resolved().to_dict()
        return {**values, **today, **retired, **gone}
    except UserError:
        return dict(values)


def set_by_hand(values: Mapping[str, Any], name: str) -> Any:
    """Return a field of a completed configuration if its path would not decide so, else None."""
    value, decide = values.get(name), FIELDS[name].decide
    try:
        return None if decide and decide(SimpleNamespace(**values)) == value else value
    except (AttributeError, KeyError):  # a configuration that is refused today
        return value


def load_config(path: Path) -> ResolvedConfig:
    """Read a configuration written by `save_config`.

    Raises:
        UserError: The file cannot be read or holds no valid configuration.
    """
    values = read_mapping(path, "configuration", "of field names to values")
    return make_config(values, source=str(path)).resolved()


def save_config(config: ResolvedConfig, path: Path) -> None:
    """Write the resolved configuration as YAML, the whole file or none, unless it is there."""
    text = yaml.safe_dump(config.to_dict(), sort_keys=False)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_whole(path, text)
