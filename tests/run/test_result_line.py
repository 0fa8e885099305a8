"""What a study says of each run on the screen, as it ends."""

from pathlib import Path

from fp8study.core.config import RunConfig
from fp8study.core.studies import PlannedRun
from fp8study.measure.clock import FinishedStep
from fp8study.run.pipeline import _result_line
from fp8study.train.facts import high_loss
from tests.factories import finish


def test_a_run_whose_loss_rose_says_so_as_it_ends(tmp_path: Path) -> None:
    steps = [FinishedStep(n, loss, 1.0) for n, loss in enumerate((7.66, 25.19, 4.0))]
    config = RunConfig(model="tiny-llama").resolved()
    calm = PlannedRun("calm", config, tmp_path / "calm")
    wild = PlannedRun("wild", config, tmp_path / "wild")
    finish(calm, warnings=["training paused for validation: the run has no timings"])
    finish(wild, warnings=[high_loss(config, steps)])

    assert "rose" not in _result_line(calm)
    assert "validation" not in _result_line(calm)
    assert "the loss rose from 7.66 to 25.19 at step 2; see fp8study show" in _result_line(wild)
