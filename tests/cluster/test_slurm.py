"""Studies through SLURM, on two nodes of loopback: done, cancelled, timed out, killed, gone on.

Saved and put back into the queue; and without space on the disk that both share.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from fp8study.core.checkpoints import times_resumed
from tests.checkout import copy_checkout, environment, wait_until
from tests.cluster.loopback import Cluster, what_is_missing
from tests.disks import small_disk_at

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(what_is_missing() is not None, reason=f"needs SLURM: {what_is_missing()}"),
]
pytest.importorskip("snakemake_executor_plugin_slurm", reason="Snakemake's plug-in for SLURM")

BASE = {
    "model": "tiny-llama", "sequence_length": 32, "num_steps": 4, "num_warmup_steps": 1,
    "compile": False, "profile": False, "strategy": "none",
}  # fmt: skip
FOREVER = 1_000_000
PROFILE = Path(__file__).parent / "profile"
Studied = Callable[..., Path]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def studied(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Studied:
    """Make a checkout with a study, and a profile of this cluster; return its folder."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)

    def made(arms: list[dict[str, Any]], runtime: int = 5) -> Path:
        checkout = copy_checkout(tmp_path)
        content = {"question": "Does the cluster work?", "base": BASE, "arms": arms}
        (checkout / "pipelines/studies/tiny.yaml").write_text(yaml.safe_dump(content))
        shutil.copytree(PROFILE, checkout / "pipelines/profiles/loopback")
        path = checkout / "pipelines/profiles/loopback/config.yaml"
        with path.open("a") as profile:
            profile.write(f"set-resources: {{run: {{runtime: {runtime}}}}}")
        return checkout

    return made


def fp8study(command: str, checkout: Path) -> subprocess.Popen[str]:
    options = ["--no-report"] if command == "reproduce" else []
    arguments = ["-m", "fp8study.cli", command, "tiny", "--profile", "loopback", *options]
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=checkout, env=environment(), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finished(child: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = child.communicate(timeout=400)
    return child.returncode, said


def records(checkout: Path) -> dict[str, dict[str, Any]]:
    """The records by the folders of their runs."""
    paths = (checkout / "results/local/tiny").glob("*/run.json")
    return {path.parent.name: json.loads(path.read_text()) for path in paths}


def training(checkout: Path) -> list[Path]:
    """The runs that have begun to train, the longest-running first."""
    files = (checkout / "results/local/tiny").glob("*/metrics.jsonl")
    began = [path for path in files if path.stat().st_size]
    return [path.parent for path in sorted(began, key=lambda path: path.stat().st_ctime)]


def unfinished(checkout: Path) -> list[Path]:
    return [run for run in training(checkout) if run.name not in records(checkout)]


def job_of(run_id: str, cluster: Cluster) -> str:
    """The one job that was ever submitted for a run."""
    lines = cluster.run("squeue", "-h", "-t", "all", "-o", "%i %k").splitlines()
    (job,) = (line.split()[0] for line in lines if line.endswith(run_id))
    return job


def test_six_runs_survive_the_death_of_their_driver_and_of_a_node_and_none_is_repeated(
    studied: Studied, cluster: Cluster
) -> None:
    arms = [{"num_steps": 200, "seeds": [0, 1, 2]}, {"precision": "fp8", "seeds": [0, 1]}]
    checkout = studied([*arms, {"strategy": "fsdp2", "num_gpus": 2, "num_nodes": 2}])
    _, plan = finished(fp8study("plan", checkout))
    assert plan.startswith("6 SLURM jobs on nodes of 2 cores, up to 2 nodes a job: 0.1 core-hours")
    child = fp8study("reproduce", checkout)
    wait_until(lambda: records(checkout))
    child.send_signal(signal.SIGKILL)
    child.wait()
    first = records(checkout)
    repeated = job_of(next(iter(first)), cluster)
    cluster.run("scontrol", "requeue", repeated)  # as if its node had died after the record

    again = fp8study("reproduce", checkout)
    on_one_node: list[tuple[str, str, str]] = []

    def finds_one() -> bool:
        for run in unfinished(checkout):
            job = job_of(run.name, cluster)
            node = cluster.run("squeue", "-h", "-t", "R", "-j", job, "-o", "%N").strip()
            if node in ("n1", "n2"):  # not the wide one, nor one that has just ended
                on_one_node.append((run.name, job, node))
        return bool(on_one_node)

    wait_until(finds_one)
    moved, job, node = on_one_node[0]
    cluster.kill_node(node)
    wait_until(lambda: "down" in cluster.run("sinfo", "-h", "-N", "-n", node, "-o", "%T"))
    cluster.start_node(node)
    code, said = finished(again)
    assert code == 0, said
    assert "jobs of an earlier call are still there: waiting for them" in said
    wait_until(lambda: not cluster.run("squeue", "-h").strip())
    done = records(checkout)
    assert [record["status"] for record in done.values()] == ["completed"] * 6
    assert {run_id: done[run_id] for run_id in first} == first
    assert job_of(moved, cluster) == job  # put back into the queue by SLURM
    for run_id in done:
        logs = checkout / "results/local/tiny/slurm/rule_run" / f"tiny_{run_id}"
        log = logs / f"{job_of(run_id, cluster)}.log"
        assert "rule run" in log.read_text()
    (wide,) = (record for record in done.values() if record["config"]["num_nodes"] == 2)
    assert [node["ranks"] for node in wide["machine"]["nodes"]] == [[0], [1]]
    assert len({node["host_hash"] for node in wide["machine"]["nodes"]}) == 2
    assert wide["machine"]["network_link"]

    code, said = finished(fp8study("reproduce", checkout))
    assert (code, records(checkout)) == (0, done)
    assert "6 done, 0 to do" in said


def test_a_cancelled_and_a_timed_out_job_leave_records_and_are_done_again(
    studied: Studied, cluster: Cluster
) -> None:
    checkout = studied([{"num_steps": FOREVER, "seeds": [0, 1]}], runtime=1)
    child = fp8study("reproduce", checkout)
    wait_until(lambda: len(training(checkout)) == 2)
    cancelled, late = training(checkout)
    cluster.run("scancel", job_of(cancelled.name, cluster))
    code, said = finished(child)
    assert code == 2
    assert "reproduce: 2 of 2 runs have no result" in said
    told = {name: (r["status"], r["status_detail"]) for name, r in records(checkout).items()}
    jobs = {run.name: job_of(run.name, cluster) for run in (cancelled, late)}
    assert told == {
        cancelled.name: ("interrupted", f"stopped by SIGTERM: SLURM job {jobs[cancelled.name]} was "
                                        "told to end"),
        late.name: ("interrupted", f"stopped by SIGTERM: SLURM job {jobs[late.name]} reached its "
                                   "time limit of 1:00"),
    }  # fmt: skip
    assert all(record["results"]["steps_completed"] > 0 for record in records(checkout).values())
    _, plan = finished(fp8study("plan", checkout))
    assert "0 done, 2 to do" in plan


def steps_of(run: Path) -> list[int]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def has_gone_on(run: Path, times: int) -> bool:
    """Whether a run was resumed so often, and has done further steps since."""
    resumed = times_resumed(run)
    return len(resumed) >= times and 0 < resumed[-1]["from_step"] < steps_of(run)[-1]


def trainer_of(run: Path) -> psutil.Process:
    """The process that writes a run's metrics."""
    place = str(run / "metrics.jsonl")
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if place in (file.path for file in process.open_files()):
                return process
    raise AssertionError(f"nothing writes '{place}'")


def was_warned(process: psutil.Process) -> bool:
    """Whether SIGUSR1 waits for a process that is held, or woke it, if SLURM continued it."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return True
    (pending,) = re.findall(r"ShdPnd:\s*(\w+)", status)
    return bool(int(pending, 16) >> (signal.SIGUSR1 - 1) & 1)


def test_saved_runs_go_on_by_themselves_whatever_puts_their_jobs_back(
    studied: Studied, cluster: Cluster
) -> None:
    values = {"checkpoint_every": 100, "num_steps": 400}
    wide = {"strategy": "fsdp2", "num_gpus": 2, "num_nodes": 2}
    checkout = studied([values, values | wide], runtime=2)
    child = fp8study("reproduce", checkout)
    # One is held until its time is nearly over, however fast this machine is.
    wait_until(lambda: [run for run in training(checkout) if "1gpu" in run.name])
    (late,) = (run for run in training(checkout) if "1gpu" in run.name)
    held = trainer_of(late)
    held.suspend()

    # The other, on two nodes, is warned, put back into the queue, and makes room for another job.
    wait_until(lambda: len(training(checkout)) == 2)
    (moved,) = (run for run in training(checkout) if run != late)
    job = job_of(moved.name, cluster)
    node = cluster.run("squeue", "-h", "-j", job_of(late.name, cluster), "-o", "%N").strip()
    urgent = ["--partition=urgent", f"--exclude={node}", "--cpus-per-task=2", "--mem=100"]
    for number, command in enumerate((
        ("scancel", "--signal=USR1", job),
        ("scontrol", "requeue", job),
        ("sbatch", *urgent, f"--output={os.devnull}", "--wrap=sleep 1"),
    ), start=1):  # fmt: skip
        cluster.run(*command)
        wait_until(partial(has_gone_on, moved, number))

    wait_until(lambda: was_warned(held))
    with suppress(psutil.NoSuchProcess):
        held.resume()
    code, said = finished(child)
    assert code == 0, said
    assert "interrupted" not in said  # those were no ends
    done = records(checkout)
    for run, at_least in ((late, 1), (moved, 3)):
        record = done[run.name]
        assert record["status"] == "completed"
        assert len(record["results"]["resumed"]) >= at_least
        assert steps_of(run) == list(range(1, 401))
        job_of(run.name, cluster)  # none was submitted again
    first = json.loads((late / "run.earlier1.json").read_text())
    assert (first["status"], first["results"]["steps_completed"]) == (
        "interrupted",
        done[late.name]["results"]["resumed"][0]["from_step"],
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own for a checkout's results."""
    place = tmp_path / "results"
    place.mkdir()
    with small_disk_at(place, "16m"):
        yield place


def test_a_full_disk_loses_nothing_finished_and_what_it_stopped_is_done_again(
    studied: Studied, cluster: Cluster, small_disk: Path
) -> None:
    checkout = studied([{"num_steps": 4}, {"num_steps": 1000, "seeds": [1, 2]}])
    child = fp8study("reproduce", checkout)
    wait_until(lambda: records(checkout) and len(training(checkout)) == 3)
    first = records(checkout)
    (done,) = first
    job, filling = job_of(done, cluster), small_disk / "fill"
    with pytest.raises(OSError, match="No space left"), filling.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))
    code, said = finished(child)
    assert code == 2
    assert "Traceback" not in said
    (line,) = (line for line in said.splitlines() if line.startswith("fp8study: "))
    assert f"the disk of '{checkout}/results/local/tiny' is full; free some space and" in line
    wait_until(lambda: not cluster.run("squeue", "-h").strip())  # none trains on without its files
    assert records(checkout) == first

    filling.unlink()
    code, said = finished(fp8study("reproduce", checkout))
    assert code == 0, said
    assert "1 done, 2 to do" in said
    after = records(checkout)
    assert [record["status"] for record in after.values()] == ["completed"] * 3
    assert (after[done], job_of(done, cluster)) == (first[done], job)
