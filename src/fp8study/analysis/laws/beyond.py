"""In what a run is beyond what was measured, and whether intervals are right there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from fp8study.analysis.laws.account import is_seen, label_of, lead_table, nine_of_ten, wider
from fp8study.analysis.laws.cells import Cell
from fp8study.analysis.laws.communication import NETWORK, Network
from fp8study.analysis.laws.frozen import constants_of
from fp8study.analysis.laws.shape import ModelShape
from fp8study.analysis.laws.speed_constants import FITTED_GPU, SpeedConstants, on_gpu
from fp8study.analysis.laws.speed_fit import cell_pairs, is_fitted, knows_gpu
from fp8study.analysis.runs.pairing import together
from fp8study.core.config import ResolvedConfig
from fp8study.core.hardware import GpuPeak, find_peak


def beyond(
    config: ResolvedConfig, shape: ModelShape, gpu: GpuPeak, gpu_name: str, is_measured: bool,
    timed: Sequence[Cell], network: Network = NETWORK, knows_link: bool = False,
) -> list[str]:  # fmt: skip
    """Say in what a configuration is beyond the cells of its GPU, or if unknown of `FITTED_GPU`.

    What a known GPU was not timed at, but `FITTED_GPU` was, is one thing, however much it is.
    `is_measured`: whether its layers were, here, and `knows_link` its links; `timed`: every cell
    that the law speaks of; `network`: what joins nodes.
    """
    is_known = knows_gpu(gpu_name, timed)
    of_fitted = [cell for cell in timed if cell.gpu == FITTED_GPU]
    own = [cell for cell in timed if cell.gpu == gpu_name] if is_known else of_fitted
    fitted, fitted_name = find_peak(FITTED_GPU), FITTED_GPU.removeprefix("NVIDIA ")
    where = gpu.name_part if is_known else fitted_name
    outside, nowhere = (_outside(config, shape, cells) for cells in (own, [*own, *of_fitted]))
    found = [f"{what}{seen.format(where)}" for what, seen in outside.items() if what in nowhere]
    if elsewhere := [what for what in outside if what not in nowhere]:
        found.append(f"{', '.join(elsewhere)}: measured on {fitted_name}, not on {where}")
    if not is_known:
        by = "the copy measured here" if is_measured else "datasheets"
        what = "loss, optimizer and FSDP2's copies" if is_measured else "times"
        found.insert(0, f"{gpu_name}: {what} of an {FITTED_GPU}, scaled by {by}")
    if config.num_nodes > 1 and network.num_parts(config) == 1:
        found.append(f"{config.num_nodes} nodes, joined by NVLink as the GPUs of one are: assumed")
    elif config.num_nodes > 1:
        found.append(
            f"{config.num_nodes} nodes, joined by {network.gbit_per_s:g} Gb/s for each GPU and "
            f"{network.hop_us:g} µs a hop: {'assumed' if network.is_assumed else 'never timed'}"
        )
    other_link = fitted is None or gpu.link_gb_per_s != fitted.link_gb_per_s
    if config.gpus_per_node > 1 and other_link and not knows_link:
        found.append(f"links between GPUs: {_of_links(gpu, network)}")
    if config.activation_checkpointing:
        found.append("layers recomputed in the backward pass: never timed")
    if shape.num_experts > 1:
        found.append("a mixture of experts: none was measured")
    elif shape.left_out:
        found.append("a model with what is left out below: none was measured")
    return found


def _of_links(gpu: GpuPeak, network: Network) -> str:
    """Say how fast links are taken to be, and by what."""
    c = constants_of(SpeedConstants, "speed")
    rate = on_gpu(c, gpu).link_gb_per_s
    if network.link_gb_per_s:
        own = f"the law was fitted at {c.link_gb_per_s:.0f}"
        return f"{network.link_gb_per_s:g} GB/s, as you say; {own}"
    of = f"{rate:.0f} of {{}}'s {gpu.link_gb_per_s:g} GB/s assumed, the share that an {FITTED_GPU}"
    if gpu.has_nvlink:
        return f"{of.format('NVLink')} has"
    return (
        f"{of.format('PCIe')} without NVLink has: through the host's memory "
        "(docs/results.md, 'And without NVLink?')"
    )


def _outside(config: ResolvedConfig, shape: ModelShape, known: Sequence[Cell]) -> dict[str, str]:
    """Return in what a configuration is outside these cells → what they are, {} for their GPU."""
    spans: dict[str, tuple[float, list[Any], str]] = {
        "GPUs": (config.num_gpus, [c.config.num_gpus for c in known], "g"),
        "billion weights": (shape.num_parameters / 1e9,
                            [c.shape.num_parameters / 1e9 for c in known], ".3g"),
        "tokens in the vocabulary": (shape.vocab_size, [c.shape.vocab_size for c in known], ",d"),
        "tokens a sequence": (config.sequence_length,
                              [c.config.sequence_length for c in known], ",d"),
        "tokens a GPU and pass": (
            config.tokens_per_pass,
            [c.config.tokens_per_pass for c in known], ",d"),
        "passes a step": (config.gradient_accumulation_steps,
                          [c.config.gradient_accumulation_steps for c in known], ",d"),
    }  # fmt: skip
    found = {
        f"{format(value, spec)} {what}": "; measured on {}: "
        + " to ".join(dict.fromkeys(format(end, spec) for end in (min(seen), max(seen))))
        for what, (value, seen, spec) in spans.items()
        if not min(seen) <= value <= max(seen)
    }
    never = []
    ways = {c.config.gradient_reduction for c in known}
    if config.gradient_reduction not in {"last_pass", *ways}:
        never.append("gradients reduced after each pass")
    on = {c.config.num_gpus for c in known if c.config.step_launch == config.step_launch}
    if config.step_launch == "as_graph" and config.num_gpus not in on:
        never.append(f"steps as one CUDA graph on {config.num_gpus} GPUs")
    if config.optimizer_state not in {c.config.optimizer_state for c in known}:
        never.append(f"optimizer states in {config.optimizer_state.upper()}")
    if config.is_fp8 and config.precision not in {c.config.precision for c in known}:
        never.append(label_of(config))
    return found | dict.fromkeys(never, ": never timed on {}")


def beyond_table(cells: Sequence[Cell]) -> pd.DataFrame:
    """Hold `account.wider` to what came out, by how far the law was asked beyond its cells.

    ``num_beyond``: in how many things (`beyond`) a lead is beyond the cells that the constants
    which predict it were fitted to; ``mean_points``: by how much ``num_leads`` of them are off;
    ``num_within``: how many lie in an interval of the errors of the leads that are beyond nothing,
    widened, and ``num_unwidened`` if it were not. Empty where these are too few.
    """
    timed, leads = [cell for cell in cells if is_fitted(cell)], lead_table(cells)
    numbers: dict[str, int] = {}
    for pair in cell_pairs(cells):
        peak, cell = find_peak(pair.fp8.gpu), pair.fp8
        seen = [other for other in timed if is_seen(other, cell)]
        # What the constants were fitted to need not be among the records at hand.
        if peak is not None and FITTED_GPU in {other.gpu for other in seen}:
            further = beyond(cell.config, cell.shape, peak, cell.gpu, False, seen)
            numbers[" ".join(pair.fp8.ids + pair.bf16.ids)] = len(further)
    leads = leads[leads["run_ids"].isin(numbers)]
    leads = leads.assign(num_beyond=leads["run_ids"].map(numbers), off=leads["error_points"].abs())
    near = leads[leads["num_beyond"] == 0]
    errors = {of_fitted: nine_of_ten(near, of_fitted) for of_fitted in (True, False)}
    if not errors[True].is_known:
        return pd.DataFrame()
    allowed = [
        errors[row["gpu_name"] == FITTED_GPU].at(row["host_pct"])[0]
        for row in leads.to_dict("records")
    ]
    leads["is_unwidened"] = leads["off"] <= allowed
    leads["is_within"] = leads["off"] <= leads["num_beyond"].map(wider) * allowed
    return leads.groupby("num_beyond").agg(
        num_leads=("off", "size"), mean_points=("off", "mean"), num_within=("is_within", "sum"),
        num_unwidened=("is_unwidened", "sum"), run_ids=("run_ids", together),
    ).reset_index()  # fmt: skip
