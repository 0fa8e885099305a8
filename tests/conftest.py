import os
from collections.abc import Iterator

import pytest
import setuptools  # noqa: F401  # torch's compiler wants it to come before distutils


def pytest_configure() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports the hub's client


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep tests, and whatever they start, away from the user's caches and locks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FP8STUDY_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("FP8STUDY_LOCKS", str(tmp_path_factory.mktemp("locks")))
        yield
