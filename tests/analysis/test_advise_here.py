"""`fp8study advise --measure`: what a layer takes on the GPU at hand is kept, used and said."""

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fp8study.analysis.advice.question import answer, question_for
from fp8study.analysis.laws.beyond import beyond
from fp8study.analysis.laws.cells import cells_of, read_runs
from fp8study.analysis.laws.here import constants_here, find, keep, path_of
from fp8study.analysis.laws.shape import shape_of
from fp8study.analysis.laws.speed import predicted_step
from fp8study.cli import app
from fp8study.core.errors import UserError
from fp8study.report.advice_text import advice_text
from tests.analysis.test_advise import H100, RESULTS
from tests.checkout import ROOT


def law_layers(asked, gpu, slower=1.0):
    """Return what the law says of one layer, in the shape of a measurement."""
    shape = shape_of(asked.config.model)
    layers = {}
    for way in asked.layers_to_measure():
        alone = dataclasses.replace(way, num_gpus=1)
        law = predicted_step(alone, shape, gpu)
        parts = ("gemm", "attention", "elementwise", "casts", "sharding")
        device = sum(law.parts()[name] for name in parts) / shape.num_layers
        tokens = asked.config.tokens_per_step
        device -= 6e-9 * tokens * shape.head_parameters / 760.6 / shape.num_layers
        layers[way.precision] = {"device_ms": slower * device, "host_ms": slower * law.host
                                 / shape.num_layers}  # fmt: skip
    names = ("model", "micro_batch_size", "sequence_length", "strategy", "master_dtype")
    return {name: getattr(asked.config, name) for name in names} | {
        "at": "2026-11-22T12:00:00+00:00", "gpu_name": H100, "layers": layers,
        "gemm_tflops": {"bf16": 700 / slower, "fp8_tensorwise": 1300 / slower,
                        "fp8_rowwise": 1250 / slower},
        "copy_tb_per_s": 2.6 / slower, "link_gb_per_s": None,
    }  # fmt: skip


@pytest.fixture
def asked_on_an_h100():
    return question_for([(H100, 79.6)], "llama-3.2-1b", 1, 4096, 3, None)  # no record has that


def test_layers_measured_here_are_what_the_law_then_says_of_them(asked_on_an_h100):
    asked, shape = asked_on_an_h100, shape_of("llama-3.2-1b")
    for slower in (1.0, 2.0):
        measured = law_layers(asked, asked.gpu, slower)
        for way in asked.layers_to_measure():
            found = constants_here(measured, way, shape, asked.gpu)
            law = predicted_step(way, shape, None, found)
            told = measured["layers"][way.precision]
            head = 6e-9 * asked.config.tokens_per_step * shape.head_parameters / found.bf16_tflops
            gemm = law.gemm - head - 3 * found.kernel_us * 1e-3
            device = gemm + law.attention + law.elementwise + law.casts + law.sharding
            assert device / shape.num_layers == pytest.approx(told["device_ms"], rel=1e-3)
            assert law.host / shape.num_layers == pytest.approx(told["host_ms"])


def test_what_was_measured_here_is_kept_and_used_and_said(asked_on_an_h100, tmp_path):
    asked = asked_on_an_h100
    (tmp_path / "reference").symlink_to(RESULTS)
    before = answer(asked, tmp_path)
    for slower in (3.0, 2.0):  # the newest counts
        keep(law_layers(asked, asked.gpu, slower), tmp_path)
    assert len(json.loads(path_of(tmp_path).read_text())) == 1
    found = answer(asked, tmp_path)
    assert before.measured is None and found.measured["copy_tb_per_s"] == 1.3
    rates = [a.options[0].tokens_per_second_per_gpu.value for a in (before, found)]
    assert rates[0] > 1.5 * rates[1]
    text = advice_text(found)
    assert "Measured here" in text and "1.30 TB/s" in text and "measured.json" in text
    assert not found.beyond
    shape = shape_of(asked.config.model)
    timed = cells_of(read_runs(ROOT / "results"))
    unseen = beyond(asked.config, shape, asked.gpu, "NVIDIA H100 NVL", True, timed)
    assert any("scaled by the copy measured here" in line for line in unseen)
    other = question_for([(H100, 79.6)], "llama-3.2-3b", 1, 4096, 1, None)
    assert answer(other, tmp_path).measured is None
    for damaged in ("{", "{}", '[{"gpu_name": 1}]'):
        path_of(tmp_path).write_text(damaged)
        with pytest.raises(UserError, match=r"measured.json' is damaged; delete it"):
            answer(asked, tmp_path)


def test_a_link_that_was_measured_is_one_of_as_many_gpus(tmp_path: Path) -> None:
    one, two, four = (
        question_for([(H100, 79.6)] * number, "llama-3.2-1b", None, 4096, 1, None)
        for number in (1, 2, 4)
    )
    of_two = {"strategy": two.config.strategy, "num_gpus": 2, "link_gb_per_s": 90.0}
    keep(law_layers(one, one.gpu, 1.0) | of_two, tmp_path)
    found = [find(asked.config, H100, tmp_path) for asked in (two, four)]
    assert [each and each["link_gb_per_s"] for each in found] == [90.0, None]
    assert all(each and each["copy_tb_per_s"] == 2.6 for each in found)


def test_own_runs_that_do_not_count_are_told_beside_what_others_measured(tmp_path):
    asked = question_for([], "llama-3.1-8b", 1, 4096, 1, "h200")
    (tmp_path / "reference").symlink_to(RESULTS)
    before = answer(asked, RESULTS.parent).verdict
    for name in before.lead_pct.run_ids:
        machine, study, run = name.split("/")
        record = json.loads((RESULTS / machine / study / run / "run.json").read_text())
        record["results"]["num_alloc_retries"] = 1
        (own := tmp_path / "local" / study / run).mkdir(parents=True)
        (own / "run.json").write_text(json.dumps(record))
    found = answer(asked, tmp_path)
    assert before.num_void == 0 and found.verdict.num_void == len(before.lead_pct.run_ids)
    assert dataclasses.replace(found.verdict, num_void=0) == before
    said = " ".join(advice_text(found).split())
    assert f"Not counted: {found.verdict.num_void} runs of this setting, in which torch" in said


def test_only_the_gpu_that_is_here_can_be_measured():
    named = question_for([], "llama-3.2-1b", 1, 4096, 1, "h100")
    with pytest.raises(UserError, match="not one that is named; leave out --gpu"):
        named.layers_to_measure()


def test_measuring_is_refused_without_a_gpu_and_before_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, ["advise", "--model", "llama-3.2-1b", "--measure"])
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert "no NVIDIA GPU is visible here" in done.stderr
