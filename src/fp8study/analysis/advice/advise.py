"""Should this model be pre-trained in FP8 on these GPUs: what records say, else what the laws say.

A number is *measured* (its runs are named), *predicted* (by a law, between what was measured) or
*modelled* (beyond that; `Advice.beyond` says in what). What was measured is the report's: the same
rows, the same rule. What was predicted is judged by that rule too, after all that was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pandas as pd

from fp8study.analysis.advice.answer import Advice, Change, LossCheck, Option
from fp8study.analysis.advice.asked import MOST_TOKENS, Question
from fp8study.analysis.advice.beside import measured_beside
from fp8study.analysis.advice.by_law import ByLaw, chosen
from fp8study.analysis.advice.case import Case
from fp8study.analysis.advice.commands import (
    check_of_loss,
    largest_like,
    settings,
    smaller_like,
    to_check,
)
from fp8study.analysis.advice.evidence import (
    Decided,
    Decisions,
    predicted_verdict,
    way_of,
)
from fp8study.analysis.advice.figures import (
    MEASURED,
    Row,
    lead_apart,
    of_cell,
    of_row,
)
from fp8study.analysis.advice.loss_evidence import formats_uncovered, from_weights, nearest_losses
from fp8study.analysis.advice.other_trainers import other_trainers, over_slow_links
from fp8study.analysis.advice.otherwise import Otherwise
from fp8study.analysis.decision import CHECK
from fp8study.analysis.laws import account, memory, speed
from fp8study.analysis.laws.account import label_of
from fp8study.analysis.laws.beyond import beyond
from fp8study.analysis.laws.cells import cell_key, cells_of
from fp8study.analysis.laws.frozen import Runs
from fp8study.analysis.laws.here import Measured, constants_for, law_of
from fp8study.analysis.laws.layer import unaligned
from fp8study.analysis.laws.nearby import (
    as_fp8,
    changed,
    has_head_on_fewer,
    ways,
    written,
)
from fp8study.analysis.laws.room import largest_batch_of, with_batch
from fp8study.analysis.laws.shape import ModelShape, left_out_of, shape_of
from fp8study.analysis.laws.speed_constants import FITTED_GPU
from fp8study.analysis.laws.speed_fit import cell_pairs, is_fitted
from fp8study.analysis.scale import links_table
from fp8study.core.config import ResolvedConfig
from fp8study.core.hardware import GpuPeak, find_peak

#: Trained on by default, for each weight (Hoffmann et al. 2022, arXiv:2203.15556).
_TOKENS_PER_WEIGHT = 20
#: How many times as fast PCIe may be as it is taken to be: over two sockets, or by a switch.
_TIMES_AS_FAST = (0.5, 2.0)


class Advisor:
    """Answers from runs and the frozen laws.

    Args:
        runs: Committed ones, from `fp8study.analysis.laws.cells.read_runs`.
        decisions: What the report decides, of these runs and the reader's own.
        peers: Other trainers' leads, rows of `fp8study.analysis.peers.peer_table`.
    """

    def __init__(self, runs: Runs, decisions: Decisions, peers: pd.DataFrame) -> None:
        self.runs, self.decisions, self.peers = runs, decisions, peers
        cells = cells_of(runs)
        self.timed = [cell for cell in cells if is_fitted(cell)]
        self.architectures = {peak.architecture for c in self.timed if (peak := find_peak(c.gpu))}
        self.exactly = {cell_key(cell.config, cell.gpu): cell for cell in self.timed}
        tested = account.lead_table(cells)
        self.pairs = cell_pairs(cells)
        self.nine_of_ten = {
            of_fitted: account.nine_of_ten(tested, of_fitted) for of_fitted in (True, False)
        }
        self.law_errors = account.law_errors(tested, account.memory_table(cells))
        self.slow_links = links_table(cells)

    def name_of(self, gpu: GpuPeak) -> str:
        """Return what drivers name a GPU, where any was measured on; else its slug."""
        return next((c.gpu for c in self.timed if find_peak(c.gpu) == gpu), gpu.slug)

    def case(self, asked: Question, measured: Measured | None = None) -> Case:
        """Return the ways to compute and the verdict.

        Args:
            asked: What is asked.
            measured: What was measured of the model's layers on this GPU, if anything.

        Raises:
            UserError: As `shape_of`.
        """
        config, learning_rate = asked.config, asked.learning_rate
        gpu_name = asked.gpu_name or self.name_of(asked.gpu)
        shape = shape_of(config.model)
        by_law = self._by_law(asked, gpu_name, shape, measured)
        found = self.decisions.of(config, gpu_name)
        decided = [each for each in found if pd.notna(each.decision["lead_pct"])]
        options = self._options(asked, shape, gpu_name, decided, by_law)
        if decided:
            verdicts = [self.decisions.verdict_of(config, each, learning_rate) for each in decided]
        else:
            fitting = [option for option in options[1:] if option.fits(asked.capacity_gib)]
            guess = chosen(fitting or options[1:])
            loss = self.decisions.loss(
                as_fp8(config, guess.precision, guess.gathers_fp8), gpu_name, learning_rate
            )
            verdicts = [predicted_verdict(guess.label, guess.lead_pct, loss, learning_rate)]
        num_void = sum(each.num_void for each in found if each not in decided)
        verdicts[0] = replace(verdicts[0], num_void=num_void)
        return Case(asked, gpu_name, shape, by_law, tuple(options), tuple(verdicts))

    def advise(self, asked: Question, measured: Measured | None = None) -> Advice:
        """Answer for a BF16 run and every FP8 recipe in its place: as `case`, and why."""
        case = self.case(asked, measured)
        otherwise = Otherwise(case, lambda way: self.case(replace(asked, config=way), measured))
        config, gpu, capacity = asked.config, asked.gpu, asked.capacity_gib
        gpu_name, shape, by_law, best = case.gpu_name, case.shape, case.by_law, case.chosen
        first = case.verdicts[0]
        evidence, uncovered = nearest_losses(
            self.decisions.gaps, self.runs, shape, best.precision, config.num_gpus, first.loss
        )
        fp8 = as_fp8(config, best.precision, best.gathers_fp8)
        shown = {"bf16": config, best.precision: fp8}
        constants = constants_for(fp8, shape, gpu, measured)
        filled = memory.predicted_memory(config, shape)
        checked = [
            way for way, option in zip(shown.values(), (case.options[0], best), strict=True)
            if option.fits(capacity) and filled.building <= capacity
        ]  # fmt: skip
        commands, study = to_check(checked, gpu, min(case.rates))
        return Advice(
            config=config.to_dict(),
            settings=tuple(written(settings(config, gpu))),
            gpu=gpu_name,
            capacity_gib=capacity,
            tokens=asked.tokens or usual_tokens(shape),
            verdict=case.verdict,
            clipped=otherwise.clipped(),
            nearest=() if first.is_as_today else tuple(
                Change(what, lead)
                for what, lead in self.decisions.nearest(config, gpu_name, asked.as_asked)
            ),
            elsewhere=case.verdicts[1:],
            fits=case.fits,
            fp8_fits=case.fp8_fits,
            memory_parts_gib={n: by_law.figure(config, gib) for n, gib in filled.parts().items()},
            building_gib=filled.building,
            smaller=smaller_like(config, capacity) if filled.building > capacity else "",
            largest="" if case.fits or case.fp8_fits else largest_like(config, capacity),
            remedies=otherwise.remedies(),
            larger=otherwise.larger(),
            instead=otherwise.instead(),
            options=case.options,
            step_parts_ms={
                name: {part: by_law.figure(way, ms) for part, ms in
                       (by_law.law(way).parts() | {"host": by_law.law(way).host}).items()}
                for name, way in shown.items()
            },
            layers_saved_ms={
                name: by_law.figure(fp8, speed.saved_ms(fp8, size, constants))
                for name, size in shape.convertible.items()
            },
            kept_in_bf16=fp8.left_out,
            unaligned=unaligned(shape),
            head_on_fewer=has_head_on_fewer(config),
            measured=measured, beyond=tuple(by_law.beyond(config)),
            law_errors=tuple(
                each for each in self.law_errors
                if (each.test == account.OTHER_GPU) == (gpu_name != FITTED_GPU)
            ),
            left_out=tuple(left_out_of(shape, config.sequence_length, gpu.architecture)),
            communication_pct=by_law.law(config).communication_pct,
            alone=otherwise.alone(),
            without_nvlink="" if gpu.has_nvlink or config.gpus_per_node == 1 else over_slow_links(
                self.slow_links
            ),
            other_trainers=other_trainers(
                self.peers, shape, config.num_gpus, config.tokens_per_step // config.num_gpus
            ),
            loss_evidence=evidence,
            from_weights=from_weights(
                self.decisions.gaps, self.runs, shape, best.precision, config.num_gpus
            ),
            loss_uncovered=(*uncovered, *formats_uncovered(config, first.loss)),
            changes=otherwise.changes(),
            commands=commands, study=study,
            learning_rate=asked.learning_rate,
            loss_check=self._check_of_loss(case, fp8) if checked else None,
        )  # fmt: skip

    def _by_law(
        self, asked: Question, gpu_name: str, shape: ModelShape, measured: Measured | None
    ) -> ByLaw:
        gpu, network = asked.gpu, asked.network
        errors = self.nine_of_ten[gpu_name == FITTED_GPU]
        unknown = "" if errors.is_known else "too few predictions were tested"
        if not measured and gpu.architecture not in self.architectures:
            unknown = f"no {gpu.architecture} GPU is in the records"
        halved, links = {}, []
        if network.is_assumed and network.num_parts(asked.config) > 1:
            rate = network.gbit_per_s / 2
            halved = {rate: law_of(shape, gpu, measured, network.at(rate))}
        knows_link = bool(measured and measured.get("link_gb_per_s"))
        is_said = knows_link or network.link_gb_per_s
        if asked.config.gpus_per_node > 1 and not gpu.has_nvlink and not is_said:
            rate = constants_for(asked.config, shape, gpu, measured).link_gb_per_s
            links = [law_of(shape, gpu, measured, replace(network, link_gb_per_s=times * rate))
                     for times in _TIMES_AS_FAST]  # fmt: skip
        beyond_in = partial(
            beyond, shape=shape, gpu=gpu, gpu_name=gpu_name, is_measured=bool(measured),
            timed=self.timed, network=network, knows_link=knows_link,
        )  # fmt: skip
        law = law_of(shape, gpu, measured, network)
        return ByLaw(law, halved, links, errors, beyond_in, unknown)

    def _check_of_loss(self, case: Case, fp8: ResolvedConfig) -> LossCheck | None:
        """Return the check of the loss, where that is what the verdict asks for and it has room."""
        if case.verdicts[0].action != CHECK:
            return None
        resized = {}
        if not case.fits:  # losses are compared at a batch at which BF16 fits, too
            ways = [case.config, fp8]
            room = largest_batch_of(ways, case.shape, case.asked.capacity_gib, MOST_TOKENS)
            if not (resized := with_batch(fp8, room) if room else {}):
                return None
        return check_of_loss(
            changed(fp8, resized), case.asked.gpu, case.rates, case.asked.learning_rate,
            self.decisions.runs,
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
            rate, lead, basis, error = by_law.rate_and_lead(config, way, base, beside)
            cell, is_apart = self.exactly.get(cell_key(way, gpu_name)), False
            pairs = None
            if row is not None:
                rate, lead, gib = of_row(row, way.is_fp8)
                pairs = (row["lead_low_pct"], row["lead_high_pct"]) if lead else None
                beside, basis, error = None, "", 0.0
            elif cell is not None and cell.rates and is_of_use(way):
                rate, gib = of_cell(cell, gib)
                if is_apart := bool(decided) and way.is_fp8:
                    beside, basis, error = None, "", 0.0
                    lead = lead_apart(rate, bf16.tokens_per_second_per_gpu)
            gathers = bool(way.fp8_all_gather)
            limit = by_law.law(way).limit
            return Option(
                way.precision, label, gathers, rate, lead, gib, limit, beside, basis,
                error, by_law.wider(way), by_law.ranges * bool(error), is_apart, pairs,
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
