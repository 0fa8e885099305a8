from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fp8study.core.config import make_config
from fp8study.core.records import RunRecord
from fp8study.run.launch import launch
from tests.train.tiny_runs import CPU, TINY, Run


@pytest.fixture(scope="module", autouse=True)
def _warm(warm_training: None) -> None:
    """Import torch once for all runs of these tests; `cold_training` does otherwise."""


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train a configuration once, however many tests look at it."""

    @cache
    def trained(assignments: tuple[tuple[str, Any], ...]) -> tuple[RunRecord, Path]:
        run_dir = tmp_path_factory.mktemp("run")
        record = launch(make_config(TINY | dict(assignments)), run_dir, show=str, machine=CPU)
        return record, run_dir

    return lambda **values: trained(tuple(sorted(values.items())))
