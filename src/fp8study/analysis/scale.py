"""What the laws say of sizes that nobody here has run: modelled, beside what can be checked of it.

Times are an H200's, eight to a node, and between nodes those of an assumed `Network`. Calibrated on
H200s of one box, 1 to 4 at a time: `check_table` says how far off the law is there, and
`published_table` beside what others report of more nodes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from fp8study.analysis.laws import memory, speed
from fp8study.analysis.laws.account import (
    label_of,
    lead_table,
    nine_of_ten,
    test_of,
    wider,
)
from fp8study.analysis.laws.beyond import beyond
from fp8study.analysis.laws.cells import Cell, cell_key
from fp8study.analysis.laws.communication import (
    exposed_ms,
    num_nodes_for,
    received,
)
from fp8study.analysis.laws.frozen import constants_of
from fp8study.analysis.laws.nearby import as_fp8, tensorwise
from fp8study.analysis.laws.room import has_room, largest_batch_of
from fp8study.analysis.laws.shape import ModelShape, shape_of
from fp8study.analysis.laws.speed_constants import FITTED_GPU, SpeedConstants
from fp8study.analysis.laws.speed_fit import cell_pairs, is_fitted, link_gb_per_s
from fp8study.analysis.runs.pairing import together
from fp8study.core.config import ResolvedConfig, make_config
from fp8study.core.hardware import GPUS_PER_NODE, find_peak

#: The questions of `scale_table`: model and GPUs.
ASKED = (("llama-3.1-70b", 64), ("llama-3.1-405b", 512))
#: The most tokens of a GPU and pass in `scale_table`.
_MOST_TOKENS = 16384
_TITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/"
#: The model of others' figures.
_MODEL = "llama-3.1-8b"
#: Those figures: GPU, precision, GPUs before and after, tokens per second and GPU before and after.
#: All are under FSDP2 with torch.compile, 2 × 8192 tokens a GPU, 400 Gb/s each.
PUBLISHED = (
    ("H100", "bf16", 8, 128, 6667, 6514, "llama3_h100_202412_torchtitan.md"),
    ("H100", "fp8_tensorwise", 8, 128, 8532, 8380, "llama3_h100_202412_torchtitan.md"),
    ("H200", "fp8_tensorwise", 32, 64, 10938, 10753, "llama3-8b_h200_202506_trainy-whitefiber.md"),
)
#: Columns of `check_table`: what a row is of, means, and what counts the cells that have one.
_KEYS = ["num_gpus", "model"]
_MEANS = ["step_error_pct", "bytes_error_pct", "exposed_measured_pct", "exposed_law_pct",
          "scaling_error_points"]  # fmt: skip
_COUNTED = {"step_error_pct": "num_cells", "bytes_error_pct": "num_profiled",
            "scaling_error_points": "num_doublings"}  # fmt: skip
#: Columns of `links_table` that tell its rows apart.
_SETTING = ("model", "num_gpus", "path", "micro_batch_size", "sequence_length", "precision")


def run_at_scale(model: str, num_gpus: int, **values: Any) -> ResolvedConfig:
    """Return a BF16 run on full nodes, on the tuned path, with layers gathered twice.

    Raises:
        UserError: As `num_nodes_for`, or a value is refused.
    """
    chosen: dict[str, Any] = {
        "model": model, "num_gpus": num_gpus, "num_nodes": num_nodes_for(num_gpus),
        "path": "tuned", "reshard_after_forward": True,
    }  # fmt: skip
    return make_config(chosen | values).resolved()


def facts_of(config: ResolvedConfig, shape: ModelShape) -> dict[str, Any]:
    """Return what the speed law says of one run on H200s.

    ``exposed_pct``: of the step, waiting for communication;
    ``efficiency_pct``: tokens per second and GPU over those within one node of eight.
    """
    law = speed.predicted_step(config, shape)
    of_one = dataclasses.replace(config, num_gpus=GPUS_PER_NODE, num_nodes=1, sharding="full")
    waits = exposed_ms(config, shape, _busy_ms(law, config), _link())
    return {
        "tokens_per_second_per_gpu": 1000 * config.tokens_per_step / config.num_gpus / law.total,
        "step_ms": law.total,
        "exposed_pct": 100 * waits / law.total,
        "efficiency_pct": 100 * speed.predicted_step(of_one, shape).total / law.total,
    }


def _busy_ms(law: speed.StepParts, config: ResolvedConfig) -> float:
    """Return what a GPU does in a pass beside communication, ms."""
    return (law.device - law.update - law.communication) / config.gradient_accumulation_steps


def _link() -> float:
    return constants_of(SpeedConstants, "speed").link_gb_per_s


def scale_table(cells: Sequence[Cell]) -> pd.DataFrame:
    """BF16 and FP8 tensorwise on `ASKED`, with and without recomputed layers; all is modelled.

    The batch is the largest that fits an H200 whatever the precision, else 1. ``lead_pct`` is over
    BF16 of the same settings; ``within_points``: what nine of ten leads are off by where the host
    is as busy, wider by `wider` with each thing in which it is beyond the records. Empty without
    records of several GPUs, which alone hold the law to account.
    """
    tested = lead_table(cells)
    peak = find_peak(FITTED_GPU)
    if not tested["num_gpus"].gt(1).any() or peak is None or peak.memory_gib is None:
        return pd.DataFrame()
    rows, within = [], nine_of_ten(tested, of_fitted_gpu=True)
    timed = [cell for cell in cells if is_fitted(cell)]
    for model, num_gpus in ASKED:
        shape = shape_of(model)
        for recomputes in (False, True):
            asked = run_at_scale(model, num_gpus, activation_checkpointing=recomputes)
            bf16 = _filled(asked, shape, peak.memory_gib)
            base = facts_of(bf16, shape)
            for config in (bf16, *tensorwise(bf16, shape)):
                gib = memory.predicted_memory(config, shape).total
                facts = facts_of(config, shape)
                off = within.at(speed.predicted_step(config, shape, peak).host_pct)[0]
                further = beyond(config, shape, peak, FITTED_GPU, False, timed)
                lead = speed.lead_pct(base["step_ms"], facts["step_ms"])
                rows.append(_named(config) | {
                    "micro_batch_size": config.micro_batch_size, "memory_gib": gib,
                    "fits": has_room(gib, peak.memory_gib),
                    "lead_pct": lead if config.is_fp8 else None,
                    "within_points": off * wider(len(further)) if config.is_fp8 else None,
                } | facts)  # fmt: skip
    return pd.DataFrame(rows)


def _filled(config: ResolvedConfig, shape: ModelShape, capacity: float) -> ResolvedConfig:
    """Return a run with the largest batch at which it and its FP8 partners fit, at least 1."""
    ways = (config, *tensorwise(config, shape))
    batch = largest_batch_of(ways, shape, capacity, _MOST_TOKENS)
    return dataclasses.replace(config, micro_batch_size=max(1, batch))


def _named(config: ResolvedConfig) -> dict[str, Any]:
    return {
        "model": config.model, "num_gpus": config.num_gpus, "num_nodes": config.num_nodes,
        "sharding": config.sharding, "precision": config.precision, "label": label_of(config),
        "activation_checkpointing": config.activation_checkpointing,
    }  # fmt: skip


def _is_spread(cell: Cell) -> bool:
    return is_fitted(cell) and cell.config.num_gpus > 1


def check_table(cells: Iterable[Cell]) -> pd.DataFrame:
    """The law beside what was measured, means over cells by number of GPUs and model.

    ``step_error_pct``: of a step, without its sign, by constants that know nothing of the cell, as
    `account.test_of` chooses them. Of ``num_profiled`` cells with a profiled step:
    ``bytes_error_pct`` of what is gathered and reduced, and how much of the step waited for
    communication, by the profile and by the law. ``scaling_error_points``: of tokens per second and
    GPU over those of half as many GPUs, in ``num_doublings`` pairs of cells.
    """
    known = [cell for cell in cells if is_fitted(cell) and find_peak(cell.gpu)]
    if not any(map(_is_spread, known)):
        return pd.DataFrame()
    by_task = {
        (cell_key(cell.config, cell.gpu, "num_gpus"), cell.config.num_gpus): cell for cell in known
    }
    rows = []
    for (task, number), cell in by_task.items():
        fewer = by_task.get((task, number // 2)) if number % 2 == 0 else None
        rows.append(
            {"num_gpus": number, "model": cell.config.model, "run_ids": " ".join(cell.ids)}
            | {"step_error_pct": 100 * abs(_law(cell).total / (cell.step_ms or 1) - 1)}
            | (_profiled(cell) if number > 1 and cell.kernels_ms else {})
            | ({"scaling_error_points": abs(_scaling(fewer, cell))} if fewer else {})
        )
    groups = pd.DataFrame(rows, columns=[*_KEYS, *_MEANS, "run_ids"]).groupby(_KEYS)
    counts = groups[[*_COUNTED]].count().rename(columns=_COUNTED)
    ids = groups["run_ids"].agg(together)
    return pd.concat([counts, groups[[*_MEANS]].mean(), ids], axis=1).reset_index()


def _law(cell: Cell) -> speed.StepParts:
    constants = constants_of(SpeedConstants, "speed", *test_of(cell)[1:])
    return speed.predicted_step(cell.config, cell.shape, find_peak(cell.gpu), constants)


def _scaling(fewer: Cell, more: Cell) -> float:
    """Return by how much the law misses the efficiency of twice as many GPUs, points."""
    measured, law = (
        100 * few / many
        for few, many in ((fewer.step_ms or 1, more.step_ms or 1),
                          (_law(fewer).total, _law(more).total))
    )  # fmt: skip
    return law - measured


def _profiled(cell: Cell) -> dict[str, float]:
    """Return what a profiled step says of communication, beside the law."""
    steps = [record.instruments.get("step", {}) for _, record in cell.timed]
    step = next(step for step in reversed(steps) if step.get("by_kind_ms"))
    law, away = _law(cell), 1 - 1 / cell.config.num_gpus
    recorded = away * memory.GIB * sum(row["gib"] for row in step["communication"])
    waits = exposed_ms(cell.config, cell.shape, _busy_ms(law, cell.config), _link())
    return {
        "bytes_error_pct": 100 * abs(received(cell.config, cell.shape)[0] / recorded - 1),
        "exposed_measured_pct": 100 * step["exposed_communication_ms"] / step["step_ms"],
        "exposed_law_pct": 100 * waits / law.total,
    }


def links_table(cells: Iterable[Cell]) -> pd.DataFrame:
    """The law beside runs whose GPUs exchanged through the host's memory, one row an FP8 cell.

    The law was fitted to none of them and gets their link's rate, ``link_gb_per_s``, from their own
    profiled steps. ``bf16_error_pct``, ``fp8_error_pct``: of a step, below zero where the law's is
    shorter; ``measured_pct``, ``predicted_pct``: FP8's lead. Empty without such runs.
    """
    slow = [
        dataclasses.replace(cell, config=dataclasses.replace(cell.config, gpu_links="as_found"))
        for cell in cells
        if cell.config.gpu_links == "unused" and cell.gpu == FITTED_GPU
    ]  # but for the rate, the law's cells
    rate = link_gb_per_s(slow)
    if rate is None:
        return pd.DataFrame()
    law = dataclasses.replace(constants_of(SpeedConstants, "speed"), link_gb_per_s=rate)
    rows = []
    for pair in cell_pairs(slow):
        rows.append({name: getattr(pair.fp8.config, name) for name in _SETTING} | {
            "link_gb_per_s": rate,
            "bf16_error_pct": _step_error_pct(pair.bf16, law),
            "fp8_error_pct": _step_error_pct(pair.fp8, law),
            "measured_pct": pair.lead_pct, "predicted_pct": pair.predicted_pct(law),
            "run_ids": " ".join([*pair.fp8.ids, *pair.bf16.ids]),
        })  # fmt: skip
    return pd.DataFrame(rows)


def _step_error_pct(cell: Cell, constants: SpeedConstants) -> float:
    law = speed.predicted_step(cell.config, cell.shape, find_peak(cell.gpu), constants)
    return 100 * (law.total / (cell.step_ms or math.nan) - 1)


def published_table() -> pd.DataFrame:
    """What others report of more nodes, beside the law: tokens per second and GPU, after / before.

    Theirs is another trainer, with a part of each layer recomputed; ratios alone are compared.
    """
    rows = []
    for gpu, precision, before, after, rate_before, rate_after, page in PUBLISHED:
        shape = shape_of(_MODEL)
        steps = []
        for number in (before, after):
            bf16 = run_at_scale(
                _MODEL, number, path="plain", sequence_length=8192, micro_batch_size=2
            )
            config = bf16 if precision == "bf16" else as_fp8(bf16, precision)
            steps.append(speed.predicted_step(config, shape, find_peak(gpu)).total)
        rows.append({
            "gpu_name": gpu, "model": _MODEL, "precision": precision, "from_gpus": before,
            "to_gpus": after, "published_pct": 100 * rate_after / rate_before,
            "predicted_pct": 100 * steps[0] / steps[1], "source": _TITAN + page,
        })  # fmt: skip
    return pd.DataFrame(rows)


def check_means(check: pd.DataFrame) -> pd.DataFrame:
    """Return means over the cells of `check_table`, one row for each number of GPUs."""
    rows = []
    for num_gpus, found in check.groupby("num_gpus"):
        row = {"num_gpus": num_gpus}
        for name in _MEANS:
            count = found[_COUNTED.get(name, "num_profiled")]
            row[name] = (found[name] * count).sum() / count.sum() if count.sum() else math.nan
        rows.append(row)
    return pd.DataFrame(rows).set_index("num_gpus")
