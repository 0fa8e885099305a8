"""The part about loss among the runs that are chosen for a machine."""

from collections import Counter

from fp8study.run.chosen.selection import select
from fp8study.run.chosen.timetable import cell_of
from tests.run.selections import MACHINES, TEXT, cells, selected, timed


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


def test_another_text_gets_a_part_about_loss_of_its_own() -> None:
    first = selected(MACHINES["H100"], 20, TEXT)
    again = select(MACHINES["H100"], 60, ("text:other.txt", 50_000_000), kept=first.runs)
    corpora = Counter(r.config.corpus for r in again.runs if not r.config.timed_seconds)
    assert corpora == {"text:my.txt": 6, "text:other.txt": 6}
