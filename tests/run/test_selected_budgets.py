"""What budgets hold of the runs that are chosen for a machine, and what a larger one adds."""

import dataclasses
from collections import Counter

import pytest

from fp8study.run.chosen.selection import Selection, select
from fp8study.run.chosen.timetable import cell_of
from tests.machines import machine
from tests.run.selections import MACHINES, TEXT, minutes, selected, timed


def test_a_short_budget_of_two_gpus_asks_about_both() -> None:
    chosen = timed(selected(MACHINES["2 H200"], 10, TEXT))
    assert {len(run.gpus) for run in chosen[:3]} == {2}
    assert chosen[0].config.model == "llama-3.1-8b"


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


def blocks_said(chosen: Selection) -> str:
    return next(note for note in chosen.notes if note.startswith("Blocks"))


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


def later(chosen: Selection) -> int | None:
    """Return the budget that a later call is told to give."""
    said = [note for note in chosen.notes if "BUDGET=" in note]
    return int(said[0].split("BUDGET=")[1].split()[0]) if said else None


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


def test_a_kept_run_that_says_more_of_itself_is_not_chosen_again() -> None:
    there = MACHINES["2 H200"]
    said = [
        dataclasses.replace(run, values={**run.values, "strategy": run.config.resolved().strategy})
        for run in selected(there, 20, TEXT).runs
    ]
    runs = select(there, 60, TEXT, kept=said).runs
    assert len({run.config.resolved() for run in runs}) == len(runs) > len(said)


def test_a_larger_budget_keeps_what_was_chosen_and_adds_to_it() -> None:
    there = MACHINES["2 H200"]
    first = selected(there, 20, TEXT)
    again = select(there, 20, TEXT, kept=first.runs)
    more = select(there, 60, TEXT, kept=first.runs)
    assert set(map(id, again.runs)) == set(map(id, first.runs))
    assert set(map(id, first.runs)) < set(map(id, more.runs))
    assert minutes(more, there) <= 59
    assert len({run.config for run in more.runs}) == len(more.runs)


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
