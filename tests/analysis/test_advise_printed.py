"""What `fp8study advise` prints: an answer in short or in full, JSON, and refusals in a line."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fp8study.analysis.advice.figures import MEASURED
from fp8study.cli import app
from fp8study.core.errors import UserError
from fp8study.report.advice_text import advice_text
from tests.analysis.test_advise import H100, advice, advice_for
from tests.checkout import ROOT


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu": None}, "no NVIDIA GPU is visible here; name one of"),
        ({"gpu": "h10"}, "'h10' is not known; name one of"),  # a number names a GPU
        ({"gpu": "h30"}, "'h30' is not known; name one of"),
        ({"gpu": "a100"}, "A100 has no FP8 tensor cores"),
        ({"gpu": "a100-80gb"}, "A100 has no FP8 tensor cores"),
        ({"gpu": "A100 40GB"}, "A100 has no FP8 tensor cores"),
        ({"gpu": "gh200-80gb"}, "'gh200-80gb' is not known .did you mean 'gh200-96gb'"),
        ({"gpu": "h100-96gb"}, "'h100-96gb' is not known .did you mean 'h100-80gb'"),
        ({"num_gpus": 2048}, "outside 1 to 1024; try 1024"),
        ({"sequence_length": 7}, "no multiple of 16 tokens"),
        ({"num_gpus": 0}, "outside 1 to 1024; try 1"),
        ({"num_gpus": 12}, "12 does not fill nodes of 8; try 8 or 16, or another --gpus-per-"),
        ({"sequence_length": 10**6}, "positions of 'llama-3.2-1b'"),
        ({"model": "nope"}, "'nope' is no preset"),
    ],
)
def test_refuses_in_one_line(changes, words):
    with pytest.raises(UserError, match=words) as caught:
        advice(**{"model": "llama-3.2-1b", **changes})
    assert "\n" not in str(caught.value)


def test_a_gpu_without_fp8_is_answered_for():
    asked = ["advise", "--model=llama-3.1-8b", "--gpu=a100"]
    for options in ([], ["--json"]):
        done = CliRunner().invoke(app, asked + options)
        assert done.exit_code == 0 and "BF16. A100 has no FP8 tensor cores" in done.stdout


def test_what_is_asked_fits_one_line_of_eighty_columns():
    first = advice_text(
        advice_for([(H100, 79.6)] * 8, "llama-3.2-1b-untied", None, 131072, 1, None)
    )
    assert H100 in first.splitlines()[0] and len(first.splitlines()[0]) <= 80


def test_the_command_prints_json(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    asked = ["advise", "--model", "llama-3.1-8b", "--gpu", "h200", "--micro-batch-size", "1"]
    done = CliRunner().invoke(app, [*asked, "--json"])
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["options"][0]["tokens_per_second_per_gpu"]["kind"] == MEASURED


@pytest.mark.parametrize(
    "asked", [("llama-3.1-8b", 1, 4096, 1), ("llama-3.2-1b", 2, 4096, 2), ("llama-3.1-70b", 8)]
)
def test_the_shorter_text_leaves_out_and_changes_nothing(asked):
    found = advice(*asked)
    whole, short = (advice_text(found, in_full).splitlines() for in_full in (True, False))
    kept = [line for line in short[:-1] if line]
    assert [line for line in whole if line in kept] == kept
    assert short[-1].startswith("--details") and len(short[-1]) <= 80
    text = "\n".join(short)
    for part in ("the time of a step", "Layers in FP8", "nearest evidence", "predictions so far"):
        assert part in "\n".join(whole) and part not in text
    assert all(command in text for command in found.commands)


def test_advice_needs_no_torch():
    asked = ["advise", "--model", "llama-3.2-1b", "--gpu", "h200"]
    code = f"""
import sys
from fp8study.cli import app
try:
    app({asked!r})
except SystemExit as end:
    assert not end.code
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
