"""What is kept is made again when a file that it was made of has changed, and only then."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from fp8study.core.errors import UserError
from fp8study.core.files import kept, writing


@pytest.fixture
def calls() -> list[int]:
    return []


def test_it_is_made_once_until_a_file_changes(tmp_path: Path, calls: list[int]) -> None:
    source = tmp_path / "run.json"
    source.write_text("one")

    def make() -> str:
        calls.append(1)
        return source.read_text()

    assert [kept("test", [source], make) for _ in range(3)] == ["one"] * 3
    assert len(calls) == 1
    source.write_text("two")  # of the same size
    os.utime(source, ns=(0, 1))
    assert kept("test", [source], make) == "two"
    more = tmp_path / "more.json"
    more.touch()
    kept("test", [source, more], make)
    kept("test", [source, more], make)
    assert len(calls) == 3


def test_a_closed_folder_costs_time_and_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FP8STUDY_CACHE", str(tmp_path / "file" / "below"))
    assert kept("test", [], lambda: 3) == 3


def test_a_damaged_kept_result_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8STUDY_CACHE", str(tmp_path))
    assert kept("thing", [], lambda: [1]) == [1]
    place = tmp_path / "thing.pickle"
    whole = place.read_bytes()
    key = pickle.dumps(pickle.loads(whole))
    damages = [b"", b"no pickle", bytes(range(256)), whole[:-4]]
    for damage in (*damages, key + b"\x80\x05K\x01K\x02R.", key + b"I12x\n."):
        place.write_bytes(damage)
        assert kept("thing", [], lambda: [2]) == [2]
        assert kept("thing", [], lambda: [3]) == [2]


def test_an_error_without_a_reason_of_the_system_keeps_its_own() -> None:
    """As NumPy's, of a file that was written in part."""
    why = r"cache: cannot write 'x' \(3 requested and 1 written\); "
    with pytest.raises(UserError, match=why), writing("cache", Path("x")):
        raise OSError("3 requested and 1 written")
