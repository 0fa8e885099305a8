"""Whether this machine is fit for a study, and what to do where it is not."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from fp8study.core.errors import UserError
from fp8study.core.files import cache_dir, check_writable, own_results
from fp8study.core.hardware import FP8_CAPABILITY, find_peak
from fp8study.core.presets import is_reachable
from fp8study.run.gpu_lease import UNNOTICED_GIB, memory_in_use
from fp8study.run.machine import Machine, driver_version, gpu_link, memory_gib, unsupported_gpu

#: Held against pyproject.toml by a test.
SUPPORTED = ("torch>=2.11,<2.14", "torchao>=0.17", "accelerate>=1.13", "transformers>=5,<6")
SUPPORTED_PYTHON = ("3.11", "3.14")

#: A study of the committed size; no checkpoints are written.
_LEAST_DISK_GIB = 2.0
_LEAST_MEMORY_GIB = 6.0

OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclass(frozen=True)
class Finding:
    name: str
    state: str
    """``ok``, ``warning`` (something will be slower or missing) or ``problem`` (runs fail)."""
    found: str
    remedy: str = ""


def examine(machine: Machine) -> list[Finding]:
    """Look at everything that a study needs, in the order in which one would mend it."""
    return [
        _python(),
        *(_package(text) for text in SUPPORTED),
        _cuda(machine),
        *_gpus(machine),
        _links(machine),
        _disk("disk", own_results(), "results go there"),
        _disk("cache", cache_dir(), "tokens go there; or set FP8STUDY_CACHE to another folder"),
        _memory(),
        _quarto(),
        _hub(),
    ]


def _python() -> Finding:
    version, (oldest, too_new) = Version(platform.python_version()), SUPPORTED_PYTHON
    fits = Version(oldest) <= version < Version(too_new)
    remedy = "" if fits else f"use {oldest} or newer, below {too_new}"
    return Finding("python", OK if fits else PROBLEM, str(version), remedy)


def _package(text: str) -> Finding:
    requirement = Requirement(text)
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(requirement.name, PROBLEM, "not installed", "make setup")
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding(requirement.name, PROBLEM, version, f"needs {text}; make setup VENV=1")
    return Finding(requirement.name, OK, version)


def _cuda(machine: Machine) -> Finding:
    """Ask torch in a process of its own: it is heavy, and a broken CUDA may crash it."""
    code = (
        "import torch, json; print(json.dumps([torch.version.cuda, torch.cuda.is_available(), "
        "torch.cuda.device_count()]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding("cuda", PROBLEM, f"torch does not start: {last}", "make setup VENV=1")
    built_for, available, count = json.loads(done.stdout.strip().splitlines()[-1])
    if not machine.gpus:
        return Finding("cuda", OK, "no GPU visible: runs are emulated on the CPU")
    state, found, remedy = OK, f"torch built for CUDA {built_for}, driver {driver_version()}", ""
    if not available:
        state, found = PROBLEM, f"{found}, but torch sees no GPU"
        remedy = "install a torch built for this driver's CUDA, or update the driver"
    elif count != len(machine.gpus):
        state, found = WARNING, f"{found}; torch sees {count} GPUs"
        remedy = "check CUDA_VISIBLE_DEVICES"
    return Finding("cuda", state, found, remedy)


def _gpus(machine: Machine) -> list[Finding]:
    if not machine.gpus and (note := unsupported_gpu()):
        return [Finding("gpu", WARNING, note, "run where there is an NVIDIA GPU")]
    if not machine.gpus:
        remedy = "none needed; timings of emulated FP8 mean nothing"
        return [Finding("gpu", WARNING, f"none; {machine.num_cpus} CPU cores", remedy)]
    findings = []
    for gpu in machine.gpus:
        name, state, note, remedy = f"gpu {gpu.index}", WARNING, "every FP8 recipe", ""
        if gpu.compute_capability < FP8_CAPABILITY:
            note = "no FP8 tensor cores"
            remedy = "use precision=bf16, or fp8_emulate=true for the numbers without the speed"
        elif find_peak(gpu.name) is None:
            note = "peak unknown"
            remedy = (
                "add its dense peaks to src/fp8study/core/hardware.py; no MFU is shown until then"
            )
        elif (in_use := memory_in_use(gpu.index)) > UNNOTICED_GIB:
            note += f"; processes hold {in_use:.0f} GiB of its memory"
            remedy = "nvidia-smi names them; timings beside one that computes are of both"
        else:
            state = OK
        found = f"{gpu.name}, compute capability {gpu.capability}: {note}"
        findings.append(Finding(name, state, found, remedy))
    return findings


def _links(machine: Machine) -> Finding:
    if len(machine.gpus) < 2:
        return Finding("gpu links", OK, "nothing to link")
    link = gpu_link()
    if link is None:
        return Finding("gpu links", WARNING, "nvidia-smi does not say", "nvidia-smi topo -m")
    if re.match(r"NV\d+", link):
        return Finding("gpu links", OK, f"NVLink ({link})")
    remedy = "expect multi-GPU runs to be slower than published NVLink figures"
    return Finding("gpu links", WARNING, f"PCIe ({link})", remedy)


def _disk(name: str, folder: Path, what_for: str) -> Finding:
    place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free / 2**30
    remedy = "" if free >= _LEAST_DISK_GIB else f"free at least {_LEAST_DISK_GIB:.0f} GiB"
    try:
        check_writable(folder, name)
    except UserError:
        remedy = f"make {folder} writable: {what_for}"
    return Finding(name, PROBLEM if remedy else OK, f"{free:.1f} GiB free at {place}", remedy)


def _memory() -> Finding:
    total = memory_gib()
    enough = total >= _LEAST_MEMORY_GIB
    remedy = "" if enough else f"{_LEAST_MEMORY_GIB:.0f} GiB are the least for two processes"
    return Finding("memory", OK if enough else WARNING, f"{total:.1f} GiB", remedy)


def _quarto() -> Finding:
    path = shutil.which("quarto")
    found = "not installed: our own renderer makes the report"
    if path is not None:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        found = done.stdout.strip() or "found, but does not tell its version"
    return Finding("quarto", OK, found)


def _hub() -> Finding:
    if is_reachable():
        return Finding("data hub", OK, "reachable")
    remedy = "use corpus=synthetic or corpus=text:PATH with tokenizer=bpe, or a filled cache"
    return Finding("data hub", WARNING, "not reachable", remedy)


def report_text(findings: list[Finding]) -> str:
    """Return the findings for reading, one line each, its remedy on the next."""
    lines = []
    for f in findings:
        lines.append(f"  {f.state:<9}{f.name:<14}{f.found}")
        lines += [f"{'':25}→ {f.remedy}"] if f.remedy else []
    return "\n".join(lines)
