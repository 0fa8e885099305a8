"""A full disk is one clear line, from a real file system without space."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkout import ROOT, run_python
from tests.disks import small_disk_at


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk_at(tmp_path, "64k"):
        yield tmp_path


def test_a_full_disk_is_one_clear_line(small_disk: Path) -> None:
    studies = small_disk / "pipelines" / "studies"
    studies.mkdir(parents=True)
    shutil.copy(ROOT / "pipelines" / "studies" / "smoke.yaml", studies)
    with pytest.raises(OSError), (small_disk / "fill").open("wb") as fill:
        fill.write(bytes(10**6))
    done = run_python(small_disk, "-m", "fp8study.cli", "reproduce", "smoke", "--no-report")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert "No space left" in line
    assert "free some space" in line
