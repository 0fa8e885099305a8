"""A SLURM cluster of two nodes on this machine: munged, slurmctld and two slurmd on loopback.

    apt-get install -y slurm-wlm munge
    python tests/cluster/loopback.py up /tmp/loopback      # prints what to export
    python tests/cluster/loopback.py down /tmp/loopback

No cgroups, no accounting. A node may be killed with all that runs on it.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "srun", "sinfo")
NODES = ("n1", "n2")
CONF = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
SlurmdTimeout=8
KillWait=15
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=12000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=12000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=debug Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=2
"""


def what_is_missing() -> str | None:
    """Return why no cluster can be started here, or None."""
    place = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    missing = [command for command in COMMANDS if shutil.which(command, path=place) is None]
    return f"no {', '.join(missing)}: apt-get install -y slurm-wlm munge" if missing else None


class Cluster:
    """A cluster whose files and logs are in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"], "/usr/sbin"])
        self.environment = {"PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}

    def up(self) -> None:
        """Start everything and wait until both nodes are idle."""
        for name in ("state", "bin", *NODES):
            (self.folder / name).mkdir(parents=True)
        ports = []
        for _ in range(3):
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", 0))
                ports.append(listener.getsockname()[1])
        text = CONF.format(
            host=socket.gethostname(), user=getpass.getuser(), folder=self.folder, ports=ports
        )
        (self.folder / "slurm.conf").write_text(text)
        # Snakemake hides SLURM_CONF from its srun: other clusters have theirs in /etc.
        srun = self.folder / "bin" / "srun"
        srun.write_text(
            f'#!/bin/sh\nSLURM_CONF={self.folder}/slurm.conf exec {shutil.which("srun")} "$@"\n'
        )
        srun.chmod(0o755)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log"}
        options = [f"--{option}={self.folder}/munge.{end}" for option, end in names.items()]
        self.run("munged", "--force", f"--seed-file={self.folder}/munge.seed", *options)
        self.run("slurmctld")
        for node in NODES:
            self.start_node(node)
        self.wait_for("idle")

    def run(self, *command: str) -> str:
        """Run one of SLURM's commands and return what it prints."""
        done = subprocess.run(
            command, env=os.environ | self.environment, stdin=subprocess.DEVNULL, timeout=60,
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout

    def start_node(self, node: str) -> None:
        self.run("slurmd", "-N", node)

    def kill_node(self, node: str) -> None:
        """End a node as a power cut would: its daemon and every process of its jobs."""
        theirs = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                told = process.environ()
                is_daemon = process.cmdline()[:3] == ["slurmd", "-N", node]
                is_ours = told.get("SLURM_CONF") == self.environment["SLURM_CONF"]
                if is_ours and (is_daemon or told.get("SLURMD_NODENAME") == node):
                    theirs.append(process)
        # SLURM's own first, or they would still report how the others ended.
        for process in list(theirs):
            with suppress(psutil.Error):
                above = [each for each in process.parents() if each.name() == "slurmstepd"]
                theirs = above + theirs
        for process in theirs:
            with suppress(psutil.Error):
                process.kill()

    def wait_for(self, state: str, seconds: float = 60) -> None:
        """Wait until all nodes are in a state."""
        deadline = time.monotonic() + seconds
        while (states := set(self.run("sinfo", "-h", "-N", "-o", "%T").split())) != {state}:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the nodes are {states}; see {self.folder}/*.log")
            time.sleep(0.2)

    def down(self) -> None:
        """End all jobs and all daemons."""
        with suppress(RuntimeError):
            self.run("scancel", "--user", getpass.getuser())
        for node in NODES:
            self.kill_node(node)
        for path in (self.folder / "slurmctld.pid", self.folder / "munge.pid"):
            with suppress(OSError, ValueError):
                os.kill(int(path.read_text()), signal.SIGTERM)


if __name__ == "__main__":
    cluster = Cluster(Path(sys.argv[2]).absolute())
    getattr(cluster, sys.argv[1])()
    if sys.argv[1] == "up":
        print("\n".join(f"export {name}={value}" for name, value in cluster.environment.items()))
