"""Should this model be pre-trained in FP8 on these GPUs: what records say, else what the laws say.

A number is *measured* (its runs are named), *predicted* (by a law, between what was measured) or
*modelled* (beyond that; `Advice.beyond` says in what). What was measured is the report's: the same
rows, the same rule. What was predicted is judged by that rule too, after all that was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import pandas as pd

from fp8study.analysis.advice.answer import Advice, Change, Option
from fp8study.analysis.advice.asked import Question
from fp8study.analysis.advice.by_law import ByLaw, chosen
from fp8study.analysis.advice.commands import check_of_loss, settings, smaller_like, to_check
from fp8study.analysis.advice.evidence import (
    CLIPPED,
    Decided,
    Decisions,
    measured_beside,
    predicted_verdict,
    way_of,
)
from fp8study.analysis.advice.figures import (
    MEASURED,
    Row,
    lead_apart,
    lead_of,
    of_cell,
    of_row,
)
from fp8study.analysis.advice.loss_evidence import formats_uncovered, nearest_losses
from fp8study.analysis.advice.otherwise import decided_with
from fp8study.analysis.decision import CHECK, FP8, MORE, NO_ROOM
from fp8study.analysis.laws import account, memory, speed
from fp8study.analysis.laws.account import label_of
from fp8study.analysis.laws.beyond import beyond
from fp8study.analysis.laws.cells import cell_key, cells_of
from fp8study.analysis.laws.communication import NETWORK
from fp8study.analysis.laws.frozen import Runs
from fp8study.analysis.laws.here import Measured, constants_for, law_of
from fp8study.analysis.laws.layer import unaligned
from fp8study.analysis.laws.nearby import (
    SAVERS,
    Changed,
    as_fp8,
    changed,
    changes,
    cures,
    fastest,
    has_head_on_fewer,
    larger_alone,
    ways,
    with_batch,
    written,
)
from fp8study.analysis.laws.room import largest_batch_of
from fp8study.analysis.laws.shape import ModelShape, left_out_of, shape_of
from fp8study.analysis.laws.speed_constants import FITTED_GPU
from fp8study.analysis.laws.speed_fit import is_fitted, pairs_of
from fp8study.analysis.small_steps import decided_anew
from fp8study.core.config import ResolvedConfig
from fp8study.core.hardware import GpuPeak, find_peak

#: Fields as options of this command.
_OPTIONS = {
    "num_gpus": "--num-gpus {}", "micro_batch_size": "--micro-batch-size {}",
    **{name: f"--set {name}={{}}" for name in (*SAVERS, "gradient_accumulation_steps")},
}  # fmt: skip
#: The most tokens of a pass that are chosen for those who name no batch: GPUs are busy by then.
MOST_TOKENS = 32768
#: Trained on by default, for each weight (Hoffmann et al. 2022, arXiv:2203.15556).
_TOKENS_PER_WEIGHT = 20


class Advisor:
    """Answers from runs and the frozen laws.

    Args:
        runs: Committed ones, from `fp8study.analysis.laws.cells.read_runs`.
        loss_gaps: Rows of the report's table of loss gaps.
        decisions: What the report decides, of these runs and the reader's own.
    """

    def __init__(self, runs: Runs, loss_gaps: pd.DataFrame, decisions: Decisions) -> None:
        self.runs, self.loss_gaps, self.decisions = runs, loss_gaps, decisions
        cells = cells_of(runs)
        self.timed = [cell for cell in cells if is_fitted(cell)]
        self.architectures = {peak.architecture for c in self.timed if (peak := find_peak(c.gpu))}
        self.exactly = {cell_key(cell.config, cell.gpu): cell for cell in self.timed}
        tested = account.lead_table(cells)
        self.pairs = pairs_of(cells)
        self.nine_of_ten = {
            of_fitted: account.nine_of_ten(tested, of_fitted) for of_fitted in (True, False)
        }
        self.law_errors = account.law_errors(tested, account.memory_table(cells))

    def name_of(self, gpu: GpuPeak) -> str:
        """Return what drivers name a GPU, where any was measured on; else its slug."""
        return next((c.gpu for c in self.timed if find_peak(c.gpu) == gpu), gpu.slug)

    def advise(
        self, asked: Question, measured: Measured | None = None, is_aside: bool = False
    ) -> Advice:
        """Answer for a BF16 run and every FP8 recipe in its place.

        Args:
            asked: What is asked.
            measured: What was measured of the model's layers on this GPU, if anything.
            is_aside: What other questions would answer is left out.

        Raises:
            UserError: As `shape_of`.
        """
        config, gpu, capacity = asked.config, asked.gpu, asked.capacity_gib
        gpu_name = asked.gpu_name or self.name_of(gpu)
        learning_rate, network = asked.learning_rate, asked.network
        shape = shape_of(config.model)
        law = law_of(shape, gpu, measured, network or NETWORK)
        halved = {} if network or config.num_nodes == 1 else {
            (rate := NETWORK.gbit_per_s / 2): law_of(shape, gpu, measured, NETWORK.at(rate))
        }  # fmt: skip
        errors = self.nine_of_ten[gpu_name == FITTED_GPU]
        unknown = "" if errors.is_known else "too few predictions were tested"
        if not measured and gpu.architecture not in self.architectures:
            unknown = f"no {gpu.architecture} GPU is in the records"
        beyond_in = partial(
            beyond, shape=shape, gpu=gpu, gpu_name=gpu_name, is_measured=bool(measured),
            timed=self.timed, network=network,
        )  # fmt: skip
        by_law = ByLaw((law, *halved.values()), errors, beyond_in, unknown)

        def change(changed: Changed, words: Mapping[str, str]) -> Change:
            return Change(" ".join(written(changed[0], words)), by_law.figure(*changed[1:]))

        def otherwise(each: Changed) -> Change:
            """Say what a change of the task makes of the lead: as timed, else by the law."""
            found = change(each, {"network": "--network {}"})
            timed = () if "network" in each[0] else self.decisions.of(each[1], gpu_name)
            leads = (lead_of(one.decision) for one in timed)
            if lead := next(filter(None, leads), None):
                return replace(found, then=lead)
            return by_law.around(found, fastest(each[1], shape, law), is_lead=True)

        def decide(way: ResolvedConfig) -> ResolvedConfig:
            return way if asked.as_asked else decided_anew(way, gpu)

        found = self.decisions.of(config, gpu_name)
        decided = [each for each in found if pd.notna(each.decision["lead_pct"])]
        options = self._options(asked, shape, gpu_name, decided, by_law)
        fitting = [option for option in options[1:] if option.fits(capacity)]
        if decided:
            verdicts = [self.decisions.verdict_of(config, each, learning_rate) for each in decided]
        else:
            guess = chosen(fitting or options[1:])
            loss = self.decisions.loss(
                as_fp8(config, guess.precision, guess.gathers_fp8), gpu_name, learning_rate
            )
            verdicts = [predicted_verdict(guess.label, guess.lead_pct, loss, learning_rate)]
        num_void = sum(each.num_void for each in found if each not in decided)
        verdicts[0] = replace(verdicts[0], num_void=num_void)
        best = next(option for option in options[1:] if option.label == verdicts[0].label)
        evidence, uncovered = nearest_losses(
            self.loss_gaps, self.runs, shape, best.precision, config.num_gpus, verdicts[0].loss
        )
        fp8 = as_fp8(config, best.precision, best.gathers_fp8)
        shown = {"bf16": config, best.precision: fp8}
        constants = constants_for(fp8, shape, gpu, measured)
        filled, fits = memory.predicted_memory(config, shape), options[0].fits(capacity)
        checked = [
            way for way, option in zip(shown.values(), (options[0], best), strict=True)
            if option.fits(capacity) and filled.building <= capacity
        ]  # fmt: skip
        rates = [o.tokens_per_second_per_gpu.value for o in (options[0], best)]
        commands, study = to_check(checked, gpu, min(rates))
        cured = [] if fits or is_aside else cures(config, shape, capacity)
        larger = larger_alone(config, shape, law, capacity, MOST_TOKENS)
        # Losses are compared at a batch at which BF16 fits, too.
        room = 0 if fits else largest_batch_of([config, fp8], shape, capacity, MOST_TOKENS)
        resized = with_batch(fp8, room) if room else {}
        asks_for_loss = bool(checked) and verdicts[0].action == CHECK and (fits or bool(resized))

        def aside(way: ResolvedConfig) -> Advice:
            return self.advise(replace(asked, config=way), measured, is_aside=True)

        def anew(way: ResolvedConfig) -> ResolvedConfig:
            return decide(
                way
                if asked.as_asked
                else changed(way, {"update_kernel": None, "step_launch": None})
            )

        def remedy(cure: Changed) -> Change:
            found = aside(cure[1] if "update_kernel" in cure[0] else anew(cure[1]))
            rate = found.chosen.tokens_per_second_per_gpu
            fields = {"micro_batch_size": cure[1].micro_batch_size} | cure[0]
            return replace(
                change((fields, *cure[1:]), _OPTIONS),
                lead_pct=found.verdict.lead_pct, tokens_per_second_per_gpu=rate,
            )  # fmt: skip

        clipped = instead = None
        surer = {CHECK: (FP8,), MORE: (FP8, CHECK)}.get(verdicts[0].action, ())
        if surer and config.max_grad_norm != CLIPPED and not is_aside:
            clipped = aside(changed(config, {"max_grad_norm": CLIPPED})).verdict
        if verdicts[0].action == MORE and fits and not is_aside:
            instead = decided_with(config, shape, capacity, MOST_TOKENS, anew, aside)
        return Advice(
            config=config.to_dict(),
            settings=tuple(written(settings(config, gpu))),
            gpu=gpu_name,
            capacity_gib=capacity,
            tokens=asked.tokens or usual_tokens(shape),
            verdict=verdicts[0] if fits or fitting else replace(verdicts[0], action=NO_ROOM),
            clipped=clipped if clipped and clipped.action in surer else None,
            nearest=() if verdicts[0].is_as_today else tuple(
                Change(what, lead)
                for what, lead in self.decisions.nearest(config, gpu_name, asked.as_asked)
            ),
            elsewhere=tuple(verdicts[1:]),
            fits=fits,
            fp8_fits=bool(fitting),
            memory_parts_gib={n: by_law.figure(config, gib) for n, gib in filled.parts().items()},
            building_gib=filled.building,
            smaller=smaller_like(config, capacity) if filled.building > capacity else "",
            remedies=tuple(map(remedy, cured)),
            larger=by_law.around(change(larger, {}), larger[1]) if fits and larger else None,
            instead=instead and replace(change(instead[0], {}), lead_pct=instead[1]),
            options=tuple(options),
            step_parts_ms={
                name: {part: by_law.figure(way, ms) for part, ms in
                       (law(way).parts() | {"host": law(way).host}).items()}
                for name, way in shown.items()
            },
            layers_saved_ms={
                name: by_law.figure(fp8, speed.saved_ms(fp8, size, constants))
                for name, size in shape.convertible.items()
            },
            kept_in_bf16=fp8.left_out,
            unaligned=unaligned(shape),
            head_on_fewer=has_head_on_fewer(config),
            measured=measured, beyond=tuple(beyond_in(config)),
            law_errors=tuple(
                each for each in self.law_errors
                if (each.test == account.OTHER_GPU) == (gpu_name != FITTED_GPU)
            ),
            left_out=tuple(left_out_of(shape, config.sequence_length, gpu.architecture)),
            loss_evidence=evidence,
            loss_uncovered=(*uncovered, *formats_uncovered(config, verdicts[0].loss)),
            changes=tuple(
                otherwise(each) for each in changes(config, shape, law, capacity, decide, halved)
            ),
            commands=commands, study=study,
            learning_rate=learning_rate,
            loss_check=check_of_loss(
                changed(fp8, resized), gpu, rates, learning_rate, self.decisions.runs
            ) if asks_for_loss else None,
        )  # fmt: skip

    def _options(
        self,
        asked: Question,
        shape: ModelShape,
        gpu_name: str,
        decided: Sequence[Decided],
        by_law: ByLaw,
    ) -> list[Option]:
        """Return BF16, then what was timed, machine by machine, then the others by speed."""
        config = asked.config

        def option(way: ResolvedConfig, label: str, row: Row | None = None) -> Option:
            gib = by_law.figure(way, memory.predicted_memory(way, shape).total)
            beside = measured_beside(self.pairs, way, gpu_name)
            rate, lead, basis = by_law.rate_and_lead(config, way, base, beside)
            cell, is_apart = self.exactly.get(cell_key(way, gpu_name)), False
            pairs = None
            if row is not None:
                rate, lead, gib = of_row(row, way.is_fp8)
                pairs = (row["lead_low_pct"], row["lead_high_pct"]) if lead else None
                beside, basis = None, ""
            elif cell is not None and cell.rates and is_of_use(way):
                rate, gib = of_cell(cell, gib)
                if is_apart := bool(decided) and way.is_fp8:
                    beside, basis = None, ""
                    lead = lead_apart(rate, bf16.tokens_per_second_per_gpu)
            gathers = bool(way.fp8_all_gather)
            limit = by_law.laws[0](way).limit
            return Option(
                way.precision, label, gathers, rate, lead, gib, limit, beside, basis,
                by_law.wider(way), is_apart, pairs,
            )  # fmt: skip

        def is_of_use(way: ResolvedConfig) -> bool:
            """A lead by the law goes with rates by the law, but over a BF16 that cannot run."""
            return not way.is_fp8 or bool(base) or not bf16.fits(asked.capacity_gib)

        base = None
        bf16 = option(config, label_of(config), decided[0].decision if decided else None)
        if bf16.tokens_per_second_per_gpu.kind == MEASURED:
            base = bf16.tokens_per_second_per_gpu.value
        timed: dict[str, Option] = {}
        for row in (row for found in decided for row in found.leads):
            way, label = way_of(config, row)
            timed.setdefault(label, option(way, label, row))
        every = {label_of(way): way for way in ways(config, shape)[1:]}
        others = [option(way, label) for label, way in every.items() if label not in timed]
        others.sort(key=lambda other: -other.tokens_per_second_per_gpu.value)
        return [bf16, *timed.values(), *others]


def usual_tokens(shape: ModelShape) -> float:
    """Return how many tokens a model is trained on where nobody says."""
    return _TOKENS_PER_WEIGHT * shape.num_active_parameters
