"""What `plan` says of a study, and of all of them."""

import re
from pathlib import Path

import pytest

from fp8study.core.studies import load_study
from tests.checkout import ROOT, fp8study
from tests.factories import finish


@pytest.mark.usefixtures("checkout")
def test_plan_prints_every_run_and_starts_nothing() -> None:
    done = fp8study("plan", "smoke", "--set", "num_steps=21")
    assert (done.returncode, done.stderr) == (0, "")
    text = " ".join(done.stdout.split())
    assert text.startswith("Study smoke: ")
    assert "6 runs, 0 done, 6 to do" in text
    assert "Losses are judged at ±0.25 % of BF16's." in text
    assert "Synthetic text is easier than real text" in text
    assert "num_steps=21" in text
    assert "corpus=synthetic" in text
    runs = [line.split() for line in done.stdout.splitlines() if line.startswith("  to do ")]
    assert {len({row[2] for row in runs}), len({tuple(row[3:]) for row in runs})} == {6}
    assert not Path("results").exists()


@pytest.mark.parametrize("study", ["bench", "tuned-switches", "corner-arms", "smoke"])
@pytest.mark.usefixtures("checkout")
def test_a_plan_tells_its_runs_apart_within_80_columns(study: str) -> None:
    text = fp8study("plan", study).stdout
    assert max(map(len, text.splitlines())) <= 80
    entries = re.split(r"^  (?:to do|cannot) +", text, flags=re.MULTILINE)[1:]
    shown = [" ".join(entry.split()[1:]) for entry in entries][: len(load_study(study).runs)]
    assert len(set(shown)) == len(shown) == len(load_study(study).runs)


@pytest.mark.usefixtures("checkout")
def test_plan_without_a_name_is_the_smoke_study_on_a_machine_without_gpu() -> None:
    assert fp8study("plan").stdout.startswith("Study smoke: ")


@pytest.mark.usefixtures("checkout")
def test_an_unquoted_pattern_and_none_are_what_they_say() -> None:
    done = fp8study("plan", "smoke", "--set", "skip=*.o_proj", "--set", "noise_at_steps=none")
    assert (done.returncode, done.stderr) == (0, "")
    assert "skip=*.o_proj" in done.stdout
    assert "compile=false" in done.stdout
    assert "num_gpus=1" in done.stdout
    none_fits = fp8study("plan", "smoke", "--set", "num_gpus=64", "--set", "strategy=fsdp2")
    assert "None of them can be run here" in " ".join(none_fits.stdout.split())


@pytest.mark.usefixtures("checkout")
def test_plan_tells_done_runs_from_those_to_do() -> None:
    run = load_study("smoke").runs[2]
    finish(run)
    done = fp8study("plan", "smoke")
    assert "6 runs, 1 done, 5 to do" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  done ")]
    assert line.split()[1] == run.run_id.rpartition("-")[2]


@pytest.mark.usefixtures("checkout")
def test_studies_are_listed_with_their_questions() -> None:
    done = fp8study("plan", "--list")
    assert done.returncode == 0
    first, *names = [
        line.split()[0] for line in done.stdout.splitlines() if not line.startswith(" ")
    ]
    assert first == "machine,"  # which is made, and no file
    assert names == sorted(path.stem for path in (ROOT / "pipelines/studies").glob("*.yaml"))
    assert done.stdout.count("?") >= len(names)
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_broken_study_is_named_after_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    studies = tmp_path / "pipelines/studies"
    studies.mkdir(parents=True)
    smoke = (ROOT / "pipelines/studies/smoke.yaml").read_text()
    (studies / "folder.yaml").mkdir()
    for name, text in (("broken", "base: {modl: x}"), ("smoke", smoke)):
        (studies / f"{name}.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    done = fp8study("plan", "--list")
    assert done.returncode == 2 and "\nsmoke " in done.stdout
    assert "broken.yaml" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("smoke", "--budget", "30"), "--budget: 30 is for the study machine, and 'smoke' names"),
        (("machine",), "STUDY: 'machine' is for GPUs"),
        (("machine", "--set", "modl=x"), "--set: unknown parameter 'modl'"),
    ],
)
def test_a_budget_is_for_the_machines_study_and_that_for_gpus(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = fp8study("plan", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"fp8study: {words}")


def test_outside_a_checkout_the_list_of_studies_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = fp8study("plan", "--list")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("fp8study: studies: there are none in ")
