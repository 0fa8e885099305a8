import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import setuptools  # noqa: F401  # torch's compiler wants it to come before distutils

WARM = Path(__file__).parent / "warm"


def pytest_configure() -> None:
    os.chdir(Path(__file__).parents[1])  # commands act on the checkout in which one is
    os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports the hub's client
    # Before anything imports torch: workers share the cores, and threads that wait use them up.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long files first, so that no worker is left alone with one at the end."""
    first = {"pipeline": 0, "train": 1, "report": 2}
    items.sort(key=lambda item: first.get(item.path.parent.name, len(first)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what ``requires_gpu``, or so many of them, where there are fewer."""
    if mark := item.get_closest_marker("requires_gpu"):
        import torch

        if torch.cuda.device_count() < (needed := sum(mark.args) or 1):
            pytest.skip(f"needs CUDA GPUs: {needed}")


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this call of pytest, one for all workers."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def _own_folders(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep tests, and whatever they start, away from the user's caches and locks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FP8STUDY_CACHE", str(shared_folder / "cache"))
        patch.setenv("FP8STUDY_LOCKS", str(tmp_path_factory.mktemp("locks")))
        yield


@pytest.fixture(scope="session")
def _warm_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    socket = tmp_path_factory.mktemp("warm") / "socket"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    server = subprocess.Popen(
        [sys.executable, WARM / "sitecustomize.py", socket], env=environment, stdin=subprocess.PIPE
    )
    while not socket.exists():
        assert server.poll() is None, "the warm process has ended"
        time.sleep(0.1)
    yield socket
    assert server.stdin is not None
    server.stdin.close()
    server.wait()


@pytest.fixture(scope="module")
def warm_training(_warm_socket: Path) -> Iterator[None]:
    """Let training processes be forked from one that has imported torch (`tests/warm`)."""
    path = os.pathsep.join(filter(None, [str(WARM), os.environ.get("PYTHONPATH")]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WARM_TRAINING", str(_warm_socket))
        patch.setenv("PYTHONPATH", path)
        yield


@pytest.fixture
def cold_training(warm_training: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start training processes as users do: where the process itself is what is tested."""
    monkeypatch.delenv("WARM_TRAINING")
