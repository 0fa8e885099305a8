"""Checkpoints as files: what is whole, and what a run goes on from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8study.core.checkpoints import (
    ABOUT,
    FOLDER,
    cut_metrics,
    last_checkpoint,
    partial,
    place_of,
    remove_all_but,
    weights_to_start_from,
)
from fp8study.core.errors import UserError
from fp8study.core.records import read_metrics


def make(place: Path, step: int) -> None:
    place.mkdir(parents=True)
    (place / ABOUT).write_text(json.dumps({"step": step, "config": {}}))


def test_only_whole_checkpoints_count_and_the_last_one_by_number(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    for step in (99_999_999, 100_000_000, 7):
        make(place_of(tmp_path, step), step)
    make(partial(place_of(tmp_path, 200_000_000)), 200_000_000)
    last = last_checkpoint(tmp_path)
    assert last is not None
    assert last.step == 100_000_000
    remove_all_but(2, tmp_path)
    left = {path.name for path in (tmp_path / FOLDER).iterdir()}
    assert left == {"step-99999999", "step-100000000"}


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"step": "x", "config": {}}', "\0"])
def test_a_damaged_one_is_named(content: str, tmp_path: Path) -> None:
    make(place_of(tmp_path, 3), 3)
    (place_of(tmp_path, 3) / ABOUT).write_text(content)
    with pytest.raises(UserError, match=r"step-00000003: no checkpoint .*; take it away"):
        last_checkpoint(tmp_path)


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1 / step}) for step in range(2, 9, 2)]
    path.write_text("\n".join(lines) + '\n{"step": 9, "lo')
    cut_metrics(tmp_path, 5)
    assert path.read_text() == "".join(f"{line}\n" for line in lines[:2])
    assert [row["step"] for row in read_metrics(tmp_path)] == [2, 4]
    cut_metrics(tmp_path, 0)
    assert not path.exists()
    assert not list(tmp_path.iterdir())


def test_weights_are_a_runs_last_ones_a_checkpoint_or_safetensors(tmp_path: Path) -> None:
    for step in (3, 6):
        make(place_of(tmp_path, step), step)
    assert weights_to_start_from(str(tmp_path)) == place_of(tmp_path, 6)
    assert weights_to_start_from(str(place_of(tmp_path, 3))) == place_of(tmp_path, 3)
    (tmp_path / "hf").mkdir()
    with pytest.raises(UserError, match=r"init_from: '.*/hf' holds no weights; give"):
        weights_to_start_from(str(tmp_path / "hf"))
    (tmp_path / "hf" / "model-00001-of-00002.safetensors").touch()
    assert weights_to_start_from(str(tmp_path / "hf")) == tmp_path / "hf"
