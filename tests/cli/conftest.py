"""What the tests of commands share."""

from pathlib import Path

import pytest

from tests.checkout import ROOT


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout without results, so that nothing here touches real ones; we are in it."""
    (tmp_path / "pipelines").symlink_to(ROOT / "pipelines")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path
