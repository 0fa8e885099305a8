"""Should this model be pre-trained in FP8 on these GPUs: what records say, else what the laws say.

A number is *measured* (its runs are named), *predicted* (by a law, between what was measured) or
*modelled* (beyond that; `Advice.beyond` says in what).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd

from fp8study.analysis.arms import ratio_of
from fp8study.analysis.laws import memory, speed
from fp8study.analysis.laws.account import Pair, label_of, lead_table
from fp8study.analysis.laws.cells import Cell, cell_key, cells_of
from fp8study.analysis.laws.communication import NETWORK
from fp8study.analysis.laws.evidence import nearest_losses
from fp8study.analysis.laws.frozen import Runs
from fp8study.analysis.laws.here import Measured, law_of
from fp8study.analysis.laws.nearby import (
    HEADROOM,
    Law,
    as_fp8,
    changes,
    command,
    remedies,
    settings,
    ways,
)
from fp8study.analysis.laws.shape import ModelShape, shape_of
from fp8study.analysis.laws.speed_fit import is_fitted
from fp8study.core.config import ResolvedConfig
from fp8study.core.hardware import GpuPeak, find_peak

MEASURED, PREDICTED, MODELLED = "measured", "predicted", "modelled"
#: The most GPUs that are spoken of.
MOST_GPUS = 1024
#: How much wider an interval is beyond what was measured: the laws' errors there are not known.
_WIDER = 2.0
#: What makes two cells the same question, whatever form of the tuned path they were run on.
_QUESTION = (
    "model", "precision", "num_gpus", "num_nodes", "sharding", "strategy", "sequence_length",
    "micro_batch_size", "gradient_accumulation_steps", "master_dtype", "path",
    "activation_checkpointing", "compile", "fp8_all_gather", "skip", "untrained",
    "optimizer_binding", "max_grad_norm",
)  # fmt: skip


@dataclass(frozen=True)
class Quantity:
    """A number, where it is from, and how far it may be off."""

    value: float
    kind: str
    """`MEASURED`, `PREDICTED` or `MODELLED`."""
    low: float | None = None
    high: float | None = None
    """A 95 % interval of what was measured; else what nine of ten predictions stay within."""
    run_ids: tuple[str, ...] = ()
    """``machine/study/run_id`` of what was measured."""


@dataclass(frozen=True)
class Option:
    """One way to compute: BF16, or an FP8 recipe."""

    precision: str
    label: str
    gathers_fp8: bool
    tokens_per_second_per_gpu: Quantity
    lead_pct: Quantity | None
    """Over BF16; None for BF16 itself."""
    memory_gib: Quantity
    limit: str
    """What limits the step, as `StepParts.limit`."""


@dataclass(frozen=True)
class Advice:
    """The answer for one model on one kind of GPU."""

    config: dict[str, Any]
    """The BF16 run that is spoken of, resolved."""
    settings: tuple[str, ...]
    """What is set in it so that it fits."""
    gpu: str
    capacity_gib: float
    fits: bool
    """In BF16, with `HEADROOM` to spare."""
    fp8_fits: bool
    """The same of any FP8 option."""
    memory_parts_gib: dict[str, float]
    building_gib: float
    remedies: tuple[str, ...]
    """Where it does not fit: what would."""
    options: tuple[Option, ...]
    """BF16 first, then by speed."""
    step_parts_ms: dict[str, dict[str, float]]
    """Precision → part of the step → ms, by the law; of BF16 and of the fastest FP8 that fits."""
    choice: str
    """`Option.label` of what to use: of what fits, if anything does."""
    best_fp8: str
    """`Option.label` of the fastest FP8 that fits, or of the fastest if none does."""
    is_clear: bool
    """Whether the choice's lead is beyond its interval; else both are as good."""
    measured: Measured | None
    """What was measured here in place of the law's constants, as `measure_here` returns it."""
    beyond: tuple[str, ...]
    """In what this goes beyond what was measured."""
    left_out: tuple[str, ...]
    """What the laws leave out."""
    loss_evidence: tuple[str, ...]
    loss_uncovered: tuple[str, ...]
    changes: tuple[tuple[str, float], ...]
    """What would change the answer: the change, and FP8's lead then, %."""
    commands: tuple[str, ...]
    """What would check it; empty where a run could not even build the model."""


class Advisor:
    """Answers from committed runs and the frozen laws.

    Args:
        runs: From `fp8study.analysis.laws.cells.read_runs`.
        loss_gaps: Rows of the report's table of loss gaps.
    """

    def __init__(self, runs: Runs, loss_gaps: pd.DataFrame) -> None:
        self.runs, self.loss_gaps = runs, loss_gaps
        self.cells = cells_of(runs)
        self.timed = [cell for cell in self.cells if is_fitted(cell)]
        tested = lead_table(self.cells)
        errors = tested[["error_points", "step_error_pct"]].abs()
        #: By whether there are several GPUs: within what nine of ten predictions of leads, points,
        #: and of steps, %, are.
        self.errors = errors.groupby(tested["num_gpus"] > 1).quantile(0.9)

    def name_of(self, gpu: GpuPeak) -> str:
        """Return what drivers name a GPU, where any was measured on; else its slug."""
        return next((c.gpu for c in self.timed if find_peak(c.gpu) == gpu), gpu.slug)

    def advise(
        self,
        config: ResolvedConfig,
        gpu: GpuPeak,
        gpu_name: str,
        capacity: float,
        measured: Measured | None,
    ) -> Advice:
        """Answer for a BF16 run of this configuration and every FP8 recipe in its place.

        Args:
            config: In BF16, on the tuned path.
            gpu: Its datasheet.
            gpu_name: As its driver or `name_of` names it.
            capacity: Its memory, GiB.
            measured: What was measured of the model's layers on this GPU, if anything.

        Raises:
            UserError: As `shape_of`.
        """
        shape = shape_of(config.model)
        found = memory.predicted_memory(config, shape)
        law = law_of(shape, gpu, measured)
        beyond = partial(self._beyond, shape=shape, gpu_name=gpu_name, is_measured=bool(measured))
        options = [
            self._option(config, way, shape, law, gpu_name, beyond(way))
            for way in ways(config, shape)
        ]
        options[1:] = sorted(options[1:], key=lambda o: -o.tokens_per_second_per_gpu.value)
        usable = (1 - HEADROOM) * capacity
        fitting = [option for option in options[1:] if option.memory_gib.value <= usable]
        best = (fitting or options[1:])[0]
        lead = best.lead_pct
        assert lead is not None
        low, high = (lead.value if end is None else end for end in (lead.low, lead.high))
        fits = found.total <= usable
        evidence, uncovered = nearest_losses(self.loss_gaps, self.runs, shape, best.precision)
        shown = {"bf16": config, best.precision: _fp8(config, best)}
        return Advice(
            config=config.to_dict(),
            settings=tuple(settings(config)),
            gpu=gpu_name,
            capacity_gib=capacity,
            fits=fits,
            fp8_fits=bool(fitting),
            memory_parts_gib=found.parts(),
            building_gib=found.building,
            remedies=() if fits else tuple(remedies(config, shape, capacity)),
            options=tuple(options),
            step_parts_ms={
                name: law(way).parts() | {"host": law(way).host} for name, way in shown.items()
            },
            choice=best.label if low > 0 else options[0].label,
            best_fp8=best.label,
            is_clear=low > 0 or high < 0,
            beyond=tuple(beyond(config)),
            measured=measured,
            left_out=tuple(_left_out(shape)),
            loss_evidence=evidence,
            loss_uncovered=uncovered,
            changes=tuple(changes(config, shape, law, capacity)),
            commands=tuple(command(way) for way in shown.values() if found.building <= capacity),
        )

    def _option(
        self,
        bf16: ResolvedConfig,
        config: ResolvedConfig,
        shape: ModelShape,
        law_of: Law,
        gpu_name: str,
        beyond: list[str],
    ) -> Option:
        laws = [law_of(way) for way in (bf16, config)]
        cell, partner = self._pair(config, bf16, gpu_name)
        kind = MODELLED if beyond else PREDICTED
        wider = _WIDER if beyond else 1.0
        lead_error, step_error = map(float, self.errors.loc[config.num_gpus > 1])
        law, points = speed.lead_pct(laws[0].total, laws[1].total), wider * lead_error
        lead = Quantity(law, kind, law - points, law + points) if config.is_fp8 else None
        own, error = 1000 * config.tokens_per_step / config.num_gpus / laws[1].total, wider
        error *= step_error / 100
        if partner is not None and partner.rates:  # measured BF16, and the law's lead over it
            base = statistics.median(value for _, value in partner.rates)
            own, error = base * (1 + law / 100), points / (100 + law)
        rate = Quantity(own, kind, own * (1 - error), own * (1 + error))
        peak = memory.predicted_memory(config, shape).total
        filled = Quantity(peak, kind)
        if cell is not None and cell.rates:
            rates = [value for _, value in cell.rates]
            rate = Quantity(
                statistics.median(rates), MEASURED, min(rates), max(rates), tuple(cell.ids)
            )
            if cell.peak_gib:
                filled = Quantity(cell.peak_gib, MEASURED, run_ids=tuple(cell.ids))
            if partner is not None and partner.rates and config.is_fp8:
                lead = _measured_lead(cell, partner)
        return Option(
            config.precision, label_of(config), bool(config.fp8_all_gather), rate, lead, filled,
            laws[1].limit,
        )  # fmt: skip

    def _pair(
        self, config: ResolvedConfig, bf16: ResolvedConfig, gpu_name: str
    ) -> tuple[Cell | None, Cell | None]:
        """Return the cells of a configuration and of its BF16 partner: the same form, if any."""
        ours, theirs = (self._matching(way, gpu_name) for way in (config, bf16))
        for cell in ours:
            for partner in theirs:
                if Pair(cell, partner).lead_pct is not None:
                    return cell, partner
        return next(iter(ours), None), next(iter(theirs), None)

    def _matching(self, config: ResolvedConfig, gpu_name: str) -> list[Cell]:
        """Return cells of one question, the exact configuration first, then by number of runs."""
        key, wanted = cell_key(config, gpu_name), _question(config)
        found = [c for c in self.timed if c.gpu == gpu_name and _question(c.config) == wanted]
        return sorted(found, key=lambda c: (cell_key(c.config, c.gpu) != key, -len(c.rates)))

    def _beyond(
        self, config: ResolvedConfig, shape: ModelShape, gpu_name: str, is_measured: bool
    ) -> list[str]:
        """Say in what a configuration is beyond the cells that the speed law was fitted to."""
        known = [cell for cell in self.timed if cell.gpu == speed.FITTED_GPU]
        spans: dict[str, tuple[float, list[Any], str]] = {
            "GPUs": (config.num_gpus, [c.config.num_gpus for c in known], "g"),
            "billion weights": (shape.num_parameters / 1e9,
                                [c.shape.num_parameters / 1e9 for c in known], ".3g"),
            "tokens a sequence": (config.sequence_length,
                                  [c.config.sequence_length for c in known], ",d"),
            "tokens a GPU and pass": (
                config.micro_batch_size * config.sequence_length,
                [c.config.micro_batch_size * c.config.sequence_length for c in known], ",d"),
        }  # fmt: skip
        found = [
            f"{format(value, spec)} {what}; measured: {format(min(seen), spec)} to "
            f"{format(max(seen), spec)}"
            for what, (value, seen, spec) in spans.items()
            if not min(seen) <= value <= max(seen)
        ]
        if gpu_name != speed.FITTED_GPU:
            by = "the copy measured here" if is_measured else "datasheets"
            what = "loss, optimizer and FSDP2's copies" if is_measured else "times"
            found.insert(0, f"{gpu_name}: {what} of an {speed.FITTED_GPU}, scaled by {by}")
        if config.num_nodes > 1:
            found.append(
                f"a network that gives each GPU {NETWORK.gb_per_s:g} GB/s and takes "
                f"{NETWORK.hop_us:g} µs from node to node: assumed"
            )
        elif config.num_gpus > 1 and gpu_name != speed.FITTED_GPU and not is_measured:
            found.append(f"links between GPUs as fast as those of an {speed.FITTED_GPU}: assumed")
        if config.activation_checkpointing:
            found.append("layers recomputed in the backward pass: never timed")
        if config.is_fp8 and config.precision not in {c.config.precision for c in known}:
            found.append(f"{label_of(config)}: never timed")
        if shape.num_experts > 1:
            found.append("a mixture of experts: none was measured")
        return found


def _question(config: ResolvedConfig) -> list[Any]:
    ignored = () if config.is_fp8 else ("fp8_all_gather", "skip")
    values = [getattr(config, name) for name in _QUESTION if name not in ignored]
    return [*values[:-1], values[-1] is not None]


def _fp8(config: ResolvedConfig, option: Option) -> ResolvedConfig:
    return as_fp8(config, option.precision, option.gathers_fp8)


def _measured_lead(cell: Cell, partner: Cell) -> Quantity:
    """Return the records' lead, with an interval where both have three runs or more."""
    rates = [[value for _, value in side.rates] for side in (cell, partner)]
    lead = Pair(cell, partner).lead_pct
    ids = tuple(cell.ids + partner.ids)
    ratio = ratio_of([rates[0]], [rates[1]])
    if lead is None:
        lead = 100 * (statistics.median(rates[0]) / statistics.median(rates[1]) - 1)
    if ratio is None or ratio.interval is None:
        return Quantity(lead, MEASURED, run_ids=ids)
    low, high = (100 * (end - 1) for end in (ratio.interval.low, ratio.interval.high))
    return Quantity(lead, MEASURED, low, high, ids)


def _left_out(shape: ModelShape) -> list[str]:
    if shape.num_experts == 1:
        return []
    return [
        "routing, moving tokens between experts, experts with more tokens than others",
        "experts stay in BF16, since torchao converts nn.Linear only: FP8 is attention's alone",
    ]
