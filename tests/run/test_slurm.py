"""What a profile makes of a study, and what SLURM's answers make of its runs; no SLURM needed."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8study.core.checkpoints import note_resumed, place_of
from fp8study.core.config import make_config
from fp8study.core.errors import UserError
from fp8study.core.records import read_record, write_record
from fp8study.core.studies import PlannedRun, expanded
from fp8study.run import pipeline
from fp8study.run.machine import Machine
from fp8study.run.plan import impossible_runs, plan_text
from fp8study.run.slurm import jobs, restarts
from fp8study.run.slurm.profile import Profile, check_slurm, read_profile, study_there
from tests.checkout import ROOT
from tests.factories import make_record

ARMS = [{"num_gpus": 4}, {"num_gpus": 16, "num_nodes": 2}]
BASE = {"model": "llama-3.1-8b", "num_steps": 20}
CLUSTER = Profile(Path(), "h100-80gb", 8, 96, 1000, max_nodes=2)
CPUS = Profile(Path(), None, 0, 2, 12)


@pytest.fixture(autouse=True)
def _checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "pipelines", tmp_path / "pipelines")
    monkeypatch.chdir(tmp_path)
    # The plug-in itself is only needed to submit.
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)


def planned(**base: Any) -> Any:
    content = {"question": "?", "base": BASE | base, "arms": ARMS, "minutes_per_run": 6}
    return expanded("there", content, "there")


def test_a_job_asks_for_its_share_of_each_node() -> None:
    one, two = planned().runs
    asked = CLUSTER.resources(one)
    assert (asked["nodes"], asked["tasks"], asked["gres"]) == (1, 1, "gpu:4")
    assert (asked["cpus_per_task"], asked["mem_mb"], asked["runtime"]) == (48, 51 * 1024, 17)
    assert asked["tasks_per_gpu"] == 0  # or a job of several GPUs would start several times
    wide = CLUSTER.resources(two)
    assert (wide["nodes"], wide["tasks"], wide["gres"]) == (2, 2, "gpu:8")
    assert wide["cpus_per_task"] == 96
    small = replace(CLUSTER, memory_gib_per_node=40)  # or the job would wait for ever
    assert small.resources(one)["mem_mb"] == 40 * 1024
    (alone,) = expanded("s", {"question": "?", "base": {"model": "tiny-llama"}}, "s").runs
    assert CPUS.resources(alone).keys() == asked.keys() - {"gres"}


def test_the_plan_starts_with_the_jobs_and_needs_no_gpu_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fp8study.run.machine.visible_gpus", lambda: pytest.fail("asked for GPUs"))
    first, second, *_ = plan_text(planned(), CLUSTER.machine, CLUSTER).split("\nStudy ")
    assert " ".join(first.split()) == (
        "2 SLURM jobs on nodes of 8 × h100-80gb, up to 2 nodes a job: 2.0 GPU-hours expected, 5.7 "
        "at the time limits (up to 17 min)."
    )
    assert "On 8 × NVIDIA H100. 2 runs, 0 done, 2 to do.\n" in second
    assert "num_gpus=16  num_nodes=2" in second
    assert not impossible_runs(planned(), CLUSTER.machine)
    reasons = impossible_runs(planned(micro_batch_size=64), CLUSTER.machine).values()
    assert ["memory: llama-3.1-8b at batch 64 needs" in reason for reason in reasons] == [True] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": "h100-8gb"}, "config: gpu: 'h100-8gb' is not known (did you mean 'h100-80gb'?)"),
        ({"gpu": "none"}, "config: gpus_per_node: 8 does not go with gpu: none"),
        ({"gpu": "a100"}, "gpu: 'a100' is sold with several sizes of memory; add gpu_memory_gib"),
        ({"gpus_per_nod": 8}, "unknown key 'gpus_per_nod' (did you mean 'gpus_per_node'?)"),
        ({"cpus_per_node": None}, "config: cpus_per_node: None is not valid; give a whole number"),
        ({"time_factor": 0}, "config: time_factor: 0 is none; give a number above 0"),
    ],
)
def test_a_wrong_profile_is_one_line(change: dict[str, Any], message: str) -> None:
    path = Path("pipelines/profiles/slurm/config.yaml")
    content = yaml.safe_load(path.read_text())
    content["config"] |= change
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError) as caught:
        read_profile("slurm")
    assert message in str(caught.value)


def test_what_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"PROFILE: there is no .*slrum.*did you mean 'slurm'"):
        read_profile("slrum")
    with pytest.raises(UserError, match="STUDY: 'machine' is chosen for the GPUs at hand"):
        study_there("slurm", None, {}, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"PROFILE: Snakemake's plug-in .* pip install"):
        read_profile("slurm")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="PROFILE: there is no 'sbatch' here"):
        check_slurm()


def test_more_nodes_than_the_profile_has_are_refused_by_its_field() -> None:
    with pytest.raises(UserError, match=r"lower it, or raise max_nodes in config\.yaml "):
        CLUSTER.machine.check(make_config({"num_gpus": 24, "num_nodes": 3}))


def test_a_name_of_a_node_is_a_machine_like_any_other() -> None:
    assert CLUSTER.machine.has_fp8 and CLUSTER.machine.num_nodes == 2
    assert CPUS.machine == Machine((), 2)
    older = Profile(Path(), "a100", 4, 64, 500, gpu_memory_gib=40)
    assert not older.machine.has_fp8
    assert {gpu.memory_gib for gpu in older.machine.gpus} == {40}


def run_of(tmp_path: Path) -> PlannedRun:
    run: PlannedRun = planned().runs[0]
    run.run_dir.mkdir(parents=True)
    (run.run_dir / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    return run


def command(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    """Play one of SLURM's commands with a shell script."""
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_job_that_was_over_before_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path)
    answer = f"6|COMPLETED|n1|{tmp_path}|rule_run_wildcards_there_{run.run_id}"
    command(tmp_path, monkeypatch, "squeue", f"echo '{answer}'")
    before = jobs.find_jobs("there")
    lost = pipeline._follow(subprocess.Popen(["false"]), [run], "there", CPUS, before)
    assert lost == [run]
    assert not (run.run_dir / "run.json").exists()
    # The job of this call is.
    assert pipeline._follow(subprocess.Popen(["false"]), [run], "there", CPUS, {}) == []
    assert "SLURM job 6 on n1 ended without" in str(
        read_record(run.run_dir / "run.json").status_detail
    )


def test_an_interrupted_run_whose_job_lives_is_not_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path)
    for status in ("interrupted", "completed"):
        write_record(make_record(run_id=run.run_id, status=status), tmp_path)
        (tmp_path / "run.json").rename(tmp_path / status)
    record = run.run_dir / "run.json"
    shutil.copy(tmp_path / "interrupted", record)
    monkeypatch.setattr(pipeline, "_ASK_SLURM_SECONDS", 0)
    # Asked for the third time, it has come back and is done.
    command(
        tmp_path, monkeypatch, "squeue",
        f"echo >> {tmp_path}/asked; state=RUNNING; [ $(wc -l < {tmp_path}/asked) -ge 3 ] && "
        f"state=COMPLETED && cp {tmp_path}/completed {record}; "
        f"echo \"6|$state|n1|{tmp_path}|rule_run_wildcards_there_{run.run_id}\"",
    )  # fmt: skip
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    assert pipeline._follow(child, [run], "there", CPUS, {}) == []
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("[1/1 ") and "completed" in line


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("Usage:\n [targets]\n__main__.py: error: unrecognized arguments: --jbs=3\n",
         "__main__.py: error: unrecognized arguments: --jbs=3"),
        ("sbatch: error: _establish_config_source: failed to fetch config\n",
         "_establish_config_source: failed to fetch config (SLURM does not answer here: does "
         "`sinfo`?)"),
        ("message: 'sbatch: error: invalid\nsbatch: error: Batch job submission failed: Invalid "
         "partition'.\nWorkflowError:\nAt least one job failed.\n",
         "Batch job submission failed: Invalid partition"),
        ("Error:\n  WorkflowError:\n    'soon' is no time\nTraceback:\n",
         "WorkflowError: 'soon' is no time"),
        ("ModuleNotFoundError: No module named 'sqlalchemy'\n",
         "ModuleNotFoundError: No module named 'sqlalchemy'"),
        ("", "it said nothing"),
    ],
)  # fmt: skip
def test_what_stopped_snakemake_is_one_line(log: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "snakemake.log"
    path.write_text(log)
    assert pipeline._last_word_of_snakemake(path) == said
    assert pipeline._why_no_record(tmp_path / "run").startswith(f"it did not start: {said}; see ")


@pytest.mark.parametrize(
    ("status", "state", "step", "goes_back"),
    [
        ("interrupted", "RUNNING", 7, True),
        ("interrupted", "RUNNING", 0, False),  # nothing is saved
        ("interrupted", "COMPLETING", 7, False),  # it was cancelled
        ("completed", "RUNNING", 7, False),
    ],
)
def test_a_job_whose_run_has_saved_goes_back_into_the_queue(
    status: str, state: str, step: int, goes_back: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run = run_of(tmp_path)
    write_record(make_record(run_id=run.run_id, status=status), run.run_dir)
    if step:
        place = place_of(run.run_dir, step)
        place.mkdir(parents=True)
        (place / "about.json").write_text(json.dumps({"step": step, "config": {}}))
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    command(tmp_path, monkeypatch, "squeue", f"echo {state}")
    command(tmp_path, monkeypatch, "scontrol", f"echo $@ > {tmp_path}/told")
    restarts.put_back(run.run_dir)
    assert (tmp_path / "told").exists() == goes_back
    assert not goes_back or (tmp_path / "told").read_text() == "requeue 5\n"


def test_a_job_that_comes_back_and_gets_no_further_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = run_of(tmp_path).run_dir
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert restarts.why_not_again(run_dir) is None
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    (run_dir / "checkpoints").mkdir()

    def after(times: int, name: str = run_dir.name) -> str | None:
        told = f"{times:<9}rule_run_wildcards_{run_dir.parent.name}_{name}  "
        monkeypatch.setattr(restarts, "ask", lambda *_: [told])
        return restarts.why_not_again(run_dir)

    assert after(3) is None
    assert after(4, "of-another-run") is None
    for step in (4, 9, 9, 9, 9):
        note_resumed(run_dir, from_step=step, num_gpus=4, at=None)
    assert after(5) is None  # two of them went on from further steps
    assert after(6) == (
        "SLURM job 5 came back 6 times, 4 of them without a further step that was saved (the last: "
        "9); lower checkpoint_every, or raise time_factor in the profile, and start again"
    )


@pytest.mark.parametrize(
    ("state", "node", "status", "detail"),
    [
        ("NODE_FAIL", "n7", "failed", "SLURM job 12 on n7 lost its node"),
        ("CANCELLED", "", "interrupted", "SLURM job 12, which never started, was cancelled"),
        ("FAILED", "n7", "failed", "SLURM job 12 on n7 ended without a record: ValueError: no"),
    ],
)
def test_a_run_that_its_job_lost_has_a_record_and_is_still_to_do(
    state: str, node: str, status: str, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path)
    answer = f"7|COMPLETED|n1|{tmp_path}|rule_run_wildcards_there_other\n"
    answer += f"9|{state}|n9|/another/checkout|rule_run_wildcards_there_{run.run_id}\n"
    answer += f"12|{state}|{node}|{tmp_path}|rule_run_wildcards_there_{run.run_id}\n"
    answer += f"11|RUNNING|n3|{tmp_path}|rule_run_wildcards_there_{run.run_id}\n"
    answer += "13|RUNNING|n1|/|(null)\n"
    answer += f"15|RUNNING|n4|{tmp_path}|rule_run_wildcards_elsewhere_{run.run_id}\n"
    answer += "14_[1-9]|PENDING||/|(null)\n"  # an array, as others on this cluster submit them
    command(tmp_path, monkeypatch, "squeue", f"cat <<'E'\n{answer}E")
    job = jobs.find_jobs("there")[run.run_id]
    assert (job.job_id, job.is_alive) == ("12", False)
    jobs.record_loss(run, "there", job, "ValueError: no")
    record = read_record(run.run_dir / "run.json")
    assert (record.status, record.status_detail) == (status, detail)
    assert record.results == {"steps_completed": 1}
    study = planned()
    assert run in study.pending()
    study.make_room()
    assert (run.run_dir / f"run.{status}1.json").exists()


def test_a_job_that_is_told_to_end_says_which_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert jobs.why_stopped() == ""
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setattr(jobs, "ask", lambda *_: ["0:00|30:00"])
    assert jobs.why_stopped() == ": SLURM job 5 reached its time limit of 30:00"
    monkeypatch.setattr(jobs, "ask", lambda *_: [])
    assert jobs.why_stopped() == ": SLURM job 5 was told to end"
