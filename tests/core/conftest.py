"""An empty checkout to write studies in."""

from pathlib import Path

import pytest


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkout, with us in it."""
    (tmp_path / "pipelines" / "studies").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path
