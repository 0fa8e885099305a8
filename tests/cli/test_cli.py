import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fp8study.core.records import read_record, write_record
from fp8study.core.studies import load_study
from fp8study.report.showing import instruments_text
from tests.factories import make_record
from tests.instrument_factories import instruments_of

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout without results, so that nothing here touches real ones."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(CHECKOUT / "pipelines", root / "pipelines")
    return root


def fp8study(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fp8study.cli", *arguments],
        cwd=checkout,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "smok"], ["STUDY", "'smok'", "did you mean 'smoke'", "choose one of"]),
        (["plan", "../secret"], ["STUDY", "choose one of"]),
        (["plan", "smoke", "--set", "seed"], ["--set", "'seed'", "write field=value"]),
        (
            ["plan", "smoke", "--set", "sed=1"],
            ["--set: unknown parameter 'sed'", "did you mean 'seed'"],
        ),
        (["plan", "smoke", "--set", "precision=[bf16"], ["--set", "precision"]),
        (["plan", "smoke", "--set", "precision=[bf16]"], ["precision", "choose one of bf16"]),
        (["reproduce", "smoke", "--set", "precision=fp8_tensr"], ["precision", "fp8_tensorwise"]),
        (["reproduce", "smoke", "--set", "num_gpus=9999"], ["num_gpus", "CPU cores", "lower it"]),
        (["run", "--set", "precision=int4"], ["precision", "'int4'", "choose one of bf16"]),
        (["run", "--set", "model=tiny-lama"], ["model", "did you mean 'tiny-llama'"]),
        (["run", "--set", "corpus=tinystory"], ["corpus", "did you mean 'tinystories'"]),
        (["report"], ["report", "_quarto.yml", "checkout"]),
        (["compare", "pipelines", "nowhere"], ["A", "'pipelines'", "run.json", "give a folder"]),
    ],
    ids=lambda value: value[-1],
)
def test_mistake_is_one_line_on_stderr_and_status_2(
    arguments: list[str], words: list[str], checkout: Path
) -> None:
    done = fp8study(checkout, *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("fp8study: ")
    assert [word for word in words if word not in line] == []
    assert not (checkout / "results" / "local" / "adhoc").exists()


def test_plan_prints_every_run_and_starts_nothing(checkout: Path) -> None:
    done = fp8study(checkout, "plan", "smoke", "--set", "num_steps=21")
    assert (done.returncode, done.stderr) == (0, "")
    question, where, margin, *runs = done.stdout.splitlines()
    assert question.startswith("Study smoke: ")
    assert "6 runs, 0 done, 6 to do" in where
    assert margin.startswith("Losses are judged at ±0.25 % of BF16's.")
    assert len(runs) == 6
    assert all(line.startswith("  to do ") and " 21 steps " in line for line in runs)
    assert not (checkout / "results").exists()


def test_plan_without_a_name_is_the_smoke_study_on_a_machine_without_gpu(checkout: Path) -> None:
    assert fp8study(checkout, "plan").stdout.startswith("Study smoke: ")


def test_plan_tells_done_runs_from_those_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(CHECKOUT / "pipelines", tmp_path / "pipelines")
    monkeypatch.chdir(tmp_path)
    run = load_study("smoke").runs[2]
    run.run_dir.mkdir(parents=True)
    write_record(make_record(config=run.config.to_dict()), run.run_dir)
    done = fp8study(tmp_path, "plan", "smoke")
    assert "6 runs, 1 done, 5 to do" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  done ")]
    assert line.endswith(run.run_id)


def test_studies_are_listed_with_their_questions(checkout: Path) -> None:
    done = fp8study(checkout, "studies")
    assert done.returncode == 0
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == sorted(path.stem for path in (checkout / "pipelines/studies").glob("*.yaml"))
    assert all(line.endswith("?") for line in done.stdout.splitlines())


def test_launcher_and_command_line_import_no_torch(checkout: Path) -> None:
    code = (
        "import sys, fp8study.cli, fp8study.run.launch, fp8study.run.pipeline; print(*sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "torchao"} & set(done.stdout.split())


def test_comparing_prints_a_table_and_imports_no_torch(checkout: Path) -> None:
    for side in "ab":
        (checkout / side).mkdir()
        write_record(make_record(), checkout / side)
    code = "import sys; from fp8study.cli import app\n" + (
        "try: app(['compare', 'a', 'b'])\nfinally: print(*sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    assert "llama-3.2-1b × 1, BF16" in done.stdout
    assert not {"torch", "transformers", "torchao"} & set(done.stdout.split())
    assert '"estimate": 1.0' in fp8study(checkout, "compare", "a", "b", "--json").stdout


def test_show_tells_what_was_measured_with_every_denominator(checkout: Path) -> None:
    record = make_record(
        run_id="measured",
        instruments=instruments_of("fp8_tensorwise", 4),
        results={"bf16_peak_tflops": 989.0, "mfu_mixed_peak_pct": 25.0,
                 "mixed_peak_tflops": 1500.0, "mfu_achievable_pct": 40.0},
    )  # fmt: skip
    write_record(record, checkout)
    done = fp8study(checkout, "show", ".")
    assert done.returncode == 0
    for words in (
        "% of the dense BF16 peak, 989 TFLOP/s",
        "25.0 % of the mixed peak, 1500 TFLOP/s",
        "of the GEMM peak measured here, 1100 TFLOP/s",
        "23.00 GiB steady peak", "0.0120 J per token", "4.000 GiB  all_gather of uint8",
        "20.0 ms  gemm fp8",
    ):  # fmt: skip
        assert words in done.stdout
    write_record(make_record(run_id="bare", results={}), checkout)
    assert "energy" not in fp8study(checkout, "show", "run.json").stdout  # absent, not zero


def test_records_of_before_the_peaks_were_kept_are_shown_without_them() -> None:
    """27 committed records, those of `quick` and `document-a`, have an MFU and no denominator."""
    reference = Path(__file__).parents[2] / "results" / "reference"
    older = [
        record
        for path in sorted(reference.glob("*/*/*/run.json"))
        if "bf16_peak_tflops" not in (record := read_record(path)).results
    ]
    assert len(older) == 27
    for record in older:
        lines = instruments_text(record).splitlines()
        assert any(line.endswith("% of the dense BF16 peak") for line in lines)


@pytest.mark.parametrize("command", ["show", "audit"])
def test_a_folder_without_a_record_is_named(checkout: Path, command: str) -> None:
    done = fp8study(checkout, command, "nowhere")
    assert done.returncode == 2
    assert "'nowhere' holds no record; give the folder of a run" in done.stderr


def test_ceilings_want_a_gpu(checkout: Path) -> None:
    done = fp8study(checkout, "ceilings", "--model", "llama-3.1-8b")
    assert done.returncode == 2
    assert "no NVIDIA GPU is visible" in done.stderr


def test_outside_a_checkout_the_list_of_studies_says_so(tmp_path: Path) -> None:
    done = fp8study(tmp_path, "studies")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("fp8study: studies: there are none in ")
