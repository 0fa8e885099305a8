"""Two folders side by side: who is paired, what is compared, what is flagged."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8study.analysis import compare
from fp8study.analysis.arms import arm_config, group_arms, read_folder
from fp8study.analysis.compare import Comparison, compare_folders
from fp8study.analysis.runs.frames import key_of
from fp8study.core.config import RunConfig
from fp8study.core.errors import UserError
from fp8study.core.records import write_record
from fp8study.report.comparison_text import comparison_text
from tests.factories import CPU, make_record


def put(folder: Path, number: int = 3, factor: float = 1.0, **changes: Any) -> None:
    """Store repeats of one arm whose rates spread by a few per cent around 40,000."""
    results = changes.pop("results", {})
    for repeat in range(number):
        rate = 40_000.0 * factor * (1 + 0.02 * (repeat - 1))
        start = f"2000-01-01T00:0{repeat}:00+00:00"
        changed = {"tokens_per_second_per_gpu": rate, "num_alloc_retries": 0} | results
        record = make_record(
            run_id=f"{len(list(folder.glob('*')))}-{repeat}", seed=repeat, repeat=repeat,
            started_at=start, results=changed, **changes,
        )  # fmt: skip
        (folder / record.run_id).mkdir(parents=True)
        write_record(record, folder / record.run_id)


def compared(tmp_path: Path, *ignored: str) -> Comparison:
    return compare_folders(tmp_path / "a", tmp_path / "b", ignored)


def test_arms_are_paired_by_what_they_are(tmp_path: Path) -> None:
    for side, factor, corpus in (("a", 1.0, "text:/one/x"), ("b", 1.1, "text:/two/x")):
        put(tmp_path / side, factor=factor, corpus=corpus)
        put(tmp_path / side, factor=2 * factor, precision="fp8_tensorwise", corpus=corpus)
    put(tmp_path / "a" / "deeper" / "down", precision="fp8_rowwise")
    put(tmp_path / "b", num_steps=70)
    found = compared(tmp_path)
    assert [row["arm"] for row in found.rows] == [
        "llama-3.2-1b × 1, BF16, num_steps=60",
        "llama-3.2-1b × 1, FP8 tensorwise",
    ]
    for row in found.rows:
        assert row["speed_ratio"].estimate == pytest.approx(1.1)
        assert row["speed_ratio"].interval.low < 1.1 < row["speed_ratio"].interval.high
        assert (row["num_runs_a"], row["num_runs_b"]) == (3, 3)
        assert row["memory_ratio"] == 1
        assert row["notes"] == ()
    assert found.rows[1]["tokens_per_second_per_gpu_b"] == pytest.approx(88_000, rel=1e-3)
    bf16, fp8 = ([row[f"over_bf16_{side}"] for side in "ab"] for row in found.rows)
    assert bf16 == [None, None]
    assert [ratio.estimate for ratio in fp8] == pytest.approx([2, 2])
    many = replace(found, without_partner=found.without_partner * 3)
    assert "only in A: 3 arms\nonly in B: 3 arms" in comparison_text(many)
    rowwise, longer = found.without_partner
    assert rowwise.startswith("only in A: llama-3.2-1b × 1, FP8 rowwise (nearest in B differs in")
    assert "precision: fp8_rowwise v" in rowwise
    assert longer.endswith("num_steps=70 (nearest in A differs in num_steps: 70 v 60)")


def test_rates_that_are_shown_make_the_ratio_beside_them(tmp_path: Path) -> None:
    """Of medians they would not: one of three runs is far from the others."""
    for side, odd in (("a", 30_000.0), ("b", 50_000.0)):
        put(tmp_path / side, 2)
        put(tmp_path / side, 1, results={"tokens_per_second_per_gpu": odd})
    found = compared(tmp_path)
    (row,) = found.rows
    a, b = (row[f"tokens_per_second_per_gpu_{side}"] for side in "ab")
    assert row["speed_ratio"].estimate == pytest.approx(b / a)
    assert b / a == pytest.approx((50 / 30) ** (1 / 3))
    text = comparison_text(found)
    assert "geometric means over an arm's runs, of which B/A is the ratio" in text
    assert "÷ BF16's: the mean" not in text


def test_blocks_are_of_one_study(tmp_path: Path) -> None:
    """The second study ran on a GPU that was twice as fast that day; its runs have the same ids."""
    for study, speed, start in (("first", 1.0, 0), ("second", 2.0, 1)):
        for repeat in range(3):
            for precision, factor in (("bf16", 1.0), ("fp8_tensorwise", 1.2)):
                record = make_record(
                    run_id=f"{precision}-{repeat}", study=study, repeat=repeat, precision=precision,
                    started_at=f"2000-01-0{1 + start}T00:0{repeat}:00+00:00",
                    results={"tokens_per_second_per_gpu": 1000.0 * speed * factor},
                    machine=CPU,
                )  # fmt: skip
                folder = tmp_path / study / record.run_id
                folder.mkdir(parents=True)
                write_record(record, folder)
    arms = group_arms(read_folder(tmp_path, "A"))
    bf16, fp8 = arms.values()
    (ratios,), nothing = compare._over(fp8, bf16)
    assert nothing == []
    assert ratios == pytest.approx([1.2] * 6)


def test_a_ratio_of_some_of_the_runs_says_so(tmp_path: Path) -> None:
    gpu = {"device": "cuda", "gpus": [{"index": 0, "uuid": "GPU-0"}]}
    for side in "ab":
        put(tmp_path / side, 3, machine=gpu)
        put(tmp_path / side, 3, precision="fp8_tensorwise", factor=1.2, machine=gpu)
    text = " ".join(comparison_text(compared(tmp_path)).split())
    assert "the mean of the ratios of runs that share seed, repeat and GPUs, where 3 or" in text


def test_a_study_file_that_is_wrong_takes_no_comparison_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    studies = tmp_path / "pipelines" / "studies"
    studies.mkdir(parents=True)
    (studies / "quick.yaml").write_text("question: 3")
    monkeypatch.chdir(tmp_path)
    for side in "ab":
        put(tmp_path / side)
    assert len(compared(tmp_path).rows) == 1


def test_a_field_that_a_record_is_too_old_to_know_has_its_default(tmp_path: Path) -> None:
    put(tmp_path / "a", 1)
    put(tmp_path / "b", 1)
    older, newer = (make_record().config for _ in "ab")
    older.pop("untrained")
    assert key_of(arm_config(older)) == key_of(arm_config(newer | {"compile_cache": "shared"}))
    assert key_of(arm_config(older)) != key_of(arm_config(newer | {"compile_cache": "fresh"}))


def test_what_does_nothing_in_bf16_tells_no_bf16_arms_apart() -> None:
    bf16 = [RunConfig(skip=skip).to_dict() for skip in ((), ("lm_head",))]
    fp8 = [config | {"precision": "fp8_rowwise"} for config in bf16]
    assert len({key_of(arm_config(config)) for config in bf16}) == 1
    assert len({key_of(arm_config(config)) for config in fp8}) == 2


@pytest.mark.parametrize("number", [1, 2])
def test_too_few_runs_give_a_ratio_that_says_so(tmp_path: Path, number: int) -> None:
    put(tmp_path / "a", 3)
    put(tmp_path / "b", number, factor=1.2)
    (row,) = compared(tmp_path).rows
    assert row["speed_ratio"].interval is None
    assert f"no interval: {number} run" in comparison_text(compared(tmp_path))


def test_losses_are_compared_by_seed_and_on_the_same_data_only(tmp_path: Path) -> None:
    put(tmp_path / "a", results={"loss_last20_mean": 5.5})
    put(tmp_path / "b", 2, results={"loss_last20_mean": 5.6})
    (row,) = compared(tmp_path).rows
    assert row["loss_difference"] == pytest.approx(0.1)
    put(tmp_path / "timed", results={"loss_last20_mean": 5.6, "steps_completed": 59})
    (timed,) = compare_folders(tmp_path / "a", tmp_path / "timed").rows
    assert timed["loss_difference"] is None  # as many seconds, and fewer steps
    put(tmp_path / "b", 1, data={"corpus_sha256": "cd" * 32})
    (row,) = compared(tmp_path).rows
    assert row["loss_difference"] is None
    assert "other or unknown data: no loss compared" in row["notes"]


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"machine": {"gpu_name": "NVIDIA H100"}}, "GPU NVIDIA H200 → NVIDIA H100"),
        ({"machine": {"driver": "111"}}, "driver 000.00.00 → 111"),
        ({"machine": {"cpu_name": "other CPU"}}, "CPU synthetic CPU → other CPU"),
        ({"versions": {"torch": "2.13.0"}}, "torch 2.11.0 → 2.13.0"),
        ({"git": {"dirty": True}}, "B: 3 from uncommitted changes"),
        ({"results": {"num_alloc_retries": 7}}, "B: allocator retried up to 7 times"),
        ({"results": {"tokens_per_second_per_gpu": None}}, "B: 3 without timings"),
        ({"status": "out_of_memory"}, "B: 3 out_of_memory"),
    ],
)
def test_what_else_differs_is_flagged(tmp_path: Path, changes: dict[str, Any], note: str) -> None:
    put(tmp_path / "a")
    put(tmp_path / "b", **changes)
    found = compared(tmp_path)
    assert note in found.rows[0]["notes"]
    assert f"every arm: {note}" in comparison_text(found)


@pytest.mark.parametrize("told", [None, True])
def test_the_speed_of_emulated_fp8_is_called_that(tmp_path: Path, told: bool | None) -> None:
    on_cpu = {"machine": CPU} if told is None else {"fp8_emulate": told}
    put(tmp_path / "a", **on_cpu)
    put(tmp_path / "b", factor=1.8, precision="fp8_rowwise", **on_cpu)
    (row,) = compared(tmp_path, "precision", "fp8_emulate").rows
    assert "B: FP8 emulated in 3: the speed says nothing of FP8" in row["notes"]
    assert not any("A: FP8 emulated" in note for note in row["notes"])


@pytest.mark.parametrize(
    "results",
    [
        {"num_alloc_retries": 7},
        {"num_device_allocs": 4, "num_timed_steps": 60},
        {"memory_peak_gib": 130.0},
    ],
    ids=str,
)
def test_a_timing_that_the_allocator_may_have_made_is_not_compared(
    tmp_path: Path, results: dict[str, Any]
) -> None:
    put(tmp_path / "a")
    put(tmp_path / "b", results=results)
    (row,) = compared(tmp_path).rows
    assert row["speed_ratio"] is None
    assert row["num_runs_b"] == 0
    assert any(note.startswith("B: timings of 3 void") for note in row["notes"])


def test_fields_that_may_differ_are_named(tmp_path: Path) -> None:
    put(tmp_path / "a", num_steps=60)
    put(tmp_path / "b", num_steps=80)
    with pytest.raises(UserError, match=r"^B: .* shares no arm .*num_steps: 60 v 80.* --ignore"):
        compared(tmp_path)
    (row,) = compared(tmp_path, "num_steps").rows
    none = "no common seed and number of steps: no loss compared"
    assert row["notes"] == ("num_steps 60 → 80", none)
    assert row["loss_difference"] is None
    with pytest.raises(UserError, match=r"--ignore: 'num_step' is no field .*'num_steps'"):
        compared(tmp_path, "num_step")


#: In what an FP8 run of the tuned path differs from its BF16 partner.
_OF_FP8 = {"precision": "fp8_tensorwise", "skip": [], "weight_cast": "each_update"}


def options_to_paste(error: UserError) -> list[str]:
    """Return the fields that the end of a refusal names, where all of it is options."""
    line = str(error).rpartition("name each field that may differ: ")[2]
    assert re.fullmatch(r"--ignore \w+(?: --ignore \w+)*", line)
    return line.split()[1::2]


@pytest.mark.parametrize("given", [(), ("precision",)], ids=str)
def test_the_options_that_a_refusal_ends_with_pair_the_arms(
    tmp_path: Path, given: tuple[str, ...]
) -> None:
    """Fields that follow from the precision are told apart, too; it took a try for each three."""
    put(tmp_path / "a", num_steps=70, learning_rate=1e-5, strategy="none")
    put(tmp_path / "a", strategy="none")
    put(tmp_path / "b", config={"num_steps": 80, "strategy": "none"} | _OF_FP8)
    with pytest.raises(UserError, match="shares no arm") as caught:
        compared(tmp_path, *given)
    named = options_to_paste(caught.value)
    assert {*named} == {"num_steps", *_OF_FP8}
    (row,) = compared(tmp_path, *named).rows
    assert "precision bf16 → fp8_tensorwise" in row["notes"]
    for name in named:  # and none of them can be left out
        with pytest.raises(UserError, match="shares no arm"):
            compared(tmp_path, *(other for other in named if other != name))


def test_a_field_that_is_retired_can_be_ignored(tmp_path: Path) -> None:
    put(tmp_path / "a", config={"nccl_ctas": None})
    put(tmp_path / "b", config={"nccl_ctas": 8})
    with pytest.raises(UserError, match="shares no arm") as caught:
        compared(tmp_path)
    assert options_to_paste(caught.value) == ["nccl_ctas"]
    assert len(compared(tmp_path, "nccl_ctas").rows) == 1


def test_arms_that_have_little_in_common_are_told_how_to_ignore(tmp_path: Path) -> None:
    much: dict[str, Any] = {
        "num_steps": 80, "learning_rate": 1e-5, "micro_batch_size": 2, "sequence_length": 512,
        "master_dtype": "bf16", "lr_warmup_steps": 3, "seed": 0, "compile": False,
        "max_grad_norm": 2.0, "validation_sequences": 3, "num_gpus": 4, "strategy": "fsdp2",
        "precision": "fp8_rowwise", "untrained": ["lm_head"], "activation_checkpointing": True,
    }  # fmt: skip
    put(tmp_path / "a")
    put(tmp_path / "b", config=much)
    with pytest.raises(UserError, match=r"may differ, as in --ignore precision$"):
        compared(tmp_path)


def test_a_run_copied_into_a_folder_twice_counts_once(tmp_path: Path) -> None:
    put(tmp_path / "a")
    put(tmp_path / "b")
    put(tmp_path / "b" / "copy")
    assert compared(tmp_path).rows[0]["num_runs_b"] == 3


def test_a_single_run_and_its_file_are_folders_too(tmp_path: Path) -> None:
    put(tmp_path / "a", 1)
    (run,) = (tmp_path / "a").iterdir()
    for place in (run, run / "run.json"):
        assert compare_folders(place, tmp_path / "a").rows[0]["num_runs_a"] == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "is no folder; give a folder"), ("", "holds no run.json"), ("{", "not a run record")],
)
def test_a_folder_without_sound_records_is_named(
    tmp_path: Path, content: str | None, words: str
) -> None:
    put(tmp_path / "a")
    if content is not None:
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / ("run.json" if content else "else.json")).write_text(content)
    with pytest.raises(UserError, match=rf"^B: .*{words}"):
        compared(tmp_path)


def test_a_note_of_some_arms_is_numbered_and_written_once(tmp_path: Path) -> None:
    for side in "ab":
        dirty = side == "b"
        put(tmp_path / side, git={"dirty": dirty})
        put(tmp_path / side, precision="fp8_tensorwise", git={"dirty": dirty})
        put(tmp_path / side, precision="fp8_rowwise")
    text = comparison_text(compared(tmp_path))
    assert text.count("B: 3 from uncommitted changes") == 1
    rows = re.findall(r"^llama.*\n  (.*\|.*)$", text, flags=re.MULTILINE)
    assert [row.endswith(" 1") for row in rows] == [True, True, False]


def test_a_number_of_gpus_that_may_differ_is_in_no_name(tmp_path: Path) -> None:
    for side, num_gpus in (("a", 1), ("b", 2)):
        put(tmp_path / side, config={"num_gpus": num_gpus, "strategy": "fsdp2"})
    (row,) = compared(tmp_path, "num_gpus").rows
    assert "None" not in row["arm"] and "×" not in row["arm"]
