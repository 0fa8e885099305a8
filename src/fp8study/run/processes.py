"""How a run's training processes are started: their command and their environment.

One process is started as it is, several of one machine by torchrun. On several nodes SLURM starts
a torchrun on each (``srun``), and these find each other through the c10d rendezvous of the first.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

from fp8study.core.config import ResolvedConfig
from fp8study.run.machine import Machine

#: What another launcher may have left behind, and torch, torchrun or Accelerate would believe.
_LEFT_OVER = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|ROLE_NAME"
    r"|(ACCELERATE|MV2_COMM_WORLD|OMPI_COMM_WORLD|PARALLELISM_CONFIG|PET|PMI|PMIX|TORCHELASTIC)_.*"
)
#: Of what SLURM set for our own step, the only part that the next step shall see.
_OF_JOB = ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CLUSTER_NAME", "SLURM_SUBMIT_DIR")

#: Starts a command that ignores SIGUSR1 unless it says otherwise, as a run that can save does: sent
#: to all processes of a job, a scheduler's warning would end torchrun, and a run that cannot save.
UNMOVED = ("sh", "-c", """trap "" USR1; exec "$0" "$@" """)


def training_environment(config: ResolvedConfig, machine: Machine) -> dict[str, str]:
    """Return the environment of a run's training processes: ours, with what the run needs."""
    environment = {n: value for n, value in os.environ.items() if not _LEFT_OVER.fullmatch(n)}
    if machine.gpus:
        # Or `torch.cuda.is_available`, which packages ask as they are imported, fixes what is
        # visible before `claim_gpus` has chosen.
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        if config.allocator == "expandable":
            # Where the older name is set, torch does not read the newer one.
            older = "PYTORCH_CUDA_ALLOC_CONF" in environment
            name = "PYTORCH_CUDA_ALLOC_CONF" if older else "PYTORCH_ALLOC_CONF"
            options = [environment.get(name), "expandable_segments:True"]
            environment[name] = ",".join(filter(None, options))
        if config.collectives == "copy_engines":  # which read memory, and need no multicast
            environment["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        if config.gpu_links == "unused":
            environment["NCCL_P2P_DISABLE"] = "1"
    else:
        environment["CUDA_VISIBLE_DEVICES"] = ""
        # Tiny layers gain nothing from threads, and runs share the few cores.
        environment["OMP_NUM_THREADS"] = "1"
    environment.setdefault("OMP_NUM_THREADS", "8")
    environment["TOKENIZERS_PARALLELISM"] = "false"
    environment["PYTHONUNBUFFERED"] = "1"
    if _is_one_process(config):  # as torchrun would say it
        environment |= {
            "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
        }  # fmt: skip
    if config.num_nodes > 1:
        # The other nodes set their own; and options of our step are none of theirs.
        theirs = re.compile(r"(SLURM|SRUN|SLURMD)_.*|CUDA_VISIBLE_DEVICES")
        environment = {
            name: value
            for name, value in environment.items()
            if name in _OF_JOB or not theirs.fullmatch(name) or value == ""
        }
    return environment


def _is_one_process(config: ResolvedConfig) -> bool:
    # One process of a process group, which needs no torchrun.
    return config.strategy != "none" and config.num_gpus == 1


def training_command(config: ResolvedConfig, run_dir: Path) -> list[str]:
    """Return the command that starts all training processes of a run and ends with them."""
    script = ["-m", "fp8study.train", str(run_dir)]
    if config.strategy == "none" or _is_one_process(config):
        return [*UNMOVED, sys.executable, *script]  # saves torchrun's import of torch
    torchrun = [*UNMOVED, sys.executable, "-m", "torch.distributed.run"]
    torchrun += [f"--nproc-per-node={config.gpus_per_node}"]
    if config.num_nodes == 1:
        return [*torchrun, "--standalone", *script]
    # The notebook holds the first node's part of the job in a step of its own: hence the overlap.
    nodes = str(config.num_nodes)
    return [
        "srun", "--overlap", "--nodes", nodes, "--ntasks", nodes, "--ntasks-per-node=1",
        "--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=1", "--quit-on-interrupt",
        *torchrun, "--nnodes", nodes, "--rdzv-backend=c10d",
        f"--rdzv-endpoint={socket.gethostname()}:{_free_port()}", f"--rdzv-id={run_dir.name}",
        *script,
    ]  # fmt: skip


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])
