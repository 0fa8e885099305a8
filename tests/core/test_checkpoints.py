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
    times_resumed,
    weights_sha256,
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
    cut_metrics(tmp_path, 5, log_every=2)
    assert path.read_text() == "".join(f"{line}\n" for line in lines[:2])
    assert [row["step"] for row in read_metrics(tmp_path)] == [2, 4]
    cut_metrics(tmp_path, 0)
    assert not path.exists()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"step": 1}', '{"step": 2, "lo', '{"step": 3}'], "metrics.jsonl: no metrics of a run"),
        (['{"step": 1}', '{"loss": 1}', '{"step": 3}'], "metrics.jsonl: 2 of the 3 steps logged"),
        ([f'{{"step": {step}}}' for step in (1, 2, 3, 3)], "3 of the 3 .* in 4 lines, not each"),
        (["[1]"], "metrics.jsonl: no metrics of a run"),
        ([], "metrics.jsonl: 0 of the 3 steps logged before the last checkpoint"),
    ],
)
def test_metrics_that_lack_a_step_before_the_checkpoint_are_kept_and_named(
    lines: list[str], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(content := "".join(f"{line}\n" for line in lines))
    with pytest.raises(UserError, match=words):
        cut_metrics(tmp_path, 3)
    assert path.read_text() == content


@pytest.mark.parametrize("content", ["{", "[1]", '{"at": "x"}', "\xff"])
def test_a_damaged_list_of_resumptions_is_named(content: str, tmp_path: Path) -> None:
    path = tmp_path / FOLDER / "resumed.jsonl"
    path.parent.mkdir()
    path.write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=r"resumed\.jsonl: not the times .*; take that file away"):
        times_resumed(tmp_path)


def test_weights_are_told_from_others_by_a_sample_of_their_files(tmp_path: Path) -> None:
    (path := tmp_path / "model.safetensors").write_bytes(bytes(10**6))
    (tmp_path / "config.json").write_text("{}")
    before = weights_sha256(tmp_path)
    (tmp_path / "config.json").write_text("{ }")
    assert weights_sha256(tmp_path) == before
    path.write_bytes(bytes(10**6 - 1) + b"1")
    assert weights_sha256(tmp_path) != before
    path.write_bytes(b"")
    assert weights_sha256(tmp_path) not in (before, weights_sha256(tmp_path / "none"))


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


def test_weights_of_another_tokenizers_tokens_are_no_start(tmp_path: Path) -> None:
    place = place_of(tmp_path, 3)
    make(place, 3)
    assert weights_to_start_from(str(tmp_path), "ours") == place  # it does not say its own
    about = {"step": 3, "config": {}, "data": {"tokenizer_sha256": "theirs"}}
    (place / ABOUT).write_text(json.dumps(about))
    for named in (tmp_path, place):
        assert weights_to_start_from(str(named), "theirs") == place
        with pytest.raises(UserError, match=r"^init_from: '.*' was trained on another tokenizer's"):
            weights_to_start_from(str(named), "ours")
