"""Which runs are chosen for a machine's GPUs and a budget: a function of those alone."""

from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoConfig

from fp8study.analysis.laws.memory import predicted_memory
from fp8study.analysis.laws.room import HEADROOM
from fp8study.analysis.laws.shape import shape_of
from fp8study.run.chosen.estimates import compile_minutes, held_minutes
from fp8study.run.chosen.selection import select
from fp8study.run.chosen.timetable import Chosen, cell_of
from tests.machines import A100, H100, H200, machine
from tests.run.selections import MACHINES, TEXT, cells, minutes, selected, timed

#: Of 4,096 tokens, in the synthetic corpus.
NUM_SEQUENCES = 213


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
    assert "reshard_after_forward=true on 2 GPUs (69 GiB)" in eight_b
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


def test_a_card_of_24_gib_takes_shorter_sequences_and_says_so() -> None:
    chosen = selected(MACHINES["RTX 4090"], 20, TEXT)
    assert {run.config.sequence_length for run in chosen.runs} == {2048}
    assert chosen.notes[0].startswith("Sequences of 2048 tokens: llama-3.2-1b on 1 GPU needs 23 ")
    eight_b = next(note for note in chosen.notes if note.startswith("llama-3.1-8b"))
    assert "would fit: master_dtype=bf16 " in eight_b  # in FP32 no card can build it


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


def test_overrides_reach_every_run_and_what_fits() -> None:
    chosen = select(MACHINES["H100"], 20, TEXT, {"master_dtype": "bf16", "model": "llama-3.1-8b"})
    assert {run.config.master_dtype for run in chosen.runs} == {"bf16"}
    assert {model for model, _, _ in cells(timed(chosen))} == {"llama-3.1-8b"}
    assert all(run.config.validation_sequences == 0 for run in timed(chosen))


def test_weights_are_gathered_and_updated_in_the_way_that_the_law_finds_faster() -> None:
    runs = [run for run in timed(selected(MACHINES["8 H200"], 600)) if run.config.num_gpus == 8]
    decided = [run.config.resolved() for run in runs]
    gathers, kernels = (
        {(c.model, c.micro_batch_size, c.precision): getattr(c, name) for c in decided}
        for name in ("fp8_all_gather", "update_kernel")
    )
    assert gathers["llama-3.2-1b", 1, "fp8_tensorwise"] is False
    assert gathers["llama-3.1-8b", 5, "fp8_tensorwise"] is True
    for precision in ("bf16", "fp8_tensorwise"):
        assert kernels["llama-3.2-1b", 1, precision] == "torch"
        assert kernels["llama-3.1-8b", 5, precision] == "one_pass"
    two = [run for run in timed(selected(MACHINES["2 H200"], 600)) if run.config.num_gpus == 2]
    launched = {(c.model, c.micro_batch_size): c.step_launch for c in (run.config for run in two)}
    assert launched["llama-3.2-1b", 1] == "as_graph"
    assert launched["llama-3.1-8b", 3] is None
    asked = select(MACHINES["2 H200"], 600, overrides={"fp8_all_gather": False}).runs
    assert not any(run.values["fp8_all_gather"] for run in asked)


def test_a_model_whose_logits_the_chunked_head_cannot_make_gets_the_plain_one(
    tmp_path: Path,
) -> None:
    AutoConfig.for_model("gemma2").save_pretrained(tmp_path)
    chosen = select(MACHINES["H200"], 60, overrides={"model": str(tmp_path)})
    assert chosen.runs
    assert {run.config.loss_head for run in chosen.runs} == {"plain"}
