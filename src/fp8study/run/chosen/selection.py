"""Which runs answer for the machine at hand within a budget of minutes: a pure function.

A *cell* is a model at a batch on a number of GPUs. A *block* is a cell's arms, one after the other
on the same GPUs in an order drawn at random, so that a ratio within it compares neither GPUs nor a
drifting clock; its number is the configuration's ``repeat``. Blocks are added in the order of what
they tell as long as there is time, and what is left out is said. Narrow blocks fill all GPUs at
once, after the wide ones.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fp8study.analysis.laws.room import HEADROOM, largest_batch
from fp8study.analysis.laws.shape import shape_of
from fp8study.core.config import RunConfig, make_config
from fp8study.core.presets import needs_plain_head
from fp8study.core.words import count
from fp8study.run.chosen.estimates import (
    capacity_gib,
    needed_gib,
    what_would_fit,
)
from fp8study.run.chosen.notes import blocks_in_words, what_is_special
from fp8study.run.chosen.timetable import BASE, Block, Chosen, Timetable, cell_of
from fp8study.run.defaults import suited_to
from fp8study.run.machine import Machine

#: From about 1B upwards; of the models of a rung, the first that fits.
LADDER = (("llama-3.2-1b",), ("qwen3-4b", "llama-3.2-3b"), ("llama-3.1-8b",), ("qwen3-14b",))
#: The part about loss, at a rate and a warm-up at which pairs scatter little (page Quality).
#: Validation at two points: its runs have no timings to be mixed up.
_LOSS: dict[str, Any] = {
    "timed_seconds": None, "num_gpus": 1, "micro_batch_size": 4, "validation_sequences": 32,
    "validation_points": 2, "learning_rate": 5e-5, "lr_warmup_steps": 50,
}  # fmt: skip
_ARMS = ("bf16", "fp8_tensorwise")
_ROWWISE = "fp8_rowwise"
#: Cells that bound FP8's lead: the best and the worst, on all GPUs and on one.
_NUM_BOUNDS = 4
_NUM_BLOCKS = 3
_SEEDS = (0, 1, 2)
#: Of all GPUs in a step: the synthetic corpus has 213.
_MOST_SEQUENCES = 192
#: Where the smallest model does not fit with `BASE`'s.
_SHORTER = 2048
#: Share of the budget that is kept for the part about loss, and the fewest steps that show some.
_LOSS_SHARE, _FEWEST_STEPS = 0.3, 100
#: Minutes before the first run has a GPU, and of the report.
_ALL_ROUND = 1.5
#: Minutes, a week.
_LONGEST_BUDGET = 7 * 24 * 60


@dataclass(frozen=True)
class Selection:
    runs: tuple[Chosen, ...]
    """In the order in which each GPU does its own."""
    notes: tuple[str, ...]
    """What was left out and why, and what is special about the machine."""
    least_budget: int | None = None
    """If no run was chosen, the fewest minutes that hold one; None: nothing fits, whatever the
    budget."""


def select(
    machine: Machine,
    budget_minutes: float,
    corpus: tuple[str, int] | None = None,
    overrides: Mapping[str, Any] | None = None,
    kept: Sequence[Chosen] = (),
) -> Selection:
    """Choose the runs that tell most within a budget.

    Args:
        machine: It has GPUs.
        budget_minutes: From the start to the report, with what was `kept`.
        corpus: The text to judge losses on and roughly how many tokens it has; None without any.
        overrides: Fields set in every run, as the model, but for those that it chooses.
        kept: An earlier selection's runs, which stay.
    """
    selector = _Selector(machine, dict(overrides or {}))
    found = selector.fill(budget_minutes, corpus, kept)
    runs, notes = found.table.runs, [*selector.notes, *found.notes]
    if not runs:
        budgets = itertools.chain(
            [_LONGEST_BUDGET], itertools.count(math.floor(budget_minutes) + 1)
        )
        if not selector.fill(next(budgets), corpus).table.runs:
            return Selection((), tuple(selector.reasons() if machine.has_fp8 else notes))
        least = next(minutes for minutes in budgets if selector.fill(minutes, corpus).table.runs)
        return Selection((), tuple(notes), least)
    if selector.cells:
        baselines = (c for c in (run.config for run in runs) if c.timed_seconds and not c.is_fp8)
        notes.append(blocks_in_words(map(cell_of, map(selector.config, selector.cells)), baselines))
    if found.left:
        notes.append(
            f"A later call with BUDGET={selector.whole_budget(found, corpus)} adds the missing ones"
        )
    return Selection(tuple(sorted(runs, key=lambda run: -len(run.gpus))), tuple(notes))


@dataclass(frozen=True)
class _Filled:
    table: Timetable
    left: list[Block]
    """Of the part about speed, for lack of time."""
    notes: list[str]


class _Selector:
    """What the blocks of one machine are, and why some are not."""

    def __init__(self, machine: Machine, overrides: dict[str, Any]) -> None:
        self.machine, self.overrides = machine, overrides
        self.capacity_gib = capacity_gib(machine)
        self.notes = what_is_special(machine)
        self.ladder = ((overrides["model"],),) if "model" in overrides else LADDER
        one = {"model": self.ladder[0][0], "num_gpus": 1}
        if "sequence_length" not in overrides and not self._batch(one):
            misfit, self.overrides = self._misfit(one), {"sequence_length": _SHORTER} | overrides
            if self._batch(one):
                self.notes.append(f"Sequences of {_SHORTER} tokens: {misfit}")
            else:
                self.overrides = overrides
        self.cells = self._cells() if machine.has_fp8 else []
        rowwise = self._batch(self.cells[0], [_ROWWISE]) if self.cells else 0
        self.asks_rowwise = rowwise and rowwise >= self.cells[0]["micro_batch_size"]

    def fill(
        self, budget: float, corpus: tuple[str, int] | None, kept: Sequence[Chosen] = ()
    ) -> _Filled:
        """Return who does what within a budget, with what was `kept`."""
        known = {run.config.resolved() for run in kept}
        table, until = Timetable(self.machine, kept), budget - _ALL_ROUND
        left = [b for b in self._speed_blocks if known.isdisjoint(c.resolved() for c in b.configs)]
        notes: list[str] = []
        if corpus is None:
            notes = ["No part about loss: no text can be had; SET='corpus=text:my.txt'"]
        elif not any(c.validation_points > 1 and c.corpus == corpus[0] for c in known):
            left = table.fill(left, until * (1 - _LOSS_SHARE), _ROWWISE)
            if not table.runs:  # one block tells more than a few steps of losses
                left = table.fill(left, until, _ROWWISE)
            losses, why_none = self._loss_blocks(*corpus, table, until)
            table.fill(losses, until)
            notes = [f"No part about loss: {why_none}"] if why_none else []
        left = table.fill(left, until, _ROWWISE)
        return _Filled(table, left, notes)

    def whole_budget(self, found: _Filled, corpus: tuple[str, int] | None) -> int:
        """Return the minutes with which a later call adds all that is left."""
        runs = found.table.runs
        whole = Timetable(self.machine, runs)
        whole.fill(found.left, math.inf, _ROWWISE)
        # A part about loss that is still to come takes its share.
        budgets = itertools.count(math.ceil(max(whole.ends()) + _ALL_ROUND))
        return next(minutes for minutes in budgets if not self.fill(minutes, corpus, runs).left)

    def config(self, chosen: Mapping[str, Any]) -> RunConfig:
        return make_config(BASE | self._values(chosen))

    def _values(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Return a run's fields: a cell's without its reason, under the overrides."""
        values = {n: v for n, v in chosen.items() if n != "why"} | self.overrides
        own = {"loss_head": "plain"} if needs_plain_head(values["model"]) else {}
        return own | values

    def _batch(self, chosen: Mapping[str, Any], arms: Iterable[str] = _ARMS) -> int:
        """Return the largest batch with which every arm fits; 0: none does."""
        configs = [self.config({**chosen, "precision": arm}) for arm in arms]
        shape = shape_of(configs[0].model)
        most = _MOST_SEQUENCES // configs[0].num_gpus
        return min(largest_batch(c, shape, self.capacity_gib, most) for c in configs)

    def _misfit(self, chosen: Mapping[str, Any]) -> str:
        """Say what a model that does not fit would need, and what would make it fit."""
        config = self.config(chosen)
        return (
            f"{config.model} on {count(config.num_gpus, 'GPU')} needs {needed_gib(config):.0f} "
            f"GiB, and {(1 - HEADROOM) * self.capacity_gib:.0f} are to be had"
            f"{what_would_fit(config, self.capacity_gib)}"
        )

    def reasons(self) -> list[str]:
        """Say why nothing fits: what the smallest model would need on all GPUs."""
        widest = {"model": self.ladder[0][0], "num_gpus": len(self.machine.gpus)}
        return [*what_is_special(self.machine), self._misfit(widest)]

    def _cells(self) -> list[dict[str, Any]]:
        """Return the cells that fit, the most telling first; ``why`` is one of their keys.

        First the two bounds of FP8's lead, where it should be largest and where smallest, on all
        GPUs and then on one; models and numbers of GPUs in between come last.
        """
        there = len(self.machine.gpus)
        found = []
        misfits: dict[int, str] = {}
        for width in sorted({1, min(2, there), there}):
            rungs = [[{"model": m, "num_gpus": width} for m in rung] for rung in self.ladder]
            fitting = [next(filter(self._batch, rung), None) for rung in rungs]
            misfits |= {
                number: self._misfit(rung[-1])  # which holds for fewer GPUs all the more
                for number, (rung, model) in enumerate(zip(rungs, fitting, strict=True))
                if model is None
            }
            models = [model for model in fitting if model]
            for model in models:
                is_edge = model in (models[0], models[-1])
                who = "smallest" if model == models[0] else "largest" if is_edge else "middle"
                most = self._batch(model)
                for batch in sorted({1, most}):
                    size = "largest batch" if batch == most else f"batch {batch}"
                    is_best = model == models[-1] and batch == most
                    is_bound = is_best or (model == models[0] and batch == 1)
                    is_between = not is_edge or width not in (1, there)
                    order = (is_between, not is_bound, -width, not is_best)
                    cell = model | {"micro_batch_size": batch, "why": f"{who} model, {size}"}
                    found.append((order, cell))
        self.notes += misfits.values()
        return [cell for _, cell in sorted(found, key=lambda item: item[0])]

    def _arm(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Return a run's fields, gathered and updated in the way that is faster by the law."""
        return suited_to(self.machine, self.config(chosen)) | self._values(chosen)

    def _block(self, cell: Mapping[str, Any], arms: Iterable[str] = _ARMS) -> Block:
        return Block(tuple(self._arm({**cell, "precision": arm}) for arm in arms), cell["why"])

    @cached_property
    def _speed_blocks(self) -> list[Block]:
        """The blocks of the part about speed, the most telling first.

        A cell's next block comes after the first blocks of as many other cells as there are bounds:
        an interval needs repeats. Of the first cell one block is to have a rowwise arm.
        """
        there = itertools.product(range(len(self.cells)), range(_NUM_BLOCKS))
        order = sorted(there, key=lambda block: (block[0] + _NUM_BOUNDS * block[1], block[::-1]))
        blocks = []
        for rank, number in order:
            cell = self.cells[rank]
            arms = (*_ARMS, _ROWWISE) if self.asks_rowwise and not rank else _ARMS
            why = f"{cell['why']}, block {number + 1}"
            blocks.append(self._block(cell | {"repeat": number, "why": why}, arms))
        return blocks

    def _loss_blocks(
        self, corpus: str, num_tokens: int, table: Timetable, until: float
    ) -> tuple[list[Block], str]:
        """Return the runs of the part about loss, as long as there is time; without any, say why.

        Each is a block of its own: which GPU a run is on does not change its loss.
        """
        cell = _LOSS | {"model": self.ladder[0][0], "corpus": corpus}
        if not self.machine.has_fp8:
            cell |= {"fp8_emulate": True, "sequence_length": _SHORTER, "micro_batch_size": 1}
        largest, usual = self._batch(cell), cell["micro_batch_size"]
        if not largest:
            return [], self._misfit(cell | {"micro_batch_size": 1})

        def blocks(batch: int, steps: int) -> list[Block]:
            told = {"num_steps": steps, "micro_batch_size": batch}
            why = f"loss, {steps} steps, seed "
            seeded = (cell | told | {"seed": n, "why": f"{why}{n}"} for n in _SEEDS)
            return [self._block(one, [arm]) for one in seeded for arm in _ARMS]

        def one_pass(batch: int) -> int:
            config = self.config(cell | {"micro_batch_size": batch})
            blocks_there = num_tokens // config.sequence_length - config.validation_sequences
            return blocks_there // config.sequences_per_step

        def most_steps(batch: int) -> int:
            lengths = range(_FEWEST_STEPS, one_pass(batch) + 1, 10)
            held = bisect.bisect(
                lengths, 0, key=lambda steps: not table.holds(blocks(batch, steps), until)
            )
            return lengths[held - 1] if held else 0

        # At the largest batch, if it is timed too, a verdict decides. Where there is time for too
        # few steps of it, a smaller one says more.
        timed = largest if self.cells else 1
        for batch in (timed, min(usual, largest), 1):
            if steps := most_steps(batch):
                return blocks(batch, steps), ""
        short = one_pass(1) < _FEWEST_STEPS
        held_by = f"one pass over '{corpus}'" if short else "the time"
        return [], f"{held_by} holds less than {_FEWEST_STEPS} steps"
