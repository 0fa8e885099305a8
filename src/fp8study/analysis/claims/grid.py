"""Claims about speed on document A's grid: models, sequence lengths and numbers of GPUs."""

from __future__ import annotations

import pandas as pd

from fp8study.analysis.claims.finding import Claim, Finding, judges, undecided
from fp8study.analysis.claims.rules import behind, by_model, by_parts, count, judged_by_rows, spread
from fp8study.analysis.claims.tables import RATE, Tables, along, steps
from fp8study.analysis.pairing import pairs_of, together
from fp8study.core.hardware import find_peak
from fp8study.core.records import StoredRun

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
        return undecided(f"{count(len(cells), 'timed cell')} of a grid", behind(cells))
    lead = cells["speedup_pct"]
    words = "FP8 leads in {} cells at batch 1"
    return judged_by_rows(cells, lead, lead > 0, words, "lead over BF16", "", spec="+.1f")


@judges("A02")
def best_length(tables: Tables, claim: Claim) -> Finding:
    best = [
        group.sort_values("tflops_per_gpu").tail(1).assign(run_ids=together(group["run_ids"]))
        for group in along(_grid(tables.arms), "sequence_length")
        if {*claim.published["lengths"]} <= {*group["sequence_length"]}
    ]
    rows = pd.concat(best) if best else pd.DataFrame()
    lengths = pd.Series(rows.get("sequence_length"), dtype=float)
    words = f"{claim.published['best']} tokens make the most TFLOP/s in {{}} arms with all lengths"
    missing = "no arm was timed at all three lengths"
    return judged_by_rows(rows, lengths, lengths == claim.published["best"], words, "best length",
                          missing, "tokens", ".0f")  # fmt: skip


@judges("A03")
def larger_is_better(tables: Tables, claim: Claim) -> Finding:
    pairs = steps(along(_grid(tables.arms), "model"), "tflops_per_gpu")
    ratio = pairs["tflops_per_gpu"] / pairs["tflops_per_gpu_before"]
    words = "the larger of two models in one setting makes more TFLOP/s in {} comparisons"
    what, missing = "TFLOP/s over the next smaller model's", "no two models share a setting"
    return judged_by_rows(pairs, ratio, ratio > 1, words, what, missing, "times", ".2f")


@judges("A04")
def halves_with_length(tables: Tables, claim: Claim) -> Finding:
    pairs = steps(along(_grid(tables.arms), "sequence_length"), "sequence_length", RATE)
    pairs = pairs[pairs["sequence_length"] == 2 * pairs["sequence_length_before"]]
    kept, (low, high) = pairs[RATE] / pairs[f"{RATE}_before"], claim.published["ratio"]
    words = f"{{}} doublings of the length keep {low:g} to {high:g} of the tokens/s"
    what, missing = "tokens/s kept at twice the length", "no arm was timed at twice a length"
    return judged_by_rows(
        pairs, kept, kept.between(low, high), words, what, missing, "times", ".2f"
    )


@judges("A05")
def small_is_fast(tables: Tables, claim: Claim) -> Finding:
    ends = (group.iloc[[0, -1]] for group in along(_grid(tables.arms), "model"))
    pairs = steps(ends, "num_parameters", RATE)
    larger = pairs["num_parameters"] >= claim.published["larger"] * pairs["num_parameters_before"]
    pairs, far = pairs[larger], claim.published["far"]
    ratio = pairs[f"{RATE}_before"] / pairs[RATE]
    words = f"the small model makes {far:g} times the large one's tokens/s or more in {{}} settings"
    missing = "no two models of such different sizes share a setting"
    return judged_by_rows(pairs, ratio, ratio >= far, words, "tokens/s over the largest model's",
                          missing, "times")  # fmt: skip


@judges("A06")
def tokens_without_tflops(tables: Tables, claim: Claim) -> Finding:
    leads = []
    for name in ("tflops_per_gpu", RATE):
        pairs = pairs_of(tables.runs, name)
        pairs = pairs[pairs["arm_key"].isin(_grid(tables.cells)["arm_key"])]
        lead = 100 * (pairs[name] / pairs[f"{name}_bf16"] - 1)
        leads.append(lead.set_axis(pairs["run_ids"]))
    apart = (leads[0] - leads[1]).abs().to_numpy()
    words = (
        f"the leads in TFLOP/s and in tokens/s differ by {claim.published['points']} points or more"
        " in {} pairs; both precisions do the same work a token"
    )
    holds = pd.Series(apart >= claim.published["points"], index=pairs.index)
    values, missing = leads[1].set_axis(pairs.index), "no FP8 run is timed beside its BF16 run"
    return judged_by_rows(pairs, values, holds, words, "lead in tokens/s, as in TFLOP/s", missing,
                          spec="+.1f")  # fmt: skip


@judges("A07")
def falls_with_gpus(tables: Tables, claim: Claim) -> Finding:
    pairs = steps(along(_grid(tables.arms), "num_gpus"), RATE)
    change = 100 * (pairs[RATE] / pairs[f"{RATE}_before"] - 1)
    words = "tokens/s per GPU fall in {} steps to more GPUs"
    what, missing = "change of tokens/s per GPU", "no arm was timed on two numbers of GPUs"
    return judged_by_rows(pairs, change, change < 0, words, what, missing, spec="+.1f")


def _scaling(arms: pd.DataFrame, low: float, high: float, words: str) -> Finding:
    """Judge by which share of four times one GPU's tokens/s four GPUs make, %."""
    pairs = steps(along(arms[arms["num_gpus"].isin([1, 4])], "num_gpus"), RATE)
    efficiency = 100 * pairs[RATE] / pairs[f"{RATE}_before"]
    what, missing = "scaling efficiency on 4 GPUs", "no arm was timed on one GPU and on four"
    return judged_by_rows(pairs, efficiency, efficiency.between(low, high), words, what, missing)


@judges("A08")
def scales(tables: Tables, claim: Claim) -> Finding:
    least = claim.published["efficiency_pct"]
    words = f"{{}} arms on four GPUs make {least} % or more of four times one GPU's tokens/s"
    return _scaling(_grid(tables.arms), least, float("inf"), words)


@judges("A09")
def utilisation(tables: Tables, claim: Claim) -> Finding:
    arms = _grid(tables.arms)
    arms = arms[arms["mfu_bf16_peak_pct"].notna()]
    low, high = claim.published["mfu_pct"]
    own, peak = claim.published["bf16_tflops"], find_peak(claim.published["gpu"])
    words = (
        f"{{}} arms at batch 1 lie between {low:g} and {high:g} % of the dense BF16 peak, all FLOPs"
        f" counted; of a {claim.published['gpu']}'s dense peak the document's {own:g} TFLOP/s are "
        f"{100 * own / peak.bf16_tflops if peak else float('nan'):.1f} %"
    )
    values, missing = arms["mfu_bf16_peak_pct"], "no arm at batch 1 ran on a GPU of known peak"
    holds = values.between(low, high)
    return judged_by_rows(arms, values, holds, words, "MFU (dense BF16 peak)", missing)


@judges("A23")
def amdahl(tables: Tables, claim: Claim) -> Finding:
    def share_of(run: StoredRun) -> dict[str, float] | None:
        record = run.record
        fp8, whole = (record.model.get(f"{n}flops_per_token") for n in ("fp8_", ""))
        if record.config.get("precision") != "fp8_tensorwise" or not fp8 or not whole:
            return None
        return {"share_pct": 100 * fp8 / whole}

    share, said = claim.published["share_pct"], claim.published["speedup"]
    bound = 1 / (1 - share / 200)
    counted = tables.runs.merge(tables.of_records(share_of, "share_pct"))
    if counted.empty:
        return undecided("no FP8 run counted which FLOPs it does in FP8")
    values = counted["share_pct"]
    largest = values[counted["num_parameters"] == counted["num_parameters"].max()].median()
    near = abs(largest - share) <= claim.published["within"]
    why = (
        f"{share:g} % of the FLOPs at twice the speed make {bound:.2f} times, and the document says"
        f" {said:g}; measured leads end at {tables.cells['speedup_pct'].max():+.1f} %; of the FLOPs"
        f" FP8 takes over {largest:.0f} % in the largest model{by_model(counted, values, '.0f')}"
    )
    figure = spread("FLOPs that FP8 takes over", values, "%")
    return Finding(by_parts(abs(bound - said) < 0.05, near), why, figure, behind(counted))


@judges("A26")
def scales_over_pcie(tables: Tables, claim: Claim) -> Finding:
    links = tables.of_records(lambda run: {"link": run.record.machine.get("gpu_link")}, "link")
    on_pcie = ~links["link"].astype(str).str.startswith("NV") & links["link"].notna()
    keys = tables.runs.merge(links[on_pcie])["arm_key"]
    low, high = claim.published["efficiency_pct"]
    words = f"{{}} arms without NVLink scale at {low} to {high} %"
    found = _scaling(_grid(tables.arms[tables.arms["arm_key"].isin(keys)]), low, high, words)
    return found if found.runs else undecided(_forecast(tables, claim.published["times_slower"]))


def _forecast(tables: Tables, times: float) -> str:
    """Say what links that are so many times slower would make of the profiled steps.

    A model with one constant: communication takes as many times longer, and hides behind all of the
    computing, which is the most that it could.
    """
    busy = tables.kernels[tables.kernels["communication"].astype(float) > 0]
    if busy.empty:
        return "no profiled step on several GPUs to calibrate a model of communication with"
    computing = busy["step_time_ms_median"] - busy["not_computing_ms"]

    def speed(slower: float) -> pd.Series:
        both = pd.concat([computing, slower * busy["communication"]], axis=1)
        return 100 * computing / both.max(axis=1)

    off = (speed(1) - 100 * computing / busy["step_time_ms_median"]).abs().max()
    return (
        f"over links {times:g} times slower {count(len(busy), 'profiled arm')} would keep "
        f"{speed(times).min():.0f} to {speed(times).max():.0f} % of their computing speed; on "
        f"NVLink this model is up to {off:.0f} points off"
    )
