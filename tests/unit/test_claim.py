"""How a training process takes its GPUs; none is needed for it."""

import json
import os
import threading
from pathlib import Path

import pytest

from fp8study import claim
from fp8study.config import make_config
from fp8study.data import PreparedData
from fp8study.gpus import lease
from fp8study.job import Job

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
    return Job(DATA, False, None, indices, 0.0)


def test_the_first_process_takes_free_gpus_and_says_which(tmp_path: Path) -> None:
    config = make_config({"num_gpus": 2})
    with lease(1, [4, 5, 6]):
        claim.claim_gpus(config, job(4, 5, 6), tmp_path)
    assert claim.claimed(tmp_path) == [5, 6]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,6"
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_it_waits_and_says_how_long(tmp_path: Path) -> None:
    held = lease(1, [0])
    held.__enter__()
    threading.Timer(0.3, lambda: held.__exit__(None, None, None)).start()
    assert claim.claim_gpus(make_config({}), job(0), tmp_path) > 0.2


def test_the_others_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    (tmp_path / claim.CLAIM).write_text(json.dumps([2, 3]))
    claim.claim_gpus(make_config({"num_gpus": 2}), job(0, 1, 2, 3), tmp_path)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    with lease(4, [0, 1, 2, 3]) as all_of_them:  # they hold nothing themselves
        assert len(all_of_them.indices) == 4


def test_a_machine_without_gpu_has_nothing_to_claim(tmp_path: Path) -> None:
    assert claim.claim_gpus(make_config({}), job(), tmp_path) == 0
    assert claim.claimed(tmp_path) is None
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
