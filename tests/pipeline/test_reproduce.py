"""Studies through Snakemake and papermill: resume, keep going, be killed, be alone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from fp8study.core.files import locked
from tests.checkout import (
    copy_checkout,
    environment,
    fp8study,
    run_python,
    unreadable_weights,
)

STUDY = """
question: Does the pipeline work?
base: {model: tiny-llama, precision: fp8, strategy: none, sequence_length: 32, num_steps: 4,
       num_warmup_steps: 1, compile: false}
"""
#: Stands before papermill, and fails once as it does where two kernels are given one port.
LOSES_ITS_PORT_ONCE = """
import os, runpy, sys
try:
    os.mkdir("lost")
except FileExistsError:
    del sys.path[0], sys.modules["papermill"]
    runpy.run_module("papermill", run_name="__main__", alter_sys=True)
else:
    sys.exit("RuntimeError: Kernel died before replying to kernel_info")
"""
REPRODUCE = ("reproduce", "tiny", "--no-report")
CLI = ("-m", "fp8study.cli")


def write_study(checkout: Path, *arms: str) -> Path:
    path = checkout / "pipelines/studies/tiny.yaml"
    path.write_text(f"{STUDY}arms: [{', '.join(arms)}]\n")
    return path


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a study of one run; we are in it."""
    write_study(copy_checkout(tmp_path), "{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def records(checkout: Path) -> dict[str, dict]:
    """Status, and what else is in each run's record, by the run's folder."""
    paths = sorted((checkout / "results/local/tiny").glob("*/run.json"))
    return {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}


@dataclass
class Call:
    """What a command said, and what it left behind."""

    done: subprocess.CompletedProcess[str]
    records: dict[str, dict]
    logs: dict[str, str]
    files: set[str]

    @property
    def by_status(self) -> dict[str, str]:
        return {record["status"]: name for name, record in self.records.items()}


def call(checkout: Path, *command: str) -> Call:
    done = run_python(checkout, *CLI, *command)
    results = checkout / "results/local/tiny"
    logs = {path.parent.name: path.read_text() for path in results.glob("*/papermill.log")}
    return Call(done, records(checkout), logs, {path.name for path in results.glob("*/*.json")})


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Call]:
    """A run that fails beside one that does not; a plan; again, damaged; with all that is done."""
    checkout = copy_checkout(tmp_path_factory.mktemp("calls"))
    unreadable_weights(checkout / "weights")
    write_study(checkout, "{init_from: ./weights}", "{}")
    found = {"first": call(checkout, *REPRODUCE), "plan": call(checkout, "plan", "tiny")}

    completed = found["first"].by_status["completed"]
    (checkout / "results/local/tiny" / completed / "run.json").write_text('{"run_id": "half a rec')
    (checkout / "papermill").mkdir()
    (checkout / "papermill/__init__.py").touch()
    (checkout / "papermill/__main__.py").write_text(LOSES_ITS_PORT_ONCE)
    found["second"] = call(checkout, *REPRODUCE)

    write_study(checkout, "{}")
    return found | {"third": call(checkout, *REPRODUCE)}


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.strip().splitlines()
    return line


def test_a_failed_run_stops_no_other(calls: dict[str, Call]) -> None:
    first = calls["first"]
    assert "2 runs, 0 done, 2 to do" in first.done.stdout
    assert "[2/2" in first.done.stdout
    assert first.done.returncode == 2
    assert first.done.stderr.startswith("fp8study: reproduce: 1 of 2 runs have no result")
    assert "does not fit the model 'tiny-llama'" in first.done.stdout
    assert first.by_status.keys() == {"completed", "failed"}
    for log in first.logs.values():  # what had begun is not begun again
        assert log.count("Output Notebook") == 1


def test_a_plan_changes_nothing(calls: dict[str, Call]) -> None:
    first, plan = calls["first"], calls["plan"]
    assert "2 runs, 1 done, 1 to do" in plan.done.stdout
    assert (plan.records, plan.files) == (first.records, first.files)


def test_what_failed_or_is_damaged_is_done_again(calls: dict[str, Call]) -> None:
    first, second = calls["first"], calls["second"]
    assert "corrupt record" in second.done.stdout
    assert "2 runs, 0 done, 2 to do" in second.done.stdout
    assert {"run.corrupt1.json", "run.failed1.json"} <= second.files
    assert second.by_status == first.by_status
    started_at = [[r["started_at"] for r in call.records.values()] for call in (first, second)]
    assert all(one < other for one, other in zip(*started_at, strict=True))
    # That one notebook's kernel died is no end of its run.
    (lost,) = [log for log in second.logs.values() if "Kernel died" in log]
    assert lost.index("Kernel died") < lost.index("Output Notebook")


def test_what_is_done_is_not_done_again(calls: dict[str, Call]) -> None:
    second, third = calls["second"], calls["third"]
    assert third.done.returncode == 0, third.done.stderr
    assert "1 run, 1 done, 0 to do" in third.done.stdout
    assert third.records == second.records


@pytest.mark.usefixtures("cold_training")
def test_a_killed_pipeline_loses_no_finished_run(checkout: Path) -> None:
    study = write_study(checkout, "{}", "{num_steps: 100000}")
    child = subprocess.Popen(
        [sys.executable, *CLI, *REPRODUCE], cwd=checkout, env=environment(),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 200
    metrics = checkout / "results/local/tiny"
    while len(records(checkout)) < 1 or len(list(metrics.glob("*/metrics.jsonl"))) < 2:
        assert time.monotonic() < deadline, "the pipeline did not get going"
        assert child.poll() is None
        time.sleep(0.5)
    finished = records(checkout)
    child.send_signal(signal.SIGKILL)
    child.wait()

    lock = checkout / "results/local/.pipeline.lock"
    with locked(lock, "results"):  # waits until everything that the pipeline started is gone
        assert records(checkout) == finished
    study.write_text(study.read_text().replace("100000", "5"))
    done = run_python(checkout, *CLI, *REPRODUCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 runs, 1 done, 1 to do" in done.stdout
    ((name, record),) = finished.items()
    assert records(checkout)[name] == record


def test_a_corpus_that_is_too_short_is_met_before_any_run(checkout: Path) -> None:
    (checkout / "short.txt").write_text("A very short story. " * 3)  # in bytes it is long enough
    line = one_line(fp8study(*REPRODUCE, "--set", "corpus=text:short.txt"))
    assert "is longer than the corpus" in line
    assert not list((checkout / "results/local/tiny").glob("*/papermill.log"))


def test_a_second_pipeline_is_refused(checkout: Path) -> None:
    with locked(checkout / "results/local/.pipeline.lock", "results"):
        line = one_line(fp8study(*REPRODUCE))
    assert line.startswith("fp8study: reproduce: another pipeline is running in this checkout")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tinny"], "STUDY: 'tinny' is no study (did you mean 'tiny'?)"),
        (["tiny", "--set", "precison=fp8"], "did you mean 'precision'"),
        (["tiny", "--set", "corpus=text:no.txt"], "corpus: there is no file 'no.txt'"),
        (["tiny", "--set", "strategy=ddp", "--set", "num_gpus=4096"], "num_gpus: 4096 is more"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(
    checkout: Path, arguments: list[str], message: str
) -> None:
    done = fp8study("reproduce", "--no-report", *arguments)
    assert message in one_line(done)
    assert not records(checkout)


def test_results_that_cannot_be_written_are_one_line(checkout: Path) -> None:
    (checkout / "results").write_text("in the way")
    line = one_line(fp8study(*REPRODUCE))
    assert line.startswith("fp8study: results: cannot write")
