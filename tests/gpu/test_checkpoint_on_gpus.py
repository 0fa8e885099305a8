"""A run in FP8 is killed and goes on: it does the same steps again, as near as the GPU ever does.

Also on one CPU, to the bit there, so that the test itself is tried where there is no GPU.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from fp8study.core.checkpoints import last_checkpoint
from fp8study.core.config import make_config
from fp8study.core.records import RunRecord, read_metrics
from fp8study.run.launch import RunFailed, launch
from tests.train.tiny_runs import CPU, TINY

VALUES = TINY | {
    "precision": "fp8", "num_steps": 100, "checkpoint_every": 40, "learning_rate": 1e-4,
    "profile": False,
}  # fmt: skip
#: Steps that are done before the run is killed, some of them after its checkpoint.
DONE = 55


def trained(run_dir: Path, num_gpus: int, is_on_gpu: bool) -> RunRecord:
    config = make_config(VALUES | {"num_gpus": num_gpus})
    return launch(config, run_dir, show=str, machine=None if is_on_gpu else CPU)


def kill_after(num_steps: int, run_dir: Path) -> None:
    """Kill whatever writes a run's metrics once so many steps are in them."""
    path = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not path.exists() or len(path.read_text().splitlines()) < num_steps:
        if time.monotonic() > deadline:
            return  # the test fails as the run completes
        time.sleep(0.005)
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if descriptor.readlink() == path:
                os.kill(int(descriptor.parts[2]), signal.SIGKILL)
        except OSError:  # it has just ended
            continue


def losses(run_dir: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(run_dir)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_gpus", "is_on_gpu"),
    [
        pytest.param(1, False, marks=pytest.mark.long, id="cpu"),
        pytest.param(1, True, marks=pytest.mark.requires_gpu, id="1-gpu"),
        pytest.param(2, True, marks=pytest.mark.requires_gpu(2), id="2-gpus"),
    ],
)
def test_killed_by_signal_9_it_does_the_same_steps_again(
    num_gpus: int,
    is_on_gpu: bool,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_on_gpu:  # where the case on a CPU has started the warm process: it has seen no GPU
        monkeypatch.delenv("WARM_TRAINING", raising=False)
    else:
        request.getfixturevalue("warm_training")
    run_dir, again = tmp_path / "run", tmp_path / "again"
    killer = threading.Thread(target=kill_after, args=(DONE, run_dir))
    killer.start()
    with pytest.raises(RunFailed, match="signal 9"):
        trained(run_dir, num_gpus, is_on_gpu)
    killer.join()
    last, before = last_checkpoint(run_dir), losses(run_dir)
    assert last is not None
    assert (last.step, len(before) >= DONE) == (40, True)
    shutil.copytree(run_dir, again)

    records = [trained(place, num_gpus, is_on_gpu) for place in (run_dir, again)]
    (resumed, rerun) = (losses(place) for place in (run_dir, again))
    assert [*resumed] == list(range(1, 101))
    assert [record.results["resumed"][0]["from_step"] for record in records] == [40, 40]
    both = [step for step in before if step > 40]
    floor = max(abs(resumed[step] / rerun[step] - 1) for step in both)
    off = max(abs(resumed[step] / before[step] - 1) for step in both)
    assert off <= 3 * floor + 1e-4 * is_on_gpu  # two draws of what two runs differ by
    saved = records[0].instruments["checkpoints"]
    assert saved["num"] == 2  # after steps 80 and 100
    assert 0 < saved["stopped_seconds"] < saved["written_seconds"]
    print(f"off {off:.1e}, floor {floor:.1e}, steps stopped for {saved['stopped_seconds']:.3f} s")
