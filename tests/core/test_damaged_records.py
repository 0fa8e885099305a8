"""One damaged record is set aside and named, whatever is wrong with it; the rest is used."""

from __future__ import annotations

import dataclasses
import gzip
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8study.analysis.arms import read_folder
from fp8study.analysis.laws.cells import read_runs
from fp8study.core.errors import UserError
from fp8study.core.files import locked
from fp8study.core.records import load_runs, read_metrics, read_record, read_run
from fp8study.report.export import tables_of
from tests.factories import loss_curve, make_record, store

Damage = Callable[[Path], None]


def field(path: str, value: Any) -> Damage:
    """Put a value where a dotted path says."""

    def damage(run_dir: Path) -> None:
        file = run_dir / "run.json"
        content = json.loads(file.read_text())
        *parents, last = path.split(".")
        place = content
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = value
        file.write_text(json.dumps(content))

    return damage


def metrics(content: bytes) -> Damage:
    return lambda run_dir: (run_dir / "metrics.jsonl").write_bytes(content) and None


DAMAGES: dict[str, Damage] = {
    "warnings null": field("warnings", None),
    "a rate below zero": field("results.tokens_per_second_per_gpu", -5.0),
    "a rate that its steps are too slow for": field("results.tokens_per_second_per_gpu", 90_000.0),
    "a step of no time": field("results.step_time_ms_median", 0),
    "warnings a text": field("warnings", "one"),
    "a warning that is a number": field("warnings", [1]),
    "instruments a text": field("instruments", "none"),
    "a section of instruments a text": field("instruments.memory", "none"),
    "start-up a list": field("instruments.startup", [1, 2]),
    "a GEMM without dtypes": field("instruments.step", {"gemm": [{"tflop": 1.0, "num": 1}]}),
    "GEMMs that are numbers": field("instruments.step", {"gemm": [1, 2]}),
    "a collective of unknown size": field(
        "instruments.step", {"communication": [{"collective": "all_gather", "dtype": "x"}]}
    ),
    "blocks of unequal number": field("instruments.overhead", {"plain_ms": [1.0]}),
    "an audit of one field": field("audit", {"num_linear": 3}),
    "no model": field("config.model", None),
    "a precision that is a number": field("config.precision", 8),
    "a precision that is unknown": field("config.precision", "fp4"),
    "no results": field("results", {}),
    "results that are all null": field("results", {"loss_start": None, "steps_completed": None}),
    "no GPUs": field("config.num_gpus", None),
    "steps in words": field("config.num_steps", "many"),
    "a logging interval in words": field("config.log_every", "often"),
    "a flag in words": field("config.compile", "yes"),
    "patterns that are one text": field("config.skip", "lm_head"),
    "a speed in words": field("results.tokens_per_second_per_gpu", "fast"),
    "an infinite count": field("results.steps_completed", float("inf")),
    "a loss that its steps do not have": field("results.loss_last20_mean", 4.0),
    "losses of another run": metrics(
        b"".join(b'{"step": %d, "loss": 3.5}\n' % n for n in range(1, 61))
    ),
    "a loss that is a list": field("results.loss_last20_mean", [5.0]),
    "scores that are numbers": field("results.validation_losses", [5.0, 4.0]),
    "a GPU that is a number": field("machine.gpu_name", 200),
    "a GPU without its id": field("machine.gpus", [{"index": 0}]),
    "a GPU without its index": field("machine.gpus", [{"uuid": "GPU-0"}]),
    "a GPU whose id is null": field("machine.gpus", [{"index": 0, "uuid": None}]),
    "GPUs null": field("machine.gpus", None),
    "versions that are numbers": field("versions.torch", 2.11),
    "a margin in words": field("judgement.margin_pct", "small"),
    "noise without points": field("noise", {"points": 3}),
    "a start that is no time": field("started_at", "yesterday"),
    "an end without a zone": field("ended_at", "2000-01-01T00:00:00"),
    "binary metrics": metrics(bytes(range(256))),
    "metrics that are no UTF-8": metrics(b'{"step": 1, "loss": "\xff"}\n'),
    "numbers for lines of metrics": metrics(b"1\n2\n3\n"),
    "a step in words": metrics(b'{"step": "one", "loss": 1.0}\n'),
    "no metrics": lambda run_dir: (run_dir / "metrics.jsonl").unlink(),
    "emptied metrics": metrics(b""),
    "metrics cut short": metrics(b'{"step": 1, "loss": 5.0}\n{"step": 2, "lo'),
    "a line taken out": metrics(b"".join(b'{"step": %d}\n' % n for n in range(2, 61))),
    "a line in another's place": metrics(
        b"".join(b'{"step": %d}\n' % max(n, 2) for n in range(1, 61))
    ),
    "a doubled line": metrics(b"".join(b'{"step": %d}\n' % n for n in [*range(1, 61), 60])),
    "a step that is another's": metrics(
        b"".join(b'{"step": %d}\n' % n for n in [*range(1, 60), 99])
    ),
    "steps out of order": metrics(b"".join(b'{"step": %d}\n' % n for n in range(60, 0, -1))),
    "a hole in the metrics": metrics(b'{"step": 1}\n{"st\n{"step": 3}\n'),
}


def _store(results: Path, run_id: str, **changes: Any) -> Path:
    record = make_record(run_id=run_id, **changes)
    return store(results, "local", record, loss_curve(60, 5.0))


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_named(name: str, tmp_path: Path) -> None:
    run_dir = _store(tmp_path, "bad")
    read_record(run_dir / "run.json")  # sound so far
    DAMAGES[name](run_dir)
    with pytest.warns(UserWarning, match=r"left out: .*bad/") as caught:
        assert load_runs(tmp_path) == []
    assert len(caught) == 1


@pytest.mark.parametrize("name", DAMAGES)
def test_commands_that_read_one_folder_refuse_what_the_report_leaves_out(
    name: str, tmp_path: Path
) -> None:
    run_dir = _store(tmp_path, "bad")
    DAMAGES[name](run_dir)
    if name in ("no metrics", "emptied metrics"):  # a record may be kept without them
        assert read_run(run_dir).run_id == read_folder(run_dir, "A")[0].run_id == "bad"
        return
    for read in (read_run, lambda folder: read_folder(folder, "A")):
        with pytest.raises(UserError, match="bad/"):
            read(run_dir)


@pytest.mark.parametrize(
    ("status", "logged"), [("diverged", [5, 10, 15, 20]), ("completed", [5, 10, 15, 20, 24])]
)
def test_a_run_has_the_steps_that_it_logged(status: str, logged: list[int], tmp_path: Path) -> None:
    """Every fifth, and of a completed run the last."""
    run_dir = _store(tmp_path, "bad", status=status)
    field("results.steps_completed", 24)(run_dir)
    field("config.log_every", 5)(run_dir)

    def put(steps: list[int]) -> None:
        metrics(b"".join(b'{"step": %d}\n' % step for step in steps))(run_dir)

    put(logged)
    assert len(load_runs(tmp_path)) == 1
    for steps in (logged[:-1], [], [*logged, 25], [*logged[:1], *logged]):
        put(steps)
        left, lines = len({*logged} & {*steps}), len(steps)
        said = rf"bad/.* {left} of {len(logged)} logged steps in {lines} lines, .*do it again"
        with pytest.warns(UserWarning, match=said):
            assert load_runs(tmp_path) == []


def test_all_tables_are_those_of_the_sound_records(tmp_path: Path) -> None:
    for seed in range(3):
        for precision in ("bf16", "fp8_rowwise"):
            _store(tmp_path, f"{precision}-{seed}", seed=seed, precision=precision)
    sound = tables_of(load_runs(tmp_path))
    for number, damage in enumerate(DAMAGES.values()):
        damage(_store(tmp_path, f"bad-{number}", seed=number))
    with pytest.warns(UserWarning, match="left out"):
        found = tables_of(load_runs(tmp_path))
    assert found.keys() == sound.keys()
    assert len(found) > 1
    for name, table in sound.items():
        assert table.equals(found[name]), name


def test_a_torn_archive_is_damage(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl.gz").write_bytes(gzip.compress(b'{"step": 1}\n' * 9)[:-9])
    with pytest.raises(UserError, match=r"metrics\.jsonl\.gz: no metrics of a run"):
        read_metrics(tmp_path)


def test_a_copied_run_is_left_out_and_named(tmp_path: Path) -> None:
    run = store(tmp_path, "local", make_record())
    shutil.copytree(run, run.with_name("zz-copy"))
    with pytest.warns(UserWarning, match=f"zz-copy: a copy of {run}; remove one of them"):
        (found,) = load_runs(tmp_path)
    assert found.run_dir == run


def test_a_run_that_was_copied_from_elsewhere_counts_once_and_not_as_ones_own(
    tmp_path: Path,
) -> None:
    record = make_record(machine={"host_hash": "ab" * 8})
    theirs = store(tmp_path, "reference/box", record)
    for place in ("local/quick", "reference/box/zz"):
        shutil.copytree(theirs, tmp_path / place / theirs.name)
    own = store(tmp_path, "local", dataclasses.replace(record, run_id="own"))
    with pytest.warns(UserWarning, match=f"a copy of {theirs}; remove one of them") as caught:
        found = load_runs(tmp_path)
    assert [run.run_dir for run in found] == [own, theirs]
    assert len(caught) == 2
    with pytest.warns(UserWarning, match="/zz/.*: a copy; remove it"):
        (committed,) = read_runs(tmp_path)
    with pytest.warns(UserWarning, match="/local/.*: a copy; remove it"):
        (mine,) = read_runs(tmp_path, "local", but_for=[committed])
    assert mine[1].run_id == "own"


def test_a_backup_is_the_copy_wherever_it_is_in_the_alphabet(tmp_path: Path) -> None:
    """Also of a record that does not name its host: a clock gave it a time."""
    run = store(tmp_path, "local", make_record(results={"first_step_seconds": 30.25}))
    shutil.copytree(run.parent, tmp_path / "local" / "a-backup")
    with pytest.warns(UserWarning, match=f"a-backup/.*: a copy of {run}; remove one of them"):
        (found,) = load_runs(tmp_path)
    assert found.run_dir == run


def test_losses_without_a_record_are_named_unless_the_run_goes_on(tmp_path: Path) -> None:
    run = store(tmp_path, "local", make_record(), loss_curve(3, 5.0))
    (run / "run.json").unlink()
    with pytest.warns(UserWarning, match=f"left out: {run}: it ended without a record"):
        assert load_runs(tmp_path) == []
    with warnings.catch_warnings(), locked(run / ".lock", "run_dir"):
        warnings.simplefilter("error")
        assert load_runs(tmp_path) == []


def test_records_read_without_their_steps_are_named_too(tmp_path: Path) -> None:
    run_dir = store(tmp_path, "reference/box", make_record())
    (run_dir / "run.json").write_text("{")
    with pytest.warns(UserWarning, match=r"left out: .*run\.json"):
        assert read_runs(tmp_path) == []


def test_older_records_learn_of_their_tokens_from_others(tmp_path: Path) -> None:
    for name, data in {
        "old": {"tokenizer_sha256": "01"},
        "other text": {"tokenizer_sha256": "01", "corpus_sha256": "cd" * 32},
        "other tokenizer": {"tokenizer_sha256": "02"},
        "unknown tokenizer": {},
        "new": {"tokenizer_sha256": "01", "unigram_loss": 6.5},
    }.items():
        store(tmp_path, "local", make_record(run_id=name, data=data), loss_curve(200, 5.0))
    found = {run.record.run_id: run.record.data.get("unigram_loss") for run in load_runs(tmp_path)}
    assert found == dict.fromkeys(found) | {"old": 6.5, "new": 6.5}
