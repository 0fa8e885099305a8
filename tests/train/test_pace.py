"""How long a run warms up and how long it is timed, where its length is given in seconds."""

from collections.abc import Callable

import pytest

from fp8study.core.config import make_config
from fp8study.core.errors import UserError
from fp8study.core.records import read_metrics
from fp8study.measure.clock import FinishedStep
from fp8study.train import pace as pace_module
from fp8study.train.pace import Pace
from tests.train.tiny_runs import Run


def run_out(pace: Pace, step_ms: Callable[[int], float]) -> list[FinishedStep]:
    """Do steps as the trainer does, with times of our own."""
    steps: list[FinishedStep] = []
    while len(steps) < pace.num_steps:
        steps.append(FinishedStep(len(steps), 1.0, step_ms(len(steps))))
        if pace.wants_look(len(steps)):
            pace.look(steps)
        assert len(steps) <= 10_000
    return steps


def pace_of(**values: object) -> Pace:
    return Pace(make_config({"num_steps": 10_000, "timed_seconds": 20} | values).resolved())


def seconds(steps: list[FinishedStep]) -> float:
    return sum(step.step_time_ms for step in steps) / 1000


def test_without_seconds_the_configured_steps_are_done() -> None:
    pace = pace_of(timed_seconds=None, num_steps=30, num_warmup_steps=4)
    assert len(run_out(pace, lambda step: 100)) == 30
    assert (pace.first_timed, pace.facts(), pace.warnings()) == (4, {}, [])


@pytest.mark.parametrize("num_warmup_steps", [0, 1, 10])
def test_steady_steps_are_warmed_up_and_timed_for_as_long_as_was_asked(
    num_warmup_steps: int,
) -> None:
    pace = pace_of(num_warmup_steps=num_warmup_steps)
    steps = run_out(pace, lambda step: 30_000 if step == 0 else 100)  # the first one compiles
    assert pace.first_timed is not None
    assert 20 <= seconds(steps[1 : pace.first_timed]) < 26
    assert seconds(steps[pace.first_timed :]) == pytest.approx(20, abs=0.11)
    assert pace.warnings() == []


def test_long_steps_have_as_many_rounds_as_others_before_they_are_timed() -> None:
    """An 8B's steps of 1.4 s: 20 of them are longer than the warm-up is meant to last."""
    pace = pace_of(num_warmup_steps=20, timed_seconds=12)
    steps = run_out(pace, lambda step: 1430)
    assert len(pace.facts()["step_time_ms"]) == 3
    assert pace.warnings() == []
    assert seconds(steps) < 20 * 1.43 + 2 * (3 + 1.43) + 12 + 1.43


def test_a_gpu_that_slows_down_is_warmed_up_until_it_has_settled() -> None:
    """2 % within every ten seconds for 20 s, then steady."""
    pace = pace_of()
    steps = run_out(pace, lambda step: 100 + 0.02 * min(step, 200))
    assert pace.first_timed is not None
    assert seconds(steps[: pace.first_timed]) > 25
    window = [step.step_time_ms for step in steps[pace.first_timed :]]
    assert max(window) / min(window) < 1.02
    assert pace.warnings() == []


def test_steps_that_never_settle_are_timed_all_the_same_and_the_record_says_so() -> None:
    pace = pace_of()
    steps = run_out(pace, lambda step: 100 * 1.001**step)
    assert pace.first_timed is not None
    assert 40 <= seconds(steps[: pace.first_timed]) < 50
    (warning,) = pace.warnings()
    assert "before the step time was steady" in warning
    assert len(pace.facts()["step_time_ms"]) > 5


def test_the_window_opens_in_time_where_steps_are_few_and_holds_five_at_least() -> None:
    few = pace_of(num_steps=40)
    assert len(run_out(few, lambda step: 1000)) == 40
    assert few.first_timed == 20
    slow = pace_of(num_warmup_steps=2)
    assert len(run_out(slow, lambda step: 9000)) - int(slow.first_timed or 0) == 5


def test_every_rank_goes_by_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(facts: dict[str, float]) -> list[dict[str, float]]:
        return [facts, {"step_seconds": 0.2}]

    monkeypatch.setattr(pace_module, "from_all_ranks", both)
    pace = pace_of()
    steps = run_out(pace, lambda step: 100)
    assert pace.first_timed is not None
    assert len(steps) - pace.first_timed == 100


@pytest.mark.parametrize(
    "values",
    [
        {"validation_sequences": 4},
        {"lr_schedule": "cosine"},
        {"runs_per_gpu": 2},
        {"noise_at_steps": [0]},
    ],
)
def test_what_needs_a_known_end_or_has_no_timings_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(UserError, match="timed_seconds: 20"):
        pace_of(**values)


def test_a_run_is_as_long_as_it_was_asked_to_be_timed(run: Run) -> None:
    record, run_dir = run(
        strategy="none", timed_seconds=0.4, num_steps=5000, profile=False, log_every=1
    )
    metrics, results = read_metrics(run_dir), record.results
    timed = [row["step_time_ms"] for row in metrics if row["timed"]]
    untimed = [row["step_time_ms"] for row in metrics if not row["timed"]]
    assert record.status == "completed"
    assert results["steps_completed"] == len(metrics) < 5000
    assert results["num_timed_steps"] == len(timed)
    # Steps are chosen by the last round's: on a busy machine these may be faster.
    assert sum(timed) > 0.2e3
    assert sum(untimed) > 0.4e3
    assert record.instruments["warm_up"]["seconds"] >= 0.4
    assert record.judgement["speed_only"] is True
