"""What commands show of records: `show`, `audit` and `compare`."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fp8study.core.records import read_record, write_record
from fp8study.report.showing import instruments_text
from tests.checkout import ROOT, fp8study, run_python
from tests.factories import CONFIG, make_record
from tests.instrument_factories import instruments_of


def test_a_damaged_record_is_told_with_one_remedy(checkout: Path) -> None:
    (checkout / "run.json").write_text("{")
    done = fp8study("compare", str(checkout), str(checkout))
    assert done.returncode == 2
    assert re.fullmatch(
        r"fp8study: A: \S+: not a run record \([^;]*\); move it away, and do that run again\n",
        done.stderr,
    )


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (
            {"config": CONFIG | {"precision": "fp4"}},
            "config.precision: 'fp4' is none of bf16, fp16, fp8_tensorwise",
        ),
        ({"results": {}}, "results: none, but the run has completed"),
    ],
)
def test_a_completed_run_that_cannot_be_is_not_shown(
    damage: dict[str, Any], told: str, checkout: Path
) -> None:
    (checkout / "run.json").write_text(json.dumps(vars(make_record()) | damage))
    done = fp8study("show", ".")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert f"run.json: not a run record ({told}" in line


def test_launcher_and_comparing_import_no_torch(checkout: Path) -> None:
    for side in "ab":
        (checkout / side).mkdir()
        write_record(make_record(), checkout / side)
    code = (
        "import sys, fp8study.run.launch, fp8study.run.pipeline; from fp8study.cli import app\n"
        + ("try: app(['compare', 'a', 'b'])\nfinally: print(*sys.modules)")
    )
    done = run_python(checkout, "-c", code)
    assert "llama-3.2-1b × 1, BF16" in done.stdout
    assert not {"torch", "transformers", "torchao"} & set(done.stdout.split())
    assert '"estimate": 1.0' in fp8study("compare", "a", "b", "--json").stdout


def test_comparisons_fit_80_columns(checkout: Path) -> None:
    for side in "ab":
        for number, precision in enumerate(["bf16", "fp8_tensorwise"] * 3):
            folder = checkout / side / str(number)
            folder.mkdir(parents=True)
            config = make_record().config | {"precision": precision, "repeat": number // 2}
            write_record(make_record(config=config), folder)
    for more in ([], ["--reference", "precision=bf16"]):
        done = fp8study("compare", "a", "b", *more)
        assert done.returncode == 0, done.stderr
        assert max(map(len, done.stdout.splitlines())) <= 80


def test_show_tells_what_was_measured_with_every_denominator(checkout: Path) -> None:
    record = make_record(
        run_id="measured",
        instruments=instruments_of("fp8_tensorwise", 4),
        results={"bf16_peak_tflops": 989.0, "mfu_mixed_peak_pct": 25.0,
                 "mixed_peak_tflops": 1500.0, "mfu_achievable_pct": 40.0},
    )  # fmt: skip
    write_record(record, checkout)
    done = fp8study("show", ".")
    assert done.returncode == 0
    for words in (
        "% of the dense BF16 peak, 989 TFLOP/s",
        "25.0 % of the mixed peak, 1500 TFLOP/s",
        "of the GEMM peak measured here, 1100 TFLOP/s",
        "23.00 GiB steady peak", "0.0120 J per token", "4.000 GiB  all_gather of uint8",
        "20.0 ms  gemm fp8", "5.5000 nats, mean of the last steps, 20 at most",
    ):  # fmt: skip
        assert words in done.stdout
    write_record(make_record(run_id="bare", results={}), checkout)
    assert "energy" not in fp8study("show", "run.json").stdout  # absent, not zero


@pytest.mark.parametrize("study", ["quick", "document-a"])
def test_records_older_than_the_instruments_are_shown(study: str) -> None:
    paths = sorted((ROOT / "results/reference/h200x4" / study).glob("*/run.json"))
    assert len(paths) > 11
    for path in paths:
        record = read_record(path)
        assert "tokens/s per GPU" in instruments_text(record)
        assert "of the dense BF16 peak" in instruments_text(record)


@pytest.mark.parametrize("command", ["audit", "show"])
def test_warnings_of_a_run_are_shown(checkout: Path, command: str) -> None:
    audit = read_record(next((ROOT / "results/reference/h200x4/step-trims").glob("*/run.json")))
    warning = "56 % of the weights are in layers that are no nn.Linear"
    config, data = audit.config | {"corpus": "text:a.txt"}, audit.data | {"epochs": 6.4}
    write_record(dataclasses.replace(audit, warnings=[warning], config=config, data=data), checkout)
    done = fp8study(command, ".")
    assert f"  warning   {warning}" in done.stdout
    assert "  warning   its text was read 6.4 times: from the second time on" in done.stdout
    assert done.returncode == 0


def test_an_audit_that_is_not_there_says_why(checkout: Path) -> None:
    write_record(make_record(audit={}), checkout)
    assert "the record is older than the audit" in fp8study("audit", ".").stderr
    write_record(make_record(audit={}, status="failed", results={"steps_completed": 0}), checkout)
    assert "ended before a step was audited (status failed)" in fp8study("audit", ".").stderr


@pytest.mark.usefixtures("checkout")
@pytest.mark.parametrize("command", ["show", "audit"])
def test_a_folder_without_a_record_is_named(command: str) -> None:
    done = fp8study(command, "nowhere")
    assert done.returncode == 2
    assert "'nowhere' holds no record; give the folder of a run" in done.stderr
