"""Claims about speed on document A's grid: models, sequence lengths and numbers of GPUs."""

from __future__ import annotations

from typing import Any

import pandas as pd

from fp8study.analysis.claims.finding import Claim, Finding, judges
from fp8study.analysis.claims.rules import by_parts, by_rows, ends, on_gpus, out_of, spread
from fp8study.analysis.claims.tables import RATE, Tables, along, steps
from fp8study.analysis.runs.naming import PRECISION_LABELS, UNUSED_LINKS
from fp8study.analysis.runs.pairing import pairs_of, together
from fp8study.core.hardware import find_peak
from fp8study.core.records import StoredRun
from fp8study.core.words import count

#: Fewer cells than this are no grid.
_CELLS = 4


def _grid(arms: pd.DataFrame) -> pd.DataFrame:
    """Keep what document A ran: batch 1, plain path, BF16 or tensorwise; compiled throughout."""
    alone = (arms["micro_batch_size"] == 1) & (arms["gradient_accumulation_steps"] == 1)
    kind = arms["precision"].isin(["bf16", "fp8_tensorwise"]) & (arms["path"] == "plain")
    return arms[alone & kind & arms["compile"].eq(True)]


@judges("A01")
def leads_everywhere(tables: Tables, claim: Claim) -> Finding:
    cells = _grid(tables.cells)
    if len(cells) < _CELLS or cells["model"].nunique() < 2:
        return claim.open(cells)
    return by_rows(claim, cells, cells["speedup_pct"], cells["speedup_pct"] > 0)


@judges("A02")
def best_length(tables: Tables, claim: Claim) -> Finding:
    best = [
        group.sort_values("tflops_per_gpu").tail(1).assign(run_ids=together(group["run_ids"]))
        for group in along(_grid(tables.arms), "sequence_length")
        if {*claim.published["lengths"]} <= {*group["sequence_length"]}
    ]
    rows = pd.concat(best) if best else pd.DataFrame(columns=["sequence_length", "num_gpus"])
    lengths = rows["sequence_length"]
    is_best = lengths == claim.published["best"]
    return by_rows(claim, rows, lengths, is_best, gpus=on_gpus(rows))


@judges("A03")
def larger_is_better(tables: Tables, claim: Claim) -> Finding:
    pairs = steps(along(_grid(tables.arms), "model"), "tflops_per_gpu")
    ratio = pairs["tflops_per_gpu"] / pairs["tflops_per_gpu_before"]
    return by_rows(claim, pairs, ratio, ratio > 1)


@judges("A04")
def halves_with_length(tables: Tables, claim: Claim) -> Finding:
    pairs = steps(along(_grid(tables.arms), "sequence_length"), "sequence_length", RATE)
    pairs = pairs[pairs["sequence_length"] == 2 * pairs["sequence_length_before"]]
    kept = pairs[RATE] / pairs[f"{RATE}_before"]
    half = kept.between(claim.published["low"], claim.published["high"])
    return by_rows(claim, pairs, kept, half, gpus=on_gpus(pairs))


@judges("A05")
def small_is_fast(tables: Tables, claim: Claim) -> Finding:
    ends_only = (group.iloc[[0, -1]] for group in along(_grid(tables.arms), "model"))
    pairs = steps(ends_only, "num_parameters", RATE)
    times = pairs["num_parameters"] / pairs["num_parameters_before"]
    pairs = pairs[times >= claim.published["larger"]]
    ratio = pairs[f"{RATE}_before"] / pairs[RATE]
    return by_rows(claim, pairs, ratio, ratio >= claim.published["far"])


@judges("A06")
def tokens_without_tflops(tables: Tables, claim: Claim) -> Finding:
    def leads(name: str) -> pd.DataFrame:
        pairs = pairs_of(tables.runs, name)
        pairs = pairs[pairs["arm_key"].isin(_grid(tables.cells)["arm_key"])]
        return pairs.assign(lead=100 * (pairs[name] / pairs[f"{name}_bf16"] - 1))

    both = leads(RATE).merge(leads("tflops_per_gpu")[["run_ids", "lead"]], on="run_ids")
    apart = (both["lead_x"] - both["lead_y"]).abs()
    return by_rows(claim, both, both["lead_x"], apart >= claim.published["points"])


@judges("A07")
def falls_with_gpus(tables: Tables, claim: Claim) -> Finding:
    every = steps(along(_grid(tables.arms), "num_gpus"), RATE, "num_gpus")
    pairs = tables.in_one_session(every)
    change = 100 * (pairs[RATE] / pairs[f"{RATE}_before"] - 1)
    before, after = (pairs[name].astype(int) for name in ("num_gpus_before", "num_gpus"))
    each = ", ".join(
        f"from {few} to {more} in {out_of(fall)}"
        for (few, more), fall in (change < 0).groupby([before, after])
    )
    rest = len(every) - len(pairs)
    apart = f"; {count(rest, 'step')} between sessions left out" if rest else ""
    return by_rows(claim, pairs, change, change < 0, each=each, apart=apart)


def _scaling(
    tables: Tables, arms: pd.DataFrame, num_gpus: int = 4
) -> tuple[pd.DataFrame, pd.Series]:
    """Return arms on several GPUs, and which share of one's tokens/s each of them makes, %.

    Those on one ran in the same session.
    """
    pairs = steps(along(arms[arms["num_gpus"].isin([1, num_gpus])], "num_gpus"), RATE)
    pairs = tables.in_one_session(pairs)
    return pairs, 100 * pairs[RATE] / pairs[f"{RATE}_before"]


@judges("A08")
def scales(tables: Tables, claim: Claim) -> Finding:
    pairs, efficiency = _scaling(tables, _grid(tables.arms))
    each = ", ".join(
        f"{PRECISION_LABELS[name]} {ends(of, '.0f')} %"
        for name, of in efficiency.groupby(pairs["precision"])
    )
    return by_rows(claim, pairs, efficiency, efficiency >= claim.published["least"], each=each)


@judges("A09")
def utilisation(tables: Tables, claim: Claim) -> Finding:
    arms, said = _grid(tables.arms), claim.published
    arms = arms[arms["mfu_bf16_peak_pct"].notna()]
    peak, values = find_peak(said["gpu"]), arms["mfu_bf16_peak_pct"]
    dense = 100 * said["bf16_tflops"] / peak.bf16_tflops if peak else float("nan")
    return by_rows(claim, arms, values, values.between(said["low"], said["high"]), dense=dense)


@judges("A23")
def amdahl(tables: Tables, claim: Claim) -> Finding:
    def share_of(run: StoredRun) -> dict[str, float] | None:
        record = run.record
        fp8, whole = (record.model.get(f"{n}flops_per_token") for n in ("fp8_", ""))
        if record.config.get("precision") != "fp8_tensorwise" or not fp8 or not whole:
            return None
        return {"share": 100 * fp8 / whole}

    said = claim.published

    def of_size(rows: pd.DataFrame) -> pd.DataFrame:
        return rows[rows["num_parameters"].astype(float).between(*said["parameters"])]

    counted = of_size(tables.runs.merge(tables.of_records(share_of, "share")))
    leads = of_size(tables.cells)["speedup_pct"]
    if counted.empty or leads.empty:
        return claim.open()
    median, bound = counted["share"].median(), 1 / (1 - said["share_pct"] / 200)
    near = abs(median - said["share_pct"]) <= said["within"]
    verdict = by_parts(abs(bound - said["speedup"]) < 0.05, near)
    return claim.found(verdict, spread(counted["share"]), counted, bound=bound, most=leads.max(),
                       median=median)  # fmt: skip


@judges("A26")
def scales_over_pcie(tables: Tables, claim: Claim) -> Finding:
    def link_of(run: StoredRun) -> dict[str, Any]:
        is_alone = run.record.config.get("num_gpus") == 1
        return {"link": "none" if is_alone else run.record.machine.get("gpu_link")}

    links = tables.of_records(link_of, "link")
    on_pcie = ~links["link"].astype(str).str.startswith("NV") & links["link"].notna()
    on_pcie = tables.arms["arm_key"].isin(tables.runs.merge(links[on_pcie])["arm_key"])
    setting, without = tables.arms["setting"], f", {UNUSED_LINKS}"
    by_choice = setting.str.endswith(without) & ~setting.str.contains(", tuned")
    arms = tables.arms[on_pcie | by_choice].assign(
        path=tables.arms["path"].mask(by_choice, "plain"),
        setting=setting.str.removesuffix(without),
    )
    pairs, efficiency = _scaling(tables, _grid(arms))
    inside = efficiency.between(claim.published["low"], claim.published["high"])
    _, two = _scaling(tables, _grid(arms), num_gpus=2)
    seen = f"; two keep {ends(two, '.0f')} % of one's tokens/s per GPU" if len(two) else ""
    return by_rows(claim, pairs, efficiency, inside, forecast=seen + _forecast(tables, claim))


def _forecast(tables: Tables, claim: Claim) -> str:
    """Say what slower links would make of the profiled steps on several GPUs.

    A model with one constant: communication takes as many times longer as the links are slower, and
    hides behind all of the computing, which is the most that it could. Not of the tiny models, of
    whose steps the host decides.
    """
    busy = tables.kernels[tables.kernels["communication"].astype(float) > 0]
    busy = busy[~busy["model"].str.contains("tiny-")]
    computing = busy["step_time_ms_median"] - busy["not_computing_ms"]

    def speed(slower: float) -> pd.Series:
        both = pd.concat([computing, slower * busy["communication"]], axis=1)
        return 100 * computing / both.max(axis=1)

    off = (speed(1) - 100 * computing / busy["step_time_ms_median"]).abs().max()
    if busy.empty:
        return ""
    slower = claim.published["times_slower"]
    return (
        f"; over links {slower} times slower, {count(len(busy), 'profiled arm')} would keep "
        f"{ends(speed(slower), '.0f')} % of their computing speed by a simple model, up to "
        f"{off:.0f} points off on NVLink"
    )
