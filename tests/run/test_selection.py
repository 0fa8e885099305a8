"""Which runs are chosen for a machine's GPUs and a budget: a function of those alone."""

from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from transformers import AutoConfig

from fp8study.analysis.laws.memory import predicted_memory
from fp8study.analysis.laws.room import HEADROOM
from fp8study.analysis.laws.shape import shape_of
from fp8study.run.chosen.estimates import compile_minutes, held_minutes
from fp8study.run.chosen.selection import Selection, select
from fp8study.run.chosen.timetable import Chosen, cell_of
from fp8study.run.machine import Machine
from tests.machines import A100, B200, H100, H200, RTX_4090, UNKNOWN, machine

TEXT = ("text:my.txt", 50_000_000)
#: `select`, of which several tests ask the same.
selected = cache(select)
#: Of 4,096 tokens, in the synthetic corpus.
NUM_SEQUENCES = 213


MACHINES = {
    "RTX 4090": machine(RTX_4090),
    "H100": machine(H100),
    "H200": machine(H200),
    "2 H200": machine(H200, H200),
    "4 H100": machine(*4 * [H100]),
    "8 H200": machine(*8 * [H200]),
    "8 B200": machine(*8 * [B200]),
    "mixed": machine(H200, H100, H100),
    "A100": machine(A100),
    "unknown": machine(UNKNOWN, UNKNOWN),
}


def minutes(chosen: Selection, there: Machine) -> float:
    """How long the busiest GPU has to do, in whatever order wide runs and narrow ones come."""
    return max(
        sum(run.minutes for run in chosen.runs if gpu in run.gpus) for gpu in range(len(there.gpus))
    )


def timed(chosen: Selection) -> list[Chosen]:
    return [run for run in chosen.runs if run.config.timed_seconds]


def cells(runs: Iterable[Chosen]) -> set[tuple[str, int, int]]:
    return {(c.model, c.num_gpus, c.micro_batch_size) for c in (run.config for run in runs)}


@pytest.mark.parametrize("budget", [20, 600])
@pytest.mark.parametrize("name", MACHINES)
def test_every_run_fits_the_memory_the_budget_and_its_gpus(name: str, budget: float) -> None:
    there = MACHINES[name]
    chosen = selected(there, budget, TEXT)
    smallest = min(gpu.memory_gib or 0 for gpu in there.gpus)
    assert chosen.runs
    assert minutes(chosen, there) <= budget - 1
    for run in chosen.runs:
        assert len(run.gpus) == run.config.num_gpus
        there.check(run.config)
        assert run.config.sequences_per_step <= NUM_SEQUENCES
        needed = predicted_memory(run.config, shape_of(run.config.model)).needed
        assert needed <= (1 - HEADROOM) * smallest
        assert run.minutes > 0
        assert run.why
    assert len({run.config for run in chosen.runs}) == len(chosen.runs)


@pytest.mark.parametrize("name", MACHINES)
def test_a_block_is_one_cell_in_both_precisions_side_by_side_on_the_same_gpus(name: str) -> None:
    there = MACHINES[name]
    runs = timed(selected(there, 60, TEXT))
    blocks: dict[tuple[object, ...], list[Chosen]] = {}
    for run in runs:
        c = run.config
        key = (c.model, c.num_gpus, c.micro_batch_size, c.repeat)
        blocks.setdefault(key, []).append(run)
    pair = {"bf16", "fp8_tensorwise"}
    for block in blocks.values():
        precisions = {run.config.precision for run in block}
        assert precisions in (pair, pair | {"fp8_rowwise"})
        assert len({run.gpus for run in block}) == 1
        queue = [run for run in runs if run.gpus[0] in block[0].gpus]
        assert sorted(map(queue.index, block)) == [
            queue.index(block[0]) + n for n in range(len(block))
        ]


def test_the_best_case_comes_first_with_rowwise_and_then_the_worst() -> None:
    for name in ("H100", "2 H200", "8 H200"):
        there = MACHINES[name]
        told = [run.why for run in timed(selected(there, 20, TEXT))]
        assert [why.split(", block")[0] for why in told[:5]] == [
            *["largest model, largest batch"] * 3, *["smallest model, batch 1"] * 2,
        ]  # fmt: skip
        first = timed(selected(there, 20, TEXT))[:3]
        assert {run.config.precision for run in first} == {
            "bf16", "fp8_tensorwise", "fp8_rowwise",
        }  # fmt: skip
        assert {len(run.gpus) for run in first} == {len(there.gpus)}


def test_a_short_budget_of_two_gpus_asks_about_both() -> None:
    chosen = timed(selected(MACHINES["2 H200"], 10, TEXT))
    assert {len(run.gpus) for run in chosen[:3]} == {2}
    assert chosen[0].config.model == "llama-3.1-8b"


def test_the_order_within_blocks_is_drawn_and_is_the_same_each_time() -> None:
    first = [run.config.precision for run in timed(selected(MACHINES["8 H200"], 60, TEXT))][1::2]
    assert len(set(first)) == 2
    assert select(MACHINES["8 H200"], 60, TEXT) == select(MACHINES["8 H200"], 60, TEXT)


def test_one_h100_answers_from_1b_to_the_largest_that_fits_at_both_ends_of_the_batch() -> None:
    chosen = selected(MACHINES["H100"], 20, TEXT)
    assert {(model, batch) for model, _, batch in cells(timed(chosen))} == {
        ("llama-3.2-1b", 1), ("llama-3.2-1b", 10), ("qwen3-4b", 1),
    }  # fmt: skip
    (eight_b,) = (note for note in chosen.notes if note.startswith("llama-3.1-8b"))
    assert eight_b.startswith(
        "llama-3.1-8b on 1 GPU needs 125 GiB, and 72 are to be had; would fit"
    )
    assert "on 4 GPUs (51 GiB)" in eight_b
    assert "master_dtype=bf16 (65 GiB)" in eight_b
    losses = [run.config for run in chosen.runs if not run.config.timed_seconds]
    assert Counter((c.precision, c.seed) for c in losses) == Counter(
        (precision, seed) for precision in ("bf16", "fp8_tensorwise") for seed in range(3)
    )
    assert len({c.num_steps for c in losses}) == 1
    assert all(not c.is_timed and c.validation_sequences for c in losses)


def test_more_gpus_take_wide_cells_and_share_out_the_narrow_ones() -> None:
    chosen = selected(MACHINES["8 H200"], 20, TEXT)
    assert {"llama-3.2-1b", "qwen3-14b"} <= {m for m, n, _ in cells(timed(chosen)) if n == 8}
    assert {n for _, n, _ in cells(timed(selected(MACHINES["8 H200"], 200, TEXT)))} == {1, 2, 8}
    alone = [run.gpus for run in timed(chosen) if len(run.gpus) == 1]
    assert len(set(alone)) > 4
    widths = [len(run.gpus) for run in chosen.runs]
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize("budget", [5, 20])
@pytest.mark.parametrize("name", ["RTX 4090", "H100", "8 H200", "mixed"])
def test_no_block_of_a_cell_is_without_those_before_it(name: str, budget: float) -> None:
    for text in (None, TEXT):
        found: dict[object, set[int]] = {}
        for run in timed(selected(MACHINES[name], budget, text)):
            found.setdefault(cell_of(run.config), set()).add(run.config.repeat)
        assert all(numbers == set(range(len(numbers))) for numbers in found.values())


@pytest.mark.parametrize("name", ["RTX 4090", "H100", "2 H200", "8 H200"])
def test_a_budget_without_time_for_rowwise_holds_the_pair_and_a_larger_one_adds_it(
    name: str,
) -> None:
    short = timed(selected(MACHINES[name], 5, TEXT))
    assert {run.config.precision for run in short} == {"bf16", "fp8_tensorwise"}
    assert {run.config.repeat for run in short} == {0}
    more = timed(select(MACHINES[name], 60, TEXT, kept=short))
    (rowwise,) = (run.config for run in more if run.config.precision == "fp8_rowwise")
    assert cell_of(rowwise) == cell_of(short[0].config)


def test_each_cell_has_three_blocks_where_there_is_time_and_the_plan_says_how_many() -> None:
    short, whole = (selected(MACHINES["H100"], budget) for budget in (20, 60))
    numbers = Counter(cell_of(r.config) for r in timed(whole) if r.config.precision == "bf16")
    assert set(numbers.values()) == {3}
    assert blocks_said(whole).endswith(
        ": 3 of qwen3-4b at batch 1 on 1 GPU, llama-3.2-1b at batch 1 and 10 on 1 GPU"
    )
    assert blocks_said(short).endswith(
        ": 3 of qwen3-4b at batch 1 on 1 GPU; 2 of llama-3.2-1b at batch 1 and 10 on 1 GPU"
    )
    none = blocks_said(selected(MACHINES["H100"], 5))
    assert none.endswith(
        "1 of qwen3-4b at batch 1 on 1 GPU; no time for llama-3.2-1b at batch 1 and 10 on 1 GPU"
    )


def blocks_said(chosen: Selection) -> str:
    return next(note for note in chosen.notes if note.startswith("Blocks"))


@pytest.mark.parametrize("name", ["RTX 4090", "H100", "2 H200"])
@pytest.mark.parametrize("text", [None, TEXT])
def test_the_budget_that_is_named_is_the_least_with_which_a_later_call_adds_the_rest(
    name: str, text: tuple[str, int] | None
) -> None:
    there = MACHINES[name]
    short = selected(there, 9, text)
    budget = later(short)
    assert budget
    whole = select(there, budget, text, kept=short.runs)
    assert later(whole) is None
    assert {run.config.repeat for run in timed(whole)} == {0, 1, 2}
    assert later(select(there, budget - 1, text, kept=short.runs))


def later(chosen: Selection) -> int | None:
    """Return the budget that a later call is told to give."""
    said = [note for note in chosen.notes if "BUDGET=" in note]
    return int(said[0].split("BUDGET=")[1].split()[0]) if said else None


def test_runs_that_start_at_once_do_not_count_on_code_that_another_compiles() -> None:
    first, *others = (
        run for run in timed(selected(MACHINES["8 H200"], 40))
        if cell_of(run.config) == ("llama-3.2-1b", 1, 1) and run.config.precision == "bf16"
    )  # fmt: skip
    assert len(others) == 2
    compiling = compile_minutes(first.config)
    assert compiling > 0.1
    assert first.minutes == pytest.approx(
        held_minutes(first.config, MACHINES["8 H200"]) + compiling
    )
    assert others[0].minutes == first.minutes  # on the next GPU, at the same time
    one_gpu = [
        run.minutes for run in timed(selected(MACHINES["H200"], 90))
        if cell_of(run.config) == ("llama-3.2-1b", 1, 1) and run.config.precision == "bf16"
    ]  # fmt: skip
    assert one_gpu == pytest.approx([one_gpu[1] + compiling, one_gpu[1], one_gpu[1]])


def test_a_larger_budget_keeps_what_was_chosen_and_adds_to_it() -> None:
    there = MACHINES["2 H200"]
    first = selected(there, 20, TEXT)
    again = select(there, 20, TEXT, kept=first.runs)
    more = select(there, 60, TEXT, kept=first.runs)
    assert set(map(id, again.runs)) == set(map(id, first.runs))
    assert set(map(id, first.runs)) < set(map(id, more.runs))
    assert minutes(more, there) <= 59
    assert len({run.config for run in more.runs}) == len(more.runs)


def test_a_card_of_24_gib_takes_shorter_sequences_and_says_so() -> None:
    chosen = selected(MACHINES["RTX 4090"], 20, TEXT)
    assert {run.config.sequence_length for run in chosen.runs} == {2048}
    assert chosen.notes[0].startswith("Sequences of 2048 tokens: llama-3.2-1b on 1 GPU needs 23 ")
    eight_b = next(note for note in chosen.notes if note.startswith("llama-3.1-8b"))
    assert "would fit: master_dtype=bf16 on " in eight_b  # in FP32 no card can build it


def test_sequences_are_shortened_only_where_that_helps() -> None:
    chosen = select(MACHINES["4 H100"], 20, TEXT, {"model": "llama-3.1-8b"})
    assert {run.config.sequence_length for run in chosen.runs} == {4096}
    assert not any(note.startswith("Sequences") for note in chosen.notes)


def test_different_gpus_are_named_and_the_smallest_decides() -> None:
    chosen = selected(MACHINES["mixed"], 20, TEXT)
    assert chosen.notes[0].startswith(
        "The GPUs differ: 1 × NVIDIA H200 and 2 × NVIDIA H100 80GB HBM3."
    )
    assert "llama-3.1-8b" not in {model for model, n, _ in cells(chosen.runs) if n == 1}


def test_among_gpus_without_fp8_those_that_have_it_are_named() -> None:
    chosen = selected(machine(A100, H100, H200), 20, TEXT)
    assert timed(chosen) == []
    assert any(n.endswith("CUDA_VISIBLE_DEVICES=1,2 keeps those with FP8") for n in chosen.notes)


def test_a_gpu_without_fp8_gets_the_part_about_loss_emulated_and_one_line() -> None:
    chosen = selected(MACHINES["A100"], 20, TEXT)
    assert timed(chosen) == []
    assert {run.config.precision for run in chosen.runs} == {"bf16", "fp8_tensorwise"}
    assert all(run.config.fp8_emulate for run in chosen.runs)
    assert len(chosen.notes) == 1
    assert "A100-SXM4-80GB has 8.0" in chosen.notes[0]


def test_the_part_about_loss_needs_a_text_and_passes_over_it_once() -> None:
    without = selected(MACHINES["H100"], 20)
    assert len(timed(without)) == len(without.runs)
    assert any(note.startswith("No part about loss: no text") for note in without.notes)
    short = selected(MACHINES["H100"], 60, ("text:short.txt", 2_000_000))
    (steps,) = {run.config.num_steps for run in short.runs if not run.config.timed_seconds}
    assert 200_000 < steps * 4 * 4096 <= 2_000_000
    small = selected(MACHINES["H100"], 60, ("text:small.txt", 1_000_000))
    (one,) = {
        run.config
        for run in small.runs
        if run.why == "loss, 210 steps, seed 0" and not run.config.is_fp8
    }
    assert (one.micro_batch_size, one.learning_rate, one.lr_warmup_steps) == (1, 5e-5, 50)
    tiny = selected(MACHINES["H100"], 60, ("text:tiny.txt", 200_000))
    assert (
        "No part about loss: one pass over 'text:tiny.txt' holds less than 100 steps" in tiny.notes
    )


def test_with_time_for_it_losses_are_judged_in_the_setting_of_the_largest_batch() -> None:
    def losses(name: str, budget: float) -> set[tuple[str, int, int]]:
        runs = selected(MACHINES[name], budget, TEXT).runs
        return {cell_of(run.config) for run in runs if not run.config.timed_seconds}

    assert losses("H100", 20) == {("llama-3.2-1b", 1, 4)}
    (whole,) = losses("H100", 60)
    assert whole == ("llama-3.2-1b", 1, 10)
    assert whole in cells(timed(selected(MACHINES["H100"], 60, TEXT)))
    assert {batch for _, _, batch in losses("A100", 600)} == {1}  # nothing is timed there


def test_overrides_reach_every_run_and_what_fits() -> None:
    chosen = select(MACHINES["H100"], 20, TEXT, {"master_dtype": "bf16", "model": "llama-3.1-8b"})
    assert {run.config.master_dtype for run in chosen.runs} == {"bf16"}
    assert {model for model, _, _ in cells(timed(chosen))} == {"llama-3.1-8b"}
    assert all(run.config.validation_sequences == 0 for run in timed(chosen))


@pytest.mark.parametrize("name", ["RTX 4090", "A100", "8 H200"])
def test_too_short_a_budget_holds_nothing_and_the_least_that_does_is_known(name: str) -> None:
    there = MACHINES[name]
    chosen = selected(there, 2, TEXT)
    assert chosen.runs == ()
    assert chosen.least_budget
    assert selected(there, chosen.least_budget, TEXT).runs
    assert not selected(there, chosen.least_budget - 1, TEXT).runs


def test_no_budget_helps_where_no_model_fits() -> None:
    small = machine(("NVIDIA GeForce RTX 4060", 7.99, (8, 9)))
    chosen = selected(small, 20, TEXT)
    assert chosen.runs == ()
    assert chosen.least_budget is None
    (note,) = chosen.notes
    assert note.startswith("llama-3.2-1b on 1 GPU needs 23 GiB, and 7 are to be had; would fit: ")


def test_another_text_gets_a_part_about_loss_of_its_own() -> None:
    first = selected(MACHINES["H100"], 20, TEXT)
    again = select(MACHINES["H100"], 60, ("text:other.txt", 50_000_000), kept=first.runs)
    corpora = Counter(r.config.corpus for r in again.runs if not r.config.timed_seconds)
    assert corpora == {"text:my.txt": 6, "text:other.txt": 6}


def test_weights_are_gathered_and_updated_in_the_way_that_the_law_finds_faster() -> None:
    runs = [run for run in timed(selected(MACHINES["2 H200"], 600)) if run.config.num_gpus == 2]
    decided = [run.config.resolved() for run in runs]
    gathers, kernels = (
        {(c.model, c.micro_batch_size, c.precision): getattr(c, name) for c in decided}
        for name in ("fp8_all_gather", "update_kernel")
    )
    assert gathers["llama-3.2-1b", 1, "fp8_tensorwise"] is False
    assert gathers["llama-3.1-8b", 3, "fp8_tensorwise"] is True
    for precision in ("bf16", "fp8_tensorwise"):
        assert kernels["llama-3.2-1b", 1, precision] == "torch"
        assert kernels["llama-3.1-8b", 3, precision] == "one_pass"
    asked = select(MACHINES["2 H200"], 600, overrides={"fp8_all_gather": False}).runs
    assert not any(run.values["fp8_all_gather"] for run in asked)


def test_a_model_whose_logits_the_chunked_head_cannot_make_gets_the_plain_one(
    tmp_path: Path,
) -> None:
    AutoConfig.for_model("gemma2").save_pretrained(tmp_path)
    chosen = select(MACHINES["H200"], 60, overrides={"model": str(tmp_path)})
    assert chosen.runs
    assert {run.config.loss_head for run in chosen.runs} == {"plain"}
