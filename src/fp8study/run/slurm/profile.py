"""What a cluster's nodes have, and what a run asks of them: a Snakemake profile, read by us too."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import shutil
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8study.core.errors import UserError, nearest
from fp8study.core.field_types import read_mapping, read_value
from fp8study.core.files import project_root
from fp8study.core.hardware import FP8_CAPABILITY, named_gpu
from fp8study.core.studies import PlannedRun, Study
from fp8study.run.chosen.estimates import host_gib
from fp8study.run.chosen.study import study_here
from fp8study.run.defaults import MACHINE_STUDY
from fp8study.run.machine import Gpu, Machine, this_machine

#: Minutes until a job trains: its environment, read from a slow file system, and its notebook.
_START_MINUTES = 5


@dataclass(frozen=True)
class Profile:
    """The part ``config`` of a profile, and its folder."""

    folder: Path
    gpu: str | None
    gpus_per_node: int
    cpus_per_node: int
    memory_gib_per_node: float
    max_nodes: int = 1
    gres: str = "gpu"
    gpu_memory_gib: float | None = None
    """Of one GPU; None: as its datasheet says."""
    time_factor: float = 2.0

    @property
    def machine(self) -> Machine:
        """A node of the cluster, as if it were the machine at hand."""
        more = f"raise max_nodes in {self.folder / 'config.yaml'}"
        if self.gpu is None:
            return Machine((), self.cpus_per_node, self.max_nodes, more)
        peak = named_gpu(self.gpu)
        memory = self.gpu_memory_gib or peak.memory_gib
        capability = FP8_CAPABILITY if peak.fp8_tflops else (8, 0)
        gpu = Gpu(0, "", f"NVIDIA {peak.name_part}", memory, capability, None, None, None)
        gpus = (dataclasses.replace(gpu, index=index) for index in range(self.gpus_per_node))
        return Machine(tuple(gpus), self.cpus_per_node, self.max_nodes, more)

    def resources(self, run: PlannedRun) -> dict[str, Any]:
        """Return what a run's job asks for, by Snakemake's names; cores and MiB are of a node."""
        config, per_node = run.config, run.config.gpus_per_node
        cores = self.cpus_per_node * per_node // self.gpus_per_node if self.gpu else per_node
        memory = host_gib(config, on_gpu=self.gpu is not None)
        asked = {
            "nodes": config.num_nodes,
            "tasks": config.num_nodes,
            "tasks_per_gpu": 0,  # else each GPU's task would start the whole run
            "cpus_per_task": max(1, cores),
            "mem_mb": math.ceil(1024 * min(memory, self.memory_gib_per_node)),
            "runtime": math.ceil(_START_MINUTES + self.time_factor * run.minutes),
        }
        return asked | ({"gres": f"{self.gres}:{per_node}"} if self.gpu else {})

    def summary(self, pending: Sequence[PlannedRun]) -> str:
        """Return the jobs that runs make: their number, nodes, GPU-hours and longest time limit."""
        what = f"{self.gpus_per_node} × {self.gpu}" if self.gpu else f"{self.cpus_per_node} cores"
        limits = [self.resources(run)["runtime"] for run in pending]
        hours = [run.minutes * run.config.num_gpus / 60 for run in pending]
        at_most = [n * run.config.num_gpus / 60 for n, run in zip(limits, pending, strict=True)]
        nodes = max((run.config.num_nodes for run in pending), default=0)
        unit = "GPU-hours" if self.gpu else "core-hours"
        return (
            f"{len(pending)} SLURM jobs on nodes of {what}, up to {nodes} nodes a job: "
            f"{sum(hours):.1f} {unit} expected, {sum(at_most):.1f} at the time limits (up to "
            f"{max(limits, default=0)} min)."
        )


def read_profile(name: str) -> Profile:
    """Read a profile: a folder of ``pipelines/profiles``, or any folder, with its config.yaml.

    Raises:
        UserError: It is not there, holds what is invalid, or needs what is not installed.
    """
    ours = project_root() / "pipelines" / "profiles"
    folder = Path(name).expanduser()
    folder = folder if "/" in name else ours / name
    if not (folder / "config.yaml").is_file():
        names = sorted(path.parent.name for path in ours.glob("*/config.yaml"))
        raise UserError(
            f"PROFILE: there is no '{folder}/config.yaml'{nearest(name, names)}; name one of "
            f"{', '.join(names)}, or a folder, as ./my-cluster"
        )
    path = folder / "config.yaml"
    content = read_mapping(path, "profile", "of Snakemake's options to values")
    if content.get("executor") != "slurm":
        raise UserError(
            f"{path}: executor: '{content.get('executor')}' is not supported; use slurm"
        )
    profile = _read(folder, path, content.get("config") or {})
    if importlib.util.find_spec("snakemake_executor_plugin_slurm") is None:
        raise UserError(
            "PROFILE: Snakemake's plug-in for SLURM is not installed; pip install "
            "'snakemake-executor-plugin-slurm>=2.8'"
        )
    return profile


def study_there(
    profile: str | None, name: str | None, values: dict[str, Any], budget: float | None
) -> tuple[Study, dict[str, Any], Machine, Profile | None]:
    """Return what `study_here` does, and the machine: the one at hand, or a cluster's node.

    From here on we are in the checkout's folder, as its runs will be: what a study names by a
    relative path is found there.

    Raises:
        UserError: As `study_here` and `read_profile`, or no study is named for a profile.
    """
    if profile is None:
        machine, cluster = this_machine(), None
    elif name in (None, MACHINE_STUDY):
        raise UserError(
            "STUDY: 'machine' is chosen for the GPUs at hand, which a cluster's are not; name a "
            "study beside PROFILE, as STUDY=quick"
        )
    else:
        cluster = read_profile(profile)
        machine = cluster.machine
    os.chdir(project_root())
    study, chosen = study_here(machine, name, values, budget)
    return dataclasses.replace(study, on_gpu=bool(machine.gpus)), chosen, machine, cluster


def check_slurm() -> None:
    """Refuse to submit from where SLURM's commands are not.

    Raises:
        UserError: One is missing.
    """
    for command in ("sbatch", "squeue", "scancel", "srun"):
        if shutil.which(command) is None:
            raise UserError(
                f"PROFILE: there is no '{command}' here; start on a login node of SLURM"
            )


def _read(folder: Path, path: Path, told: dict[str, Any]) -> Profile:
    kinds = typing.get_type_hints(Profile)
    del kinds["folder"]
    for key in told:
        if key not in kinds:
            raise UserError(f"{path}: config: unknown key '{key}'{nearest(str(key), kinds)}")
    values = {key: read_value(f"{path}: config: {key}", v, kinds[key]) for key, v in told.items()}
    required = [f.name for f in dataclasses.fields(Profile) if f.default is dataclasses.MISSING]
    for key in required[1:]:
        if key not in values:
            raise UserError(f"{path}: config: {key}: missing; say what a node has")
    for key, value in values.items():
        if isinstance(value, int | float) and value <= 0 and key != "gpus_per_node":
            raise UserError(f"{path}: config: {key}: {value:g} is none; give a number above 0")
    values["gpu"] = None if values["gpu"] == "none" else values["gpu"]
    if (values["gpu"] is None) != (values["gpus_per_node"] < 1):
        raise UserError(
            f"{path}: config: gpus_per_node: {values['gpus_per_node']} does not go with gpu: "
            f"{values['gpu'] or 'none'}; name the GPU, or say gpu: none and gpus_per_node: 0"
        )
    if values["gpu"]:
        try:
            known = named_gpu(values["gpu"])
        except UserError as error:
            raise UserError(f"{path}: config: {str(error).removeprefix('--')}") from None
        if not (known.memory_gb or values.get("gpu_memory_gib")):
            raise UserError(
                f"{path}: config: gpu: '{values['gpu']}' is sold with several sizes of memory; add "
                "gpu_memory_gib"
            )
    return Profile(folder, **values)
