"""How a training process takes its GPUs; none is needed for it."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fp8study.core.config import make_config, save_config
from fp8study.data.tokens import PreparedData
from fp8study.run import gpu_lease as claim
from fp8study.run.gpu_lease import lease
from fp8study.run.job import Job

DATA = PreparedData("c", "0", "t", "0", 10, 10, [], "folder")


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8STUDY_LOCKS", str(tmp_path / "locks"))
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def given_back() -> object:
    yield
    claim._held.close()


def job(*indices: int) -> Job:
    return Job(DATA, {index: f"GPU {index}" for index in indices}, 0.0)


def test_the_first_process_takes_free_gpus_and_says_which(tmp_path: Path) -> None:
    config = make_config({"num_gpus": 2})
    with lease(1, [4, 5, 6]):
        got = claim.claim_gpus(config, job(4, 5, 6), tmp_path)
    assert got.gpus == {5: "GPU 5", 6: "GPU 6"}  # not the first of the box: its peak decides MFU
    assert claim.claimed(tmp_path) == [5, 6]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,6"
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_it_waits(tmp_path: Path) -> None:
    held = lease(1, [0])
    held.__enter__()
    threading.Timer(0.3, lambda: held.__exit__(None, None, None)).start()
    started = time.monotonic()
    claim.claim_gpus(make_config({}), job(0), tmp_path)
    assert time.monotonic() - started > 0.2


def test_the_others_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    (tmp_path / claim.CLAIM.format(0)).write_text(json.dumps({"indices": [2, 3]}))
    claim.claim_gpus(make_config({"num_gpus": 2}), job(0, 1, 2, 3), tmp_path)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    with lease(4, [0, 1, 2, 3]) as all_of_them:  # they hold nothing themselves
        assert len(all_of_them.indices) == 4


def test_memory_that_others_hold_of_its_gpus_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_use = {4: 50.0, 5: 1.5, 6: 41.2}  # of 4 nothing is ours, 5 is a desktop's
    monkeypatch.setattr(claim, "memory_in_use", in_use.get)
    monkeypatch.setattr(claim, "_LINGERS_SECONDS", 0.2)
    with lease(1, [4]):
        claim.claim_gpus(make_config({"num_gpus": 2}), job(4, 5, 6), tmp_path)
    (note,) = claim.held_by_others(tmp_path)
    assert note.startswith("GPU 6: other processes held 41 GiB")


def test_what_a_run_before_still_holds_for_a_moment_is_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([80.0, 80.0, 0.5])
    monkeypatch.setattr(claim, "memory_in_use", lambda index: next(looks))
    claim.claim_gpus(make_config({}), job(0), tmp_path)
    assert (claim.claimed(tmp_path), claim.held_by_others(tmp_path)) == ([0], [])


def test_runs_that_share_a_gpu_do_not_take_each_other_for_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "memory_in_use", lambda index: 80.0)
    claim.claim_gpus(make_config({"runs_per_gpu": 2}), job(0), tmp_path)
    assert claim.held_by_others(tmp_path) == []


def test_a_machine_without_gpu_has_nothing_to_claim(tmp_path: Path) -> None:
    assert claim.claim_gpus(make_config({}), job(), tmp_path) == job()
    assert claim.claimed(tmp_path) is None
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


#: Stands where `claim_gpus` does, after it has made every look for a GPU an error.
LOOKS = """
import sys, torch, torch.accelerator
from pathlib import Path
def refuse(*_, **__):
    raise AssertionError("looked for a GPU")
for name in dir(torch._C):
    if name.startswith("_accelerator_"):
        setattr(torch._C, name, refuse)
for name in ("_lazy_init", "get_device_capability", "get_device_properties", "current_device"):
    setattr(torch.cuda, name, refuse)
import fp8study.train.__main__ as train
def claimed(*_):
    print("claimed")
    sys.exit(0)
train.claim_gpus = claimed
train.run(Path(sys.argv[1]))
"""


def test_nothing_looks_for_a_gpu_before_the_claim(tmp_path: Path) -> None:
    """What is visible is fixed at the first look, and packages look as they are imported."""
    save_config(make_config({"model": "tiny-llama"}), tmp_path / "config.yaml")
    job().save(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", LOOKS, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "claimed"), done.stderr


def test_another_node_takes_its_own_gpus_under_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROUP_RANK", "1")
    there = [SimpleNamespace(index=i, name=f"its GPU {i}") for i in (2, 3)]
    monkeypatch.setattr(claim, "visible_gpus", lambda: there)
    config = make_config({"num_gpus": 4, "num_nodes": 2})
    got = claim.claim_gpus(config, job(0, 1), tmp_path)
    assert got.gpus == {2: "its GPU 2", 3: "its GPU 3"}
    assert (claim.claimed(tmp_path), claim.claimed(tmp_path, node=1)) == (None, [2, 3])
