"""What a run says of its losses."""

from typing import Any

import pytest

from fp8study.core.config import make_config
from fp8study.measure.clock import FinishedStep
from fp8study.train.facts import high_loss


def said(*losses: float, **changes: Any) -> str:
    config = make_config({"model": "tiny-llama"} | changes).resolved()
    return high_loss(config, [FinishedStep(step, loss, 1.0) for step, loss in enumerate(losses)])


def test_a_loss_far_above_the_first_is_told_with_its_step() -> None:
    assert said(12.0, 11.0, 12.7, 9.0).startswith("the loss rose from 12.00 to 12.70 at step 3: ")
    assert said(12.0, 12.8, float("nan")).startswith("the loss rose from 12.00 to 12.80 at step 2")
    assert not said() and not said(float("nan")) and not said(12.0, 12.5, 9.0)


@pytest.mark.parametrize("changes", [{"init_from": "weights"}, {"timed_seconds": 5.0}])
def test_texts_differ_for_trained_weights_and_timed_runs_compare_no_losses(
    changes: dict[str, Any],
) -> None:
    assert not said(2.5, 2.9, 2.4, **changes)
