"""The learning rate of a step, and the lines that say what it did."""

from contextlib import suppress
from pathlib import Path

import pytest

from fp8study.core.config import make_config
from fp8study.train.progress import learning_rate, open_metrics
from tests.disks import small_disk_at


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


def test_metrics_wait_for_room_where_a_checkpoint_has_taken_it_all(tmp_path: Path) -> None:
    rows = [f"{number:0100}\n" for number in range(200)]
    with small_disk_at(tmp_path, "64k"):
        part = tmp_path / "part"

        def fill() -> None:
            with suppress(OSError), part.open("wb", buffering=0) as file:
                while file.write(bytes(512)):
                    pass

        asked: list[bool] = []

        def make_room() -> None:
            asked.append(part.exists())
            part.unlink(missing_ok=True)

        with open_metrics(tmp_path / "metrics.jsonl", make_room) as metrics:
            for number, row in enumerate(rows):
                if number == 30:
                    fill()
                metrics.write(row)
                metrics.flush()
        assert asked == [True]
        assert (tmp_path / "metrics.jsonl").read_text() == "".join(rows)
        with (
            pytest.raises(OSError, match="No space left"),  # there is no room to be made
            open_metrics(tmp_path / "metrics.jsonl", lambda: None) as metrics,
        ):
            for row in 4 * rows:
                metrics.write(row)
                metrics.flush()
