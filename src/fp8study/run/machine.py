"""Where a run happens: GPUs, versions, machine and commit; of the environment's variables nothing.

GPUs are described by the driver's management library, without importing torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8study import __version__
from fp8study.core.config import RunConfig
from fp8study.core.errors import UserError
from fp8study.core.hardware import FP8_CAPABILITY

_PACKAGES = (
    "torch", "torchao", "accelerate", "transformers", "datasets", "tokenizers",
    "triton", "numpy", "papermill", "snakemake", "flash-attn-4",
)  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    index: int
    """Its number on the machine, as CUDA_VISIBLE_DEVICES takes it."""
    uuid: str
    name: str
    memory_gib: float | None
    """None where it shares the machine's memory."""
    compute_capability: tuple[int, int]
    power_limit_watts: float | None
    clock_sm_max_mhz: int | None
    clock_memory_max_mhz: int | None

    @property
    def capability(self) -> str:
        return ".".join(map(str, self.compute_capability))


@dataclass(frozen=True)
class Machine:
    """What this machine can run on."""

    gpus: tuple[Gpu, ...]
    num_cpus: int
    num_nodes: int = 1
    """Machines like it that a run may be spread over."""
    how_more: str = field(default="give it to a cluster with PROFILE=slurm", compare=False)

    @property
    def device(self) -> str:
        """``cuda`` or ``cpu``."""
        return "cuda" if self.gpus else "cpu"

    @property
    def has_fp8(self) -> bool:
        """Whether every GPU has FP8 tensor cores."""
        capabilities = [gpu.compute_capability for gpu in self.gpus]
        return bool(capabilities) and min(capabilities) >= FP8_CAPABILITY

    @property
    def num_slots(self) -> int:
        """Places among which runs are shared out: GPUs, or CPU cores."""
        return len(self.gpus) or self.num_cpus

    @property
    def gpus_in_words(self) -> str:
        """As ``2 × NVIDIA H200``; empty without any."""
        names = Counter(gpu.name for gpu in self.gpus)
        return " and ".join(f"{number} × {name}" for name, number in names.items())

    def check(self, config: RunConfig) -> None:
        """Refuse a run that this machine cannot do.

        Raises:
            UserError: Too few GPUs, FP8 on a GPU that has none, or not emulated on a CPU; or
                `attention` of GPUs of other generations.
        """
        if not self.gpus and config.is_fp8 and config.fp8_emulate is False:
            raise UserError(
                "fp8_emulate: false is for GPUs; on a CPU FP8 is always emulated: leave it out"
            )
        if config.num_nodes > self.num_nodes:
            raise UserError(
                f"num_nodes: {config.num_nodes} is more than the {self.num_nodes} at hand; lower "
                f"it, or {self.how_more} (docs/clusters.md)"
            )
        if config.gpus_per_node > self.num_slots:
            there = (
                f"{len(self.gpus)} visible GPUs; lower it or widen CUDA_VISIBLE_DEVICES"
                if self.gpus
                else f"{self.num_cpus} CPU cores that stand in for GPUs on this machine; lower it"
            )
            spread = f" on {config.num_nodes} nodes" * (config.num_nodes > 1)
            raise UserError(f"num_gpus: {config.num_gpus}{spread} is more than the {there}")
        if self.gpus and config.is_fp8 and not config.fp8_emulate and not self.has_fp8:
            weakest = min(self.gpus, key=lambda gpu: gpu.compute_capability)
            raise UserError(
                f"precision: '{config.precision}' needs compute capability 8.9 (Ada, Hopper) or "
                f"newer, but {weakest.name} has {weakest.capability}; use precision=bf16, or "
                "fp8_emulate=true to study the numbers without the speed"
            )
        if config.attention == "flash4":
            for gpu in self.gpus:
                if gpu.compute_capability[0] not in (9, 10):
                    raise UserError(
                        "attention: 'flash4' is for compute capability 9 (Hopper) and 10 (the "
                        f"Blackwell of data centres), but {gpu.name} has {gpu.capability}; use "
                        "cudnn"
                    )


def this_machine() -> Machine:
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    num_cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    # The first is set by our own jobs, in whose steps the other is the step's.
    names = ("FP8STUDY_NODES", "SLURM_JOB_NUM_NODES")
    num_nodes = next((int(os.environ[name]) for name in names if name in os.environ), 1)
    return Machine(tuple(visible_gpus()), num_cpus, num_nodes)


def visible_gpus() -> list[Gpu]:
    """Return the NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves visible."""
    with driver() as nvml:  # without one: a machine without GPU
        gpus = [_describe(nvml, i) for i in range(nvml.nvmlDeviceGetCount())] if nvml else []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return gpus
    visible: list[Gpu] = []
    for key in map(str.strip, chosen.split(",")):
        by_uuid = key.startswith("GPU-")
        matches = [g for g in gpus if key == str(g.index) or (by_uuid and g.uuid.startswith(key))]
        if len(matches) != 1 or matches[0] in visible:
            break  # as CUDA does, hide this one and all that follow
        visible += matches
    return visible


def unsupported_gpu() -> str | None:
    """Return one line about an AMD GPU that ROCm could use, if there is one and no NVIDIA GPU."""
    if not Path("/dev/kfd").exists() or visible_gpus():
        return None
    return "AMD GPUs are not supported: runs here use the CPU, with FP8 emulated"


@contextmanager
def driver() -> Iterator[Any]:
    """Lend the driver's management library; None on a machine without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _describe(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: str, *arguments: int) -> Any:
        """Ask what some drivers and virtual machines do not answer."""
        with suppress(nvml.NVMLError):
            return getattr(nvml, function)(handle, *arguments)
        return None

    power = ask("nvmlDeviceGetPowerManagementLimit")
    capability = ask("nvmlDeviceGetCudaComputeCapability") or (0, 0)
    memory = ask("nvmlDeviceGetMemoryInfo")
    return Gpu(
        index=index,
        uuid=ask("nvmlDeviceGetUUID") or "",
        name=ask("nvmlDeviceGetName") or "unknown",
        memory_gib=memory.total / 2**30 if memory else None,
        compute_capability=(capability[0], capability[1]),
        power_limit_watts=power / 1000 if power else None,
        clock_sm_max_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        clock_memory_max_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM),
    )


def machine_facts(machine: Machine, used: Collection[int] = ()) -> dict[str, Any]:
    """Return the ``machine`` part of a record (see `fp8study.core.records.RunRecord`).

    Args:
        machine: Its first GPU is described.
        used: Numbers of the GPUs that the run had.
    """
    facts: dict[str, Any] = {
        "device": machine.device,
        "host_hash": host_hash(),
        "boot_hash": boot_hash(),
        "cpu_name": _cpu_name(),
        "num_cpus": machine.num_cpus,
        "memory_gib": round(memory_gib(), 1),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    if machine.gpus:
        gpu = machine.gpus[0]
        facts |= {
            "gpu_name": gpu.name,
            "num_gpus_on_machine": len(machine.gpus),
            "gpu_memory_gib": round(gpu.memory_gib, 1) if gpu.memory_gib else None,
            "compute_capability": gpu.capability,
            "power_limit_watts": gpu.power_limit_watts,
            "clock_sm_max_mhz": gpu.clock_sm_max_mhz,
            "clock_memory_max_mhz": gpu.clock_memory_max_mhz,
            "gpus": [
                {name: getattr(gpu, name) for name in ("index", "uuid", "name")}
                for gpu in machine.gpus
                if gpu.index in used
            ],
            "driver": driver_version(),
            "gpu_link": gpu_link(),
        }
    return facts


def host_hash() -> str:
    """Return what tells one host from another without naming it.

    From its name alone, SLURM's for it if there is one: where a virtual machine has no network
    card, `uuid.getnode` draws another number in each process.
    """
    name = os.environ.get("SLURMD_NODENAME") or platform.node()
    return hashlib.sha256(f"fp8study {name}".encode()).hexdigest()[:12]


def boot_hash(file: Path = Path("/proc/sys/kernel/random/boot_id")) -> str | None:
    """Return what tells hosts of one name apart, and is alike in all jobs and containers of one.

    It is made of the kernel's id of its last boot; None where that cannot be read.
    """
    try:
        boot = file.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return hashlib.sha256(f"fp8study {boot}".encode()).hexdigest()[:12]


def network_link() -> str:
    """Return what joins this node with others, as ``8 × InfiniBand 400 Gb/sec (4X NDR)``."""
    ports = Path("/sys/class/infiniband").glob("*/ports/*")
    links = Counter(
        " ".join((port / name).read_text().strip() for name in ("link_layer", "rate"))
        for port in ports
        if "ACTIVE" in (port / "state").read_text()
    )
    return " and ".join(f"{n} × {link}" for link, n in sorted(links.items())) or "Ethernet"


def memory_gib(root: Path = Path("/")) -> float:
    """Return the host's memory, or what a container or a scheduler leaves this process of it."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([host, *_memory_limits(root)]) / 2**30


def _memory_limits(root: Path) -> Iterator[int]:
    """Yield the limits of this process's control group, of either version, and of those above."""
    own = root / "proc/self/cgroup"
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, group = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            file = "memory.limit_in_bytes" if controllers else "memory.max"
            folder = root / "sys/fs/cgroup" / controllers / group.lstrip("/")
            # A container sees its own group as the topmost, whatever its name is outside.
            for place in (folder, *folder.parents):
                try:
                    limit = int((place / file).read_text())
                except (OSError, ValueError):  # none, "max", or not ours to read
                    continue
                if limit > 0:
                    yield limit


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of every package that shapes a result."""
    found = dict.fromkeys(_PACKAGES)
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    # A linked checkout has no installed metadata.
    return {"python": platform.python_version(), "fp8study": __version__} | found


def git_state(folder: Path) -> dict[str, Any]:
    """Return the commit of the checkout and whether it holds uncommitted changes.

    Where there is no ``.git`` (a container, an exported archive), ``$FP8STUDY_COMMIT`` is what
    ``git describe --always --dirty --abbrev=40`` printed where the copy was made.
    """
    commit = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    status = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    if commit is None:
        told = os.environ.get("FP8STUDY_COMMIT")
        dirty = told.endswith("-dirty") if told else None
        return {"commit": told.removesuffix("-dirty") if told else None, "dirty": dirty}
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_name() -> str:
    text = ""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or "unknown"


def driver_version() -> str | None:
    """Return the NVIDIA driver's version; call only where there are GPUs."""
    with driver() as nvml:
        return str(nvml.nvmlSystemGetDriverVersion())


def gpu_link() -> str | None:
    """Return the slowest link between GPUs as nvidia-smi names it (NV18, PIX, SYS …).

    ``SHM`` where NCCL is told to leave the links alone: it then goes through the host's memory.
    """
    matrix = _output("nvidia-smi", "topo", "-m") or ""
    lines = [line.split() for line in matrix.splitlines() if re.match(r"GPU\d+\s", line)]
    rows = [words for words in lines if "X" in words]  # the header has none
    links = {word for row in rows for word in row[1 : 1 + len(rows)]} - {"X"}
    if links and os.environ.get("NCCL_P2P_DISABLE") == "1":
        return "SHM"
    slow = [link for link in ("SYS", "NODE", "PHB", "PXB", "PIX") if link in links]
    return slow[0] if slow else ", ".join(sorted(links)) or None
