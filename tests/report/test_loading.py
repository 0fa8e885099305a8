"""Where the report finds its records, and that it names those that it cannot read."""

from pathlib import Path

import pytest

from fp8study.report import method_sentences, sentences
from fp8study.report import page as pages
from tests.factories import make_record, store


def test_corrupt_record_is_named(tmp_path: Path) -> None:
    run_dir = store(tmp_path, "reference/box", make_record())
    (run_dir / "run.json").write_text("{")
    report = pages.load_report(tmp_path)
    assert report.runs.empty
    assert "not a run record" in method_sentences.unreadable(report)
    assert "- 1 record at fault or left out: [which]" in sentences.unknown(report)


def test_every_unreadable_record_is_named_on_every_reading(tmp_path: Path) -> None:
    texts = {"corrupt": "{", "newer": '{"schema_version": 3}', "aside": None}
    for name, text in texts.items():
        run_dir = store(tmp_path, "local", make_record(run_id=name))
        if text is None:
            (run_dir / "run.json").rename(run_dir / "run.corrupt1.json")
        else:
            (run_dir / "run.json").write_text(text)
    for _ in range(2):
        text = method_sentences.unreadable(pages.load_report(tmp_path))
        assert "corrupt/run.json: not a run record" in text
        assert "newer/run.json: schema" in text
        assert "set aside" in text
        assert "aside/run.corrupt1.json" in text


def test_results_folder_is_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(pages.RESULTS_VARIABLE, raising=False)
    for name in ("results", "report", "pipelines/studies"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "report")
    assert pages.find_results() == tmp_path / "results"


def test_named_results_folder_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pages.RESULTS_VARIABLE, str(tmp_path / "missing"))
    with pytest.raises(pages.UserError, match=pages.RESULTS_VARIABLE):
        pages.find_results()
