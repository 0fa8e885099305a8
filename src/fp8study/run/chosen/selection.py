"""Which runs answer for the machine at hand within a budget of minutes: a pure function.

A *cell* is a model at a batch on a number of GPUs. A *block* is a cell's arms, one after the other
on the same GPUs in an order drawn at random, so that a ratio within it compares neither GPUs nor a
drifting clock; its number is the configuration's ``repeat``. Blocks are added in the order of what
they tell as long as there is time, and what is left out is said. Narrow blocks fill all GPUs at
once, after the wide ones.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8study.analysis.laws.memory import largest_batch
from fp8study.analysis.laws.nearby import gathers_faster_in_fp8
from fp8study.analysis.laws.shape import shape_of
from fp8study.core.config import RunConfig, make_config
from fp8study.run.chosen.estimates import (
    capacity_gib,
    held_minutes,
    needed_gib,
    remedies,
    step_seconds,
)
from fp8study.run.machine import Machine

#: From about 1B upwards; of the models of a rung, the first that fits.
LADDER = (("llama-3.2-1b",), ("qwen3-4b", "llama-3.2-3b"), ("llama-3.1-8b",), ("qwen3-14b",))
BASE: dict[str, Any] = {
    "path": "tuned", "sequence_length": 4096, "num_steps": 20_000, "num_warmup_steps": 5,
    "timed_seconds": 20.0, "learning_rate": 3e-4, "lr_warmup_steps": 20, "log_every": 5,
}  # fmt: skip
#: The part about loss. Validation at two points: its runs have no timings to be mixed up.
_LOSS: dict[str, Any] = {
    "timed_seconds": None, "num_gpus": 1, "micro_batch_size": 4, "validation_sequences": 32,
    "validation_points": 2,
}  # fmt: skip
_ARMS = ("bf16", "fp8_tensorwise")
_ROWWISE = "fp8_rowwise"
#: Cells that bound FP8's lead: the best and the worst, on all GPUs and on one.
_NUM_BOUNDS = 4
_NUM_BLOCKS = 3
_SEEDS = (0, 1, 2)
#: Share of a GPU's memory that no planned run may take.
HEADROOM = 0.1
#: Of all GPUs in a step: the synthetic corpus has 213.
_MOST_SEQUENCES = 192
#: Where the smallest model does not fit with `BASE`'s.
_SHORTER = 2048
#: Share of the budget that is kept for the part about loss, and the fewest steps that show some.
_LOSS_SHARE, _FEWEST_STEPS = 0.3, 50
#: Minutes before the first run has a GPU, and of the report.
_ALL_ROUND = 1.5


@dataclass(frozen=True)
class Chosen:
    """One run: what differs from `BASE`, where and how long it runs, and why."""

    values: Mapping[str, Any]
    gpus: tuple[int, ...]
    """Places in the machine's list of GPUs."""
    minutes: float
    why: str

    @property
    def config(self) -> RunConfig:
        return make_config(BASE | dict(self.values))


@dataclass(frozen=True)
class Selection:
    runs: tuple[Chosen, ...]
    """In the order in which each GPU does its own."""
    notes: tuple[str, ...]
    """What was left out and why, and what is special about the machine."""


@dataclass(frozen=True)
class _Block:
    arms: tuple[dict[str, Any], ...]
    minutes: tuple[float, ...]
    why: str


@dataclass
class _Timetable:
    """Who does what on which GPU, in minutes since the first run began."""

    num_gpus: int
    runs: list[Chosen] = field(default_factory=list)

    def ends(self) -> list[float]:
        return [sum(r.minutes for r in self.runs if gpu in r.gpus) for gpu in range(self.num_gpus)]

    def add(self, block: _Block, until: float, rng: random.Random) -> bool:
        """Put a block where there is time first, or return False if it would end after `until`."""
        ends, width = self.ends(), block.arms[0]["num_gpus"]
        # Neighbours: where widths divide each other, nobody waits in between.
        places = (range(first, first + width) for first in range(0, self.num_gpus, width))
        whole = [place for place in places if place.stop <= self.num_gpus]
        place = min(whole, key=lambda gpus: max(ends[gpu] for gpu in gpus))
        if max(ends[gpu] for gpu in place) + sum(block.minutes) > until:
            return False
        arms = zip(block.arms, block.minutes, strict=True)
        runs = [Chosen(values, tuple(place), minutes, block.why) for values, minutes in arms]
        self.runs += rng.sample(runs, len(runs))
        return True


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
    rng = random.Random(" ".join(gpu.uuid for gpu in machine.gpus))
    table = _Timetable(len(machine.gpus), list(kept))
    until = budget_minutes - _ALL_ROUND
    known = {run.config for run in kept}
    blocks = selector.speed_blocks() if machine.has_fp8 else []
    blocks = [block for block in blocks if make_config(BASE | block.arms[0]) not in known]
    wants_loss = corpus is not None and not any(config.validation_points > 1 for config in known)
    share = _LOSS_SHARE if wants_loss else 0.0
    left = [block for block in blocks if not table.add(block, until * (1 - share), rng)]
    if corpus is None:
        selector.notes.append("No part about loss: no text can be had; SET='corpus=text:my.txt'")
    elif wants_loss:
        for block in selector.loss_blocks([until - end for end in table.ends()], *corpus):
            table.add(block, until, rng)
    left = [block for block in left if not table.add(block, until, rng)]
    if left:
        selector.notes.append(_what_is_left(left, table, share))
    runs = sorted(table.runs, key=lambda run: -len(run.gpus))
    return Selection(tuple(runs), tuple(selector.notes))


class _Selector:
    """What the blocks of one machine are, and why some are not."""

    def __init__(self, machine: Machine, overrides: dict[str, Any]) -> None:
        self.machine, self.overrides = machine, overrides
        self.capacity_gib = capacity_gib(machine)
        self.notes = _what_is_special(machine)
        self.ladder = ((overrides["model"],),) if "model" in overrides else LADDER
        one = {"model": self.ladder[0][0], "num_gpus": 1}
        if "sequence_length" not in overrides and not self._batch(one):
            self.notes.append(f"Sequences of {_SHORTER} tokens: {self._misfit(one)}")
            self.overrides = {"sequence_length": _SHORTER} | overrides

    def _values(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Return a run's fields: a cell's without its reason, under the overrides."""
        values = {n: v for n, v in chosen.items() if n != "why"} | self.overrides
        return {"strategy": "none" if values["num_gpus"] == 1 else "fsdp2"} | values

    def _batch(self, chosen: Mapping[str, Any], arms: Iterable[str] = _ARMS) -> int:
        """Return the largest batch with which every arm fits; 0: none does."""
        configs = [make_config(BASE | self._values({**chosen, "precision": arm})) for arm in arms]
        shape = shape_of(configs[0].model)
        most = min(largest_batch(c, shape, self.capacity_gib, HEADROOM) for c in configs)
        return min(most, _MOST_SEQUENCES // configs[0].num_gpus)

    def _misfit(self, chosen: Mapping[str, Any]) -> str:
        """Say what a model that does not fit would need, and what would make it fit."""
        config = make_config(BASE | self._values(chosen))
        usable = (1 - HEADROOM) * self.capacity_gib
        cures = remedies(config, usable)
        return (
            f"{config.model} on {_gpus(config.num_gpus)} needs {needed_gib(config):.0f} GiB, and "
            f"{usable:.0f} are to be had{': ' * bool(cures)}{cures}"
        )

    def _cells(self) -> list[dict[str, Any]]:
        """Return the cells that fit, the most telling first; ``why`` is one of their keys.

        First the two bounds of FP8's lead, where it should be largest and where smallest, on all
        GPUs and then on one; models and numbers of GPUs in between come last.
        """
        there = len(self.machine.gpus)
        found = []
        for count in sorted({1, min(2, there), there}):
            rungs = [[{"model": m, "num_gpus": count} for m in rung] for rung in self.ladder]
            fitting = [next(filter(self._batch, rung), None) for rung in rungs]
            self.notes += [
                self._misfit(rung[-1])
                for rung, model in zip(rungs, fitting, strict=True) if model is None
            ]  # fmt: skip
            models = [model for model in fitting if model]
            for model in models:
                is_edge = model in (models[0], models[-1])
                who = "smallest" if model == models[0] else "largest" if is_edge else "middle"
                most = self._batch(model)
                for batch in sorted({1, most}):
                    size = "largest batch" if batch == most else f"batch {batch}"
                    is_best = model == models[-1] and batch == most
                    is_bound = is_best or (model == models[0] and batch == 1)
                    is_between = not is_edge or count not in (1, there)
                    order = (is_between, not is_bound, -count, not is_best)
                    cell = model | {"micro_batch_size": batch, "why": f"{who} model, {size}"}
                    found.append((order, cell))
        return [cell for _, cell in sorted(found, key=lambda item: item[0])]

    def _arm(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Return a run's fields, its weights gathered in the way that is faster by the law."""
        values = self._values(chosen)
        config = make_config(BASE | values).resolved()
        if config.fp8_all_gather and not gathers_faster_in_fp8(config, self.machine.gpus[0].name):
            values = {"fp8_all_gather": False} | values
        return values

    def _block(self, cell: Mapping[str, Any], arms: Iterable[str] = _ARMS) -> _Block:
        runs = [self._arm({**cell, "precision": arm}) for arm in arms]
        minutes = [held_minutes(make_config(BASE | run), self.machine) for run in runs]
        return _Block(tuple(runs), tuple(minutes), cell["why"])

    def speed_blocks(self) -> list[_Block]:
        """Return all blocks of the part about speed, the most telling first.

        The first cell has a rowwise arm in its first block. A cell's next block comes after the
        first blocks of as many other cells as there are bounds: an interval needs repeats.
        """
        cells = self._cells()
        arms: list[tuple[str, ...]] = [_ARMS] * len(cells)
        if cells and self._batch(cells[0], (*_ARMS, _ROWWISE)) >= cells[0]["micro_batch_size"]:
            arms[0] = (*_ARMS, _ROWWISE)
        order = sorted(
            ((n, rank) for n in range(_NUM_BLOCKS) for rank in range(len(cells))),
            key=lambda block: (block[1] + _NUM_BOUNDS * block[0], block),
        )
        return [
            self._block(
                cells[rank] | {"repeat": n, "why": f"{cells[rank]['why']}, block {n + 1}"},
                _ARMS if n else arms[rank],
            )
            for n, rank in order
        ]

    def loss_blocks(self, rest: Sequence[float], corpus: str, num_tokens: int) -> list[_Block]:
        """Return the runs of the part about loss, as long as fits into the minutes that GPUs have.

        Each is a block of its own: which GPU a run is on does not change its loss.
        """
        cell = _LOSS | {"model": self.ladder[0][0], "corpus": corpus}
        if not self.machine.has_fp8:
            cell |= {"fp8_emulate": True, "sequence_length": _SHORTER, "micro_batch_size": 1}
        cell["micro_batch_size"] = min(cell["micro_batch_size"], self._batch(cell))
        if not cell["micro_batch_size"]:
            self.notes.append(f"No part about loss: {self._misfit(cell)}")
            return []
        config = make_config(BASE | self._values(cell | {"precision": _ARMS[-1]}))
        step_minutes = step_seconds(config, self.machine) / 60
        held = held_minutes(config, self.machine) - config.num_steps * step_minutes
        for_steps = 0.9 * (_longest(rest, len(_SEEDS) * len(_ARMS)) - held)  # the rest validates
        one_pass = num_tokens // config.sequence_length - config.validation_sequences
        most = one_pass // config.sequences_per_step
        steps = min(int(for_steps / step_minutes), most) // 10 * 10
        if steps < _FEWEST_STEPS:
            what = "the time" if most >= _FEWEST_STEPS else f"one pass over '{corpus}'"
            self.notes.append(f"No part about loss: {what} holds less than {_FEWEST_STEPS} steps")
            return []
        return [
            self._block(
                cell
                | {"num_steps": steps, "seed": seed, "why": f"loss, {steps} steps, seed {seed}"},
                [arm],
            )
            for seed in _SEEDS
            for arm in _ARMS
        ]


def _longest(rest: Sequence[float], num_runs: int) -> float:
    """Return how long each of some runs may be, if each GPU has the `rest` of its minutes left."""
    lengths = (left / number for left in rest for number in range(1, num_runs + 1))
    enough = (x for x in lengths if x > 0 and sum(int(r / x + 1e-9) for r in rest) >= num_runs)
    return max(enough, default=0.0)


def _what_is_special(machine: Machine) -> list[str]:
    """Say what about the GPUs decides what can be asked of them."""
    notes = []
    if len({gpu.name for gpu in machine.gpus}) > 1:
        notes.append(
            f"The GPUs differ: {machine.gpus_in_words}. Runs must fit the smallest, and a "
            "comparison stays on its GPUs; CUDA_VISIBLE_DEVICES chooses"
        )
    if not machine.has_fp8:
        weakest = min(machine.gpus, key=lambda gpu: gpu.compute_capability)
        notes.append(
            "No part about speed: FP8 needs compute capability 8.9 (Ada, Hopper) or newer, and "
            f"{weakest.name} has {weakest.capability}; for losses FP8 is emulated"
        )
    return notes


def _what_is_left(left: Sequence[_Block], table: _Timetable, share: float) -> str:
    """Name the blocks that there was no time for, and the budget that would hold them."""
    first = [block for block in left if not block.arms[0]["repeat"]]
    said = [
        f"{run['model']} at batch {run['micro_batch_size']} on {_gpus(run['num_gpus'])}"
        for run in (block.arms[0] for block in first)
    ]
    again = Counter(b.arms[0]["repeat"] + 1 for b in left if b.arms[0]["repeat"])
    said += [
        f"block {number} of {count} cell{'s' * (count > 1)}"
        for number, count in sorted(again.items())
    ]
    whole = _Timetable(table.num_gpus, list(table.runs))
    for block in left:
        whole.add(block, math.inf, random.Random(0))
    budget = math.ceil(max(whole.ends()) / (1 - share) + _ALL_ROUND)
    return f"No time for {', '.join(said)}; BUDGET={budget} holds all"


def _gpus(number: int) -> str:
    return f"{number} GPU{'s' * (number > 1)}"
