"""Ratios to a reference arm of the same call, and their change against a baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8study.analysis.compare import compare_relative
from fp8study.core.config import RunConfig
from fp8study.core.errors import UserError
from fp8study.core.records import write_record
from fp8study.report.comparison_text import comparison_text
from tests.factories import CPU, make_record

BF16 = {"precision": "bf16"}
FP8 = {"precision": "fp8_tensorwise"}


def put(folder: Path, rate: float, number: int = 3, name: str = "", **changes: Any) -> None:
    """Store repeats of one arm whose rates spread by a per cent."""
    record_changes = {k: changes.pop(k) for k in ("machine", "git", "results") if k in changes}
    name = name or changes.get("precision", "bf16")
    for repeat in range(number):
        config = RunConfig(**{"repeat": repeat, **changes}).resolved().to_dict()
        measured = {"tokens_per_second_per_gpu": rate * (1 + 0.01 * (repeat - 1))}
        results = measured | record_changes.get("results", {})
        others = {k: v for k, v in record_changes.items() if k != "results"}
        record = make_record(run_id=f"{name}-{repeat}", config=config, results=results, **others)
        (folder / record.run_id).mkdir(parents=True)
        write_record(record, folder / record.run_id)


def test_a_slower_machine_cancels_out_and_a_slower_arm_does_not(tmp_path: Path) -> None:
    put(tmp_path / "a", 1000)
    put(tmp_path / "a", 1200, **FP8)
    put(tmp_path / "a", 900, precision="fp8_rowwise")
    put(tmp_path / "b", 500)  # half as fast
    put(tmp_path / "b", 600, **FP8)
    put(tmp_path / "b", 405, precision="fp8_rowwise")  # and 10 % slower
    found = compare_relative(tmp_path / "a", tmp_path / "b", BF16)
    rows = {row["arm"].split(", ")[1]: row for row in found.rows}
    assert set(rows) == {"FP8 tensorwise", "FP8 rowwise"}
    same, slower = rows["FP8 tensorwise"], rows["FP8 rowwise"]
    for row, speed, change in ((same, 1.2, 1.0), (slower, 0.81, 0.9)):
        assert row["speed"].estimate == pytest.approx(speed)
        assert row["change"].estimate == pytest.approx(change)
        assert row["change"].interval.low < change < row["change"].interval.high
    assert slower["change"].interval.high < 1 < same["change"].interval.high


def test_without_a_baseline_the_call_stands_alone(tmp_path: Path) -> None:
    put(tmp_path, 1000)
    put(tmp_path, 1200, **FP8)
    found = compare_relative(None, tmp_path, BF16)
    assert found.rows[0]["speed_baseline"] is None
    text = comparison_text(found)
    assert "1.200" in text
    assert "change" not in text


def test_what_follows_from_a_field_may_differ_with_it(tmp_path: Path) -> None:
    """A tuned arm has other switches than its reference, and FP8 gathers in FP8."""
    common: dict[str, Any] = {"num_gpus": 4}
    put(tmp_path, 1000, name="plain", **common)
    put(tmp_path, 1300, name="tuned", path="tuned", **FP8, **common)
    (row,) = compare_relative(None, tmp_path, BF16 | {"path": "plain"}).rows
    assert row["speed"].estimate == pytest.approx(1.3)


@pytest.mark.parametrize(
    ("field", "value", "needs"),
    [
        ("weight_cast", "each_update", {"precision": "fp8_tensorwise", "strategy": "none"}),
        ("update_kernel", "one_pass", {"strategy": "none"}),
        ("num_steps", 10, {"num_warmup_steps": 2}),
    ],
)
def test_a_reference_may_need_other_fields_which_its_arms_have(
    field: str, value: Any, needs: dict[str, Any], tmp_path: Path
) -> None:
    put(tmp_path, 1000, name="with", **{field: value}, **needs)
    put(tmp_path, 1100, name="without", **needs)
    (row,) = compare_relative(None, tmp_path, {field: value}).rows
    assert row["speed"].estimate == pytest.approx(1.1)


def test_reference_arms_differ_in_nothing_else(tmp_path: Path) -> None:
    put(tmp_path, 1000, name="short")
    put(tmp_path, 2000, name="long", sequence_length=2048)
    put(tmp_path, 1200, name="fp8", **FP8)
    put(tmp_path, 1200, name="fp8-4", num_gpus=4, **FP8)
    found = compare_relative(None, tmp_path, BF16)
    (row,) = found.rows
    assert row["speed"].estimate == pytest.approx(1.2)
    (line,) = found.without_partner
    assert "llama-3.2-1b × 4, FP8 tensorwise" in line


def test_void_and_few_timings_say_so(tmp_path: Path) -> None:
    put(tmp_path / "a", 1000, number=2)
    put(tmp_path / "a", 1200, **FP8)
    put(tmp_path / "b", 1000, results={"num_alloc_retries": 3})
    put(tmp_path / "b", 1200, **FP8)
    (few,) = compare_relative(None, tmp_path / "a", BF16).rows
    assert few["speed"].interval is None
    (void,) = compare_relative(tmp_path / "a", tmp_path / "b", BF16).rows
    assert void["speed"] is void["change"] is None
    assert any(note.startswith("B, reference: timings of 3 void") for note in void["notes"])


def test_other_machines_and_arms_without_baseline_are_noted(tmp_path: Path) -> None:
    for side, machine in (("a", {}), ("b", CPU)):
        put(tmp_path / side, 1000, machine=machine)
        put(tmp_path / side, 1200, machine=machine, **FP8)
    put(tmp_path / "b", 900, machine=CPU, precision="fp8_rowwise")
    found = compare_relative(tmp_path / "a", tmp_path / "b", BF16)
    known, new = sorted(found.rows, key=lambda row: row["change"] is None)
    assert "GPU NVIDIA H200 → unknown" in known["notes"]
    assert new["change"] is None
    assert "not in the baseline" in new["notes"]
    assert "no ratio here says anything of FP8's speed" in comparison_text(found)


def test_what_follows_from_the_number_of_gpus_may_differ_with_it(tmp_path: Path) -> None:
    put(tmp_path, 1000)
    put(tmp_path, 990, name="two", num_gpus=2)
    (row,) = compare_relative(None, tmp_path, {"num_gpus": 1}).rows
    assert row["speed"].estimate == pytest.approx(0.99)


def test_a_wrong_reference_is_one_line(tmp_path: Path) -> None:
    put(tmp_path, 1000)
    with pytest.raises(UserError, match=r"--reference: 'precisio' is no field .*'precision'"):
        compare_relative(None, tmp_path, {"precisio": "bf16"})
    with pytest.raises(UserError, match=r"precision: 'BF16' is not valid .*'bf16'\?"):
        compare_relative(None, tmp_path, {"precision": "BF16"})
    with pytest.raises(UserError, match=r"^--reference: 'repeat' tells runs of one arm apart"):
        compare_relative(None, tmp_path, {"repeat": 0})


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        (BF16, "all arms in '.*' have precision=bf16; give another field in which they differ: "
               "num_gpus"),
        (FP8, "no arm in '.*' has precision=fp8_tensorwise: precision is bf16 there"),
        ({"skip": ["lm_head", "*.o_proj"]},
         r"no arm in '.*' has skip=lm_head,\*.o_proj: skip is lm_head there"),
        ({"num_gpus": 2}, "no other arm in '.*' equals one with num_gpus=2 in all else: it differs "
                          "in sequence_length: 2048 v 4096"),
    ],
)  # fmt: skip
def test_a_reference_of_no_arm_says_why_and_never_itself_as_the_remedy(
    reference: dict[str, Any], words: str, tmp_path: Path
) -> None:
    put(tmp_path, 1000, sequence_length=2048)
    put(tmp_path, 1000, name="two", num_gpus=2)
    with pytest.raises(UserError, match=f"^--reference: {words}") as caught:
        compare_relative(None, tmp_path, reference)
    assert "\n" not in str(caught.value)


def test_an_arm_without_a_reference_says_what_it_lacks(tmp_path: Path) -> None:
    put(tmp_path, 1000)
    put(tmp_path, 1200, **FP8)
    put(tmp_path, 1200, **FP8, num_steps=50, name="short")
    found = compare_relative(None, tmp_path, BF16)
    (line,) = found.without_partner
    assert line.startswith("no reference arm: ")
    assert line.endswith("(nearest differs in num_steps: 50 v 100)")


def test_within_blocks_neither_the_gpu_nor_the_hour_counts(tmp_path: Path) -> None:
    """Three GPUs of very different speed: the groups' interval is wide, the blocks' is not."""
    for repeat, speed in enumerate((1.0, 2.0, 4.0)):
        known = [{"index": repeat, "uuid": f"GPU-{repeat}"}]
        for folder, gpus in (("blocks", known), ("groups", [])):
            for arm, rate in ((BF16, 1000), (FP8, 1200 * (1 + 0.001 * repeat))):
                put(tmp_path / folder, rate * speed, 1, f"{arm['precision']}-{repeat}",
                    repeat=repeat, machine={"gpus": gpus}, **arm)  # fmt: skip
    blocks, groups = (
        compare_relative(None, tmp_path / folder, BF16).rows[0]["speed"]
        for folder in ("blocks", "groups")
    )
    assert blocks.estimate == pytest.approx(groups.estimate)
    assert blocks.interval.high - blocks.interval.low < 0.01
    assert groups.interval.high - groups.interval.low > 1
    change = compare_relative(tmp_path / "blocks", tmp_path / "blocks", BF16).rows[0]["change"]
    assert change.estimate == pytest.approx(1)
    assert change.interval.high - change.interval.low < 0.02


def test_each_seed_is_a_block_of_its_own(tmp_path: Path) -> None:
    """Three seeds of one repeat on one GPU: none of them stands for the others."""
    for seed, speed in enumerate((1.0, 1.5, 2.0)):
        for arm, rate in ((BF16, 1000), (FP8, 1200)):
            put(tmp_path, rate * speed, 1, f"{arm['precision']}-{seed}", seed=seed,
                machine={"gpus": [{"index": 0, "uuid": "GPU-0"}]}, **arm)  # fmt: skip
    speed = compare_relative(None, tmp_path, BF16).rows[0]["speed"]
    assert speed.counts == (3,)
    assert speed.estimate == pytest.approx(1.2)
