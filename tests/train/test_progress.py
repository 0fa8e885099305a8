"""The learning rate of a step."""

import pytest

from fp8study.core.config import make_config
from fp8study.train.progress import learning_rate


def rates(**values: object) -> list[float]:
    chosen = {"num_steps": 11, "num_warmup_steps": 0, "learning_rate": 1.0} | values
    config = make_config(chosen).resolved()
    return [learning_rate(config, step) for step in range(config.num_steps)]


def test_the_rate_warms_up_and_then_stays() -> None:
    assert rates(lr_warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, *[1.0] * 8])


@pytest.mark.parametrize(("schedule", "halfway"), [("linear", 0.55), ("cosine", 0.55)])
def test_the_rate_falls_to_a_tenth_at_the_last_step(schedule: str, halfway: float) -> None:
    found = rates(lr_schedule=schedule)
    assert (found[0], found[5], found[-1]) == pytest.approx((1.0, halfway, 0.1))
    assert found == sorted(found, reverse=True)
    early, late = found[1] - found[2], found[5] - found[6]
    assert (early < late) if schedule == "cosine" else early == pytest.approx(late)
