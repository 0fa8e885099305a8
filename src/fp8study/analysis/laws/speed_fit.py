"""Fitting the speed law: to steps, to profiled kernels, and what is read from records as it is."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from fp8study.analysis.laws.cells import Cell, cell_key
from fp8study.analysis.laws.frozen import (
    fit,
    fit_with_errors,
    knows,
    leaving_out,
    model_of,
    study_of,
)
from fp8study.analysis.laws.speed import lead_pct, predicted_step
from fp8study.analysis.laws.speed_constants import FITTED_GPU, SpeedConstants
from fp8study.core.config import set_by_hand
from fp8study.core.fields import BY_HAND, varying
from fp8study.core.hardware import find_peak

#: The constant that is not fitted.
_FORM = "phases"
#: Those that are fitted after the rest: to runs with copy engines, and to other GPUs.
_BY_COPIES = ("by_copies",)
_ELSEWHERE = ("memory_power", "cast_power", "one_way")
#: Of profiled steps, how many moved their tensors more slowly than the link is taken to: the time
#: of a collective contains waiting for the slowest GPU.
_SLOWER = 0.75

#: Part of the law → kinds of kernels in a profiled step (`fp8study.measure.trace.kind_of`).
_KINDS = {
    "gemm": ("gemm_fp8", "gemm_bf16"), "attention": ("attention",), "update": ("optimizer",),
    "rest": ("fused", "loss", "copy", "other"),
}  # fmt: skip


def is_fitted(cell: Cell) -> bool:
    """Whether the law is about it: compiled, timed, over usual links, all weights trained."""
    config = cell.config
    if config.gpu_links == "unused":
        return False
    trained = not config.untrained and config.optimizer_binding == "after_conversion"
    return bool(cell.step_ms and config.compile and trained)


@dataclass(frozen=True)
class Pair:
    """An FP8 cell and the BF16 cell that differs in its precision alone."""

    fp8: Cell
    bf16: Cell

    @property
    def lead_pct(self) -> float | None:
        """How much more tokens per second FP8 made, %: the median over sessions that ran both."""
        return statistics.median(self.leads_pct) if self.leads_pct else None

    @cached_property
    def leads_pct(self) -> list[float]:
        """The same of each session: one study on one machine."""
        leads = []
        sessions = [{study_of(name) for name in cell.ids} for cell in (self.fp8, self.bf16)]
        for session in sorted(sessions[0] & sessions[1]):
            fp8, bf16 = (_rate(cell, session) for cell in (self.fp8, self.bf16))
            if fp8 and bf16:
                leads.append(100 * (fp8 / bf16 - 1))
        return leads

    def predicted_pct(self, constants: SpeedConstants) -> float | None:
        """What the law says of it; None for a GPU in no table, or without FP8."""
        gpu = find_peak(self.fp8.gpu)
        if gpu is None or gpu.fp8_tflops is None:
            return None
        steps = [predicted_step(cell.config, cell.shape, gpu, constants).total
                 for cell in (self.bf16, self.fp8)]  # fmt: skip
        return lead_pct(*steps)


def _rate(cell: Cell, session: str) -> float | None:
    rates = [rate for name, rate in cell.rates if study_of(name) == session]
    return statistics.median(rates) if rates else None


def cell_pairs(cells: Sequence[Cell]) -> list[Pair]:
    """Return every FP8 cell of which the speed law speaks with its BF16 partner."""
    chosen = [cell for cell in cells if is_fitted(cell)]
    keys = [
        (cell_key(cell.config, cell.gpu, *varying("pair")),
         *(set_by_hand(cell.config.to_dict(), name) for name in BY_HAND))
        for cell in chosen
    ]  # fmt: skip
    every = list(zip(keys, chosen, strict=True))
    partners = {key: cell for key, cell in every if not cell.config.is_fp8}
    found = (Pair(cell, partners[key]) for key, cell in every
             if cell.config.is_fp8 and key in partners)  # fmt: skip
    return [pair for pair in found if pair.lead_pct is not None]


def fit_speed(cells: Sequence[Cell]) -> dict[str, Any]:
    """Fit `SpeedConstants` to the cells of `FITTED_GPU`, as `fit_with_errors`.

    To those that leave collectives to NCCL. Then `_BY_COPIES` to those of copy engines that are
    one graph, or of so many tokens that no host is late, and `_ELSEWHERE` to those of other GPUs of
    its architecture, which alone tell.
    """
    fitted = [cell for cell in cells if is_fitted(cell)]
    known = [cell for cell in fitted if cell.config.collectives == "nccl"]
    chosen = [cell for cell in known if cell.gpu == FITTED_GPU]
    copied = [cell for cell in fitted if cell.gpu == FITTED_GPU and _copies(cell)]
    start = dataclasses.asdict(SpeedConstants())
    given = {name: start.pop(name) for name in (_FORM, *_BY_COPIES, *_ELSEWHERE)} | _read(chosen)
    start = {name: value for name, value in start.items() if name not in given}
    found = fit_with_errors(partial(_misses, given), start, chosen, usual=0.03)
    others = [_read(rest) for rest in leaving_out(chosen).values()]
    found["constants"] |= {
        name: {"value": value, "error": max(abs(o.get(name, value) - value) for o in others)}
        for name, value in given.items()
    }
    _fit_after(found, _BY_COPIES, copied)
    _fit_after(found, _ELSEWHERE, [cell for cell in known if _is_kin(cell.gpu)])
    return found


def _copies(cell: Cell) -> bool:
    config = cell.config
    is_late = config.step_launch == "by_kernel" and config.micro_batch_size == 1
    return config.collectives == "copy_engines" and not is_late


def knows_gpu(gpu: str, cells: Sequence[Cell]) -> bool:
    """Whether the newest freeze is of a GPU: of FP8 on it in two models, if not of `FITTED_GPU`."""
    own = [cell for cell in cells if cell.gpu == gpu and cell.config.is_fp8 and knows(-1, cell)]
    return gpu == FITTED_GPU or (_is_kin(gpu) and len(leaving_out(own)) > 1)


def _is_kin(gpu: str) -> bool:
    """Whether a GPU is of the architecture of `FITTED_GPU`, and not that."""
    own, other = find_peak(FITTED_GPU), find_peak(gpu)
    if own is None or other is None or gpu == FITTED_GPU:
        return False
    return own.architecture == other.architecture


def _fit_after(found: dict[str, Any], names: Sequence[str], cells: Sequence[Cell]) -> None:
    """Fit constants of these names with what was `found` of the others, and enter them there."""

    def fitted(without: str | None) -> dict[str, float]:
        given = {name: entry["value"] for name, entry in found["constants"].items()}
        given |= found["without"].get(without, {})
        start = {name: given.pop(name) for name in names}
        rest = [cell for cell in cells if model_of(cell) != without]
        return fit(partial(_misses, given), start, rest, usual=0.03) if rest else start

    of_others = {model: fitted(model) for model in found["without"]}
    for name, value in fitted(None).items():
        error = max(abs(other[name] - value) for other in of_others.values())
        found["constants"][name] = {"value": value, "error": error}
    for model, powers in of_others.items():
        found["without"][model] |= powers


def _read(cells: Sequence[Cell]) -> dict[str, float]:
    """Return what records say as it is: rates of the link and of a copy; empty without any."""
    copies = [record.instruments.get("ceilings", {}).get("copy_tb_per_s")
              for cell in cells for _, record in cell.timed]  # fmt: skip
    link, copies = link_gb_per_s(cells), [rate for rate in copies if rate]
    found = {} if link is None else {"link_gb_per_s": link}
    return found | ({"copy_tb_per_s": statistics.median(copies)} if copies else {})


def link_gb_per_s(cells: Iterable[Cell]) -> float | None:
    """Return what a GPU receives from others by the profiled steps, GB/s; None without any."""
    links = []
    for cell in cells:
        away = 1 - 1 / cell.config.num_gpus
        for _, record in cell.timed:
            step = record.instruments.get("step", {})
            took = step.get("by_kind_ms", {}).get("communication")
            if took and away:
                moved = sum(row["gib"] for row in step["communication"]) * 2**30
                links.append(away * moved / took * 1e-6)
    return float(np.quantile(links, _SLOWER)) if links else None


def _misses(given: Mapping[str, float], values: Mapping[str, float], cell: Cell) -> list[float]:
    """Return by how much the law misses a cell's step and, on one GPU, its kernels by kind."""
    constants, gpu = SpeedConstants(**values, **given), find_peak(cell.gpu)
    law, step_ms = predicted_step(cell.config, cell.shape, gpu, constants), cell.step_ms
    assert step_ms  # see `is_fitted`
    found = [law.total / step_ms - 1]
    kinds = cell.kernels_ms
    if kinds and cell.config.num_gpus == 1:
        parts = law.parts()
        parts["rest"] = sum(parts[n] for n in ("elementwise", "casts", "loss", "sharding"))
        for part, names in _KINDS.items():
            time = sum(kinds.get(name, 0.0) for name in names)
            found.append((parts[part] - time) / step_ms)
    return found
