"""What is said of processes that were killed, and of those that say much before they fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fp8study.core.config import make_config
from fp8study.core.records import read_record
from fp8study.run import launch as launching
from fp8study.run.children import Stopped, end_left, killed, stoppable, telling_line
from fp8study.run.job import Outcome
from fp8study.run.machine import Machine
from fp8study.run.pipeline import _why_no_record
from fp8study.run.processes import UNMOVED

WARNING = "W1122 05:17:28 torch/_pytree.py:630] <enum 'KernelPreference'> is deprecated: error"
TORCHRUN = """
E1122 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: -9) local_rank: 1
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
fp8study.train FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_05:00:00
  host      : box
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 4242)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 4242
============================================================
""".splitlines()


def test_a_killed_rank_is_named_whatever_the_others_say() -> None:
    lost = Outcome("failed", "RuntimeError: [gloo] Connection closed by peer")
    for said in (None, lost):
        found = launching._explained(1, [WARNING, *TORCHRUN], said)
        assert found.status_detail is not None
        assert found.status_detail.startswith("rank 1 was killed by signal 9 (SIGKILL), as the sys")
        assert "train.log" in found.status_detail
    done = Outcome("completed", warnings=["one"])
    assert launching._explained(0, [], done) is done
    no_room = Outcome("out_of_memory")
    assert launching._explained(1, [WARNING, *TORCHRUN], no_room) is no_room
    late = launching._explained(-9, [], done)
    assert (late.status, late.warnings[0], done.warnings) == ("completed", "one", ["one"])
    assert (
        "(SIGKILL), as the system does when memory runs out after its last step: wh"
        in (late.warnings[1])
    )
    own = Outcome("failed", "the rank's own reason")
    assert launching._explained(1, [line.replace("-9", "1") for line in TORCHRUN], own) is own


def test_a_process_alone_is_named_too() -> None:
    assert killed(-15, [WARNING]) == "the training process was killed by signal 15 (SIGTERM)"
    assert killed(1, [WARNING]) is None


def test_warnings_and_rulers_do_not_stand_for_an_error() -> None:
    lines = ["Traceback:", "ValueError: the cause", WARNING, "  warnings.warn(", "=====", ""]
    assert telling_line(lines) == "ValueError: the cause"
    assert telling_line(["no error", WARNING]) == "no error"
    assert telling_line([WARNING, "-----"]) is None
    found = launching._explained(3, ["x.FooError: bad", WARNING], None)
    assert found.status_detail == "exit status 3: x.FooError: bad"


def test_a_killed_kernel_is_called_that(tmp_path: Path) -> None:
    log = tmp_path / "papermill.log"
    assert _why_no_record(tmp_path) == "it did not start"
    log.write_text("Traceback\nnbclient.exceptions.DeadKernelError: Kernel died\n" + WARNING)
    assert _why_no_record(tmp_path) == f"the kernel of its notebook was killed; see {log}"
    log.write_text(f"ValueError: bad\n{WARNING}\n")
    assert _why_no_record(tmp_path) == f"ValueError: bad; see {log}"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_launcher_records_by_what(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "print('progress: 1', flush=True); import time; time.sleep(60)"
    monkeypatch.setattr(launching, "training_command", lambda *_: [sys.executable, "-c", code])
    config = make_config({"model": "tiny-llama", "strategy": "none", "num_steps": 11,
                          "sequence_length": 64})  # fmt: skip
    before = signal.getsignal(number)

    def show(line: str) -> None:
        if line == "1":
            os.kill(os.getpid(), number)

    started = time.monotonic()
    with pytest.raises(Stopped):
        launching.launch(config, tmp_path / "run", show=show, machine=Machine((), 2))
    record = read_record(tmp_path / "run" / "run.json")
    assert (record.status, record.status_detail) == ("interrupted", f"stopped by {number.name}")
    assert time.monotonic() - started < 50  # the child was ended, not waited for
    assert signal.getsignal(number) is before


def test_a_run_that_saves_nothing_ignores_the_warning_of_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent to all processes of a job: here to the launcher and to the one that it starts."""
    code = "import os; os.kill(os.getpid(), 10); print('progress: 1', flush=True); os._exit(3)"
    command = [*UNMOVED, sys.executable, "-c", code]
    monkeypatch.setattr(launching, "training_command", lambda *_: command)
    config = make_config({"model": "tiny-llama", "strategy": "none", "num_steps": 11,
                          "sequence_length": 64})  # fmt: skip

    def show(line: str) -> None:
        if line == "1":
            os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(launching.RunFailed, match="exit status 3"):
        launching.launch(config, tmp_path / "run", show=show, machine=Machine((), 2))


def test_what_a_signal_does_outside_is_left_alone() -> None:
    with pytest.raises(Stopped, match="SIGHUP"), stoppable():
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(5)


@pytest.mark.parametrize("whole_group", [False, True])
def test_a_silent_child_ends_with_its_parents_end_of_the_pipe(whole_group: bool) -> None:
    """One that prints would end anyhow, of a pipe that nobody reads."""
    code = (
        "import time; from fp8study.run.children import follow_parent; "
        f"follow_parent({whole_group}); time.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True
    )
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(timeout=30) == -signal.SIGTERM


def test_what_a_killed_leader_started_is_ended() -> None:
    child = subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo; wait"], stdout=subprocess.PIPE, start_new_session=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    child.kill()
    child.wait()
    started = time.monotonic()
    end_left(child.pid, patience_s=1)
    child.stdout.read()  # which ends with the last who could write there
    assert time.monotonic() - started < 20
    end_left(child.pid)  # when nothing is left
