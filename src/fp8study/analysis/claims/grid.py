"""Claims about speed on document A's grid: models, sequence lengths and numbers of GPUs."""

from __future__ import annotations

import pandas as pd

from fp8study.analysis.claims.finding import Claim, Figure, Finding, judges, undecided
from fp8study.analysis.claims.rules import (
    behind,
    by_parts,
    by_share,
    count,
    named,
    of_cells,
    spread,
)
from fp8study.analysis.claims.tables import RATE, Tables, along, steps
from fp8study.analysis.pairing import pairs_of
from fp8study.core.hardware import find_peak
from fp8study.core.records import StoredRun

#: Fewer cells than this are no grid.
_CELLS = 4


def _grid(arms: pd.DataFrame) -> pd.DataFrame:
    """Keep what document A ran: batch 1, plain path, BF16 or tensorwise; compiled throughout."""
    alone = (arms["micro_batch_size"] == 1) & (arms["gradient_accumulation_steps"] == 1)
    kind = arms["precision"].isin(["bf16", "fp8_tensorwise"]) & (arms["path"] == "plain")
    return arms[alone & kind & arms["compile"].eq(True)]


def _by_model(cells: pd.DataFrame, column: str) -> pd.Series:
    return cells.sort_values("num_parameters").groupby("model", sort=False)[column].median()


@judges("A01")
def leads_everywhere(tables: Tables, claim: Claim) -> Finding:
    cells = _grid(tables.cells)
    if len(cells) < _CELLS or cells["model"].nunique() < 2:
        return undecided(f"{count(len(cells), 'timed cell')} of a grid", behind(cells))
    ahead = cells["speedup_pct"] > 0
    why = (
        f"FP8 leads in {ahead.sum()} of {len(cells)} cells at batch 1; median lead by model: "
        f"{named(_by_model(cells, 'speedup_pct'))}"
    )
    figure = spread("lead over BF16", cells["speedup_pct"], "%")
    return of_cells(ahead, why, figure, behind(cells))


@judges("A02")
def best_length(tables: Tables, claim: Claim) -> Finding:
    lengths = set(claim.published["lengths"])
    groups = [
        group
        for group in along(_grid(tables.arms), "sequence_length")
        if lengths <= {*group["sequence_length"]}
    ]
    if not groups:
        return undecided("no arm was timed at all three lengths")
    best = [g.sort_values("tflops_per_gpu")["sequence_length"].iloc[-1] for g in groups]
    tally = pd.Series(best).value_counts().sort_index()
    share = float(tally.get(claim.published["best"], 0)) / len(groups)
    said = ", ".join(f"{length} tokens in {n}" for length, n in tally.items())
    why = f"of {count(len(groups), 'arm')} timed at all three lengths the best is {said}"
    figure = Figure("arms whose best length it is", 100 * share, "%")
    return Finding(by_share(share), why, figure, behind(*groups))


@judges("A03")
def larger_is_better(tables: Tables, claim: Claim) -> Finding:
    pairs = steps(along(_grid(tables.arms), "model"), "tflops_per_gpu")
    if pairs.empty:
        return undecided("no two models were timed in one setting")
    better = pairs["tflops_per_gpu"] > pairs["tflops_per_gpu_before"]
    why = (
        f"the larger of two models in one setting makes more TFLOP/s in {better.sum()} of "
        f"{len(pairs)} comparisons; medians: "
        f"{named(_by_model(_grid(tables.arms), 'tflops_per_gpu'), '.0f', '')}"
    )
    ratio = pairs["tflops_per_gpu"] / pairs["tflops_per_gpu_before"]
    figure = spread("larger model's TFLOP/s over the smaller's", ratio, "times")
    return of_cells(better, why, figure, behind(pairs))


@judges("A04")
def halves_with_length(tables: Tables, claim: Claim) -> Finding:
    pairs = steps(along(_grid(tables.arms), "sequence_length"), "sequence_length", RATE)
    pairs = pairs[pairs["sequence_length"] == 2 * pairs["sequence_length_before"]]
    if pairs.empty:
        return undecided("no arm was timed at a length and at twice that")
    kept = pairs[RATE] / pairs[f"{RATE}_before"]
    low, high = claim.published["ratio"]
    inside = kept.between(low, high)
    why = (
        f"of {count(len(pairs), 'doubling')} of the length {inside.sum()} keep {low:g} to {high:g} "
        f"of the tokens/s; the median keeps {kept.median():.2f}"
    )
    figure = spread("tokens/s kept when the length doubles", kept, spec=".2f")
    return of_cells(inside, why, figure, behind(pairs))


@judges("A05")
def small_is_fast(tables: Tables, claim: Claim) -> Finding:
    least = claim.published["larger"]
    groups = [
        group
        for group in along(_grid(tables.arms), "model")
        if group["num_parameters"].iloc[-1] >= least * group["num_parameters"].iloc[0]
    ]
    if not groups:
        return undecided("no two models of such different sizes were timed in one setting")
    ratio = pd.Series([g[RATE].iloc[0] / g[RATE].iloc[-1] for g in groups])
    far = ratio >= claim.published["far"]
    why = (
        f"the smallest model makes at least {claim.published['far']:g} times the largest one's "
        f"tokens/s in {far.sum()} of {count(len(groups), 'setting')}"
    )
    figure = spread("smallest model's tokens/s over the largest's", ratio, "times")
    return of_cells(far, why, figure, behind(*groups))


@judges("A06")
def tokens_without_tflops(tables: Tables, claim: Claim) -> Finding:
    cells = _grid(tables.cells)
    if cells.empty:
        return undecided("no FP8 run is timed beside its BF16 run")
    leads = []
    for name in ("tflops_per_gpu", RATE):
        pairs = pairs_of(tables.runs, name).set_index("run_ids")
        pairs = pairs[pairs["arm_key"].isin(cells["arm_key"])]
        leads.append(100 * (pairs[name] / pairs[f"{name}_bf16"] - 1))
    apart = (leads[0] - leads[1]).abs()
    why = (
        "a lead in TFLOP/s is the same lead in tokens/s, since both precisions do the same work a "
        f"token: they differ by {apart.max():.2f} points at most in {count(len(apart), 'pair')}"
    )
    figure = spread("lead in tokens/s", leads[1], "%")
    return of_cells(apart >= claim.published["points"], why, figure, behind(cells))


@judges("A07")
def falls_with_gpus(tables: Tables, claim: Claim) -> Finding:
    pairs = steps(along(_grid(tables.arms), "num_gpus"), RATE)
    if pairs.empty:
        return undecided("no arm was timed on two numbers of GPUs")
    change = 100 * (pairs[RATE] / pairs[f"{RATE}_before"] - 1)
    why = (
        f"tokens/s per GPU fall in {(change < 0).sum()} of {len(pairs)} steps to more GPUs; "
        f"median change by model: {named(_by_model(pairs.assign(change=change), 'change'))}"
    )
    figure = spread("change of tokens/s per GPU", change, "%")
    return of_cells(change < 0, why, figure, behind(pairs))


def _efficiency(arms: pd.DataFrame) -> pd.DataFrame:
    """Set four GPUs beside one: ``efficiency_pct`` of four times one GPU's tokens/s."""
    few = arms[arms["num_gpus"].isin([1, 4])]
    pairs = steps(along(few, "num_gpus"), RATE)
    return pairs.assign(efficiency_pct=100 * pairs[RATE] / pairs[f"{RATE}_before"])


@judges("A08")
def scales(tables: Tables, claim: Claim) -> Finding:
    pairs = _efficiency(_grid(tables.arms))
    if pairs.empty:
        return undecided("no arm was timed on one GPU and on four")
    least = claim.published["efficiency_pct"][0]
    enough = pairs["efficiency_pct"] >= least
    why = (
        f"four GPUs make {least:g} % of four times one GPU or more in {enough.sum()} of "
        f"{count(len(pairs), 'arm')}; median by model: "
        f"{named(_by_model(pairs, 'efficiency_pct'), '.0f')}"
    )
    figure = spread("scaling efficiency on 4 GPUs", pairs["efficiency_pct"], "%")
    return of_cells(enough, why, figure, behind(pairs))


@judges("A09")
def utilisation(tables: Tables, claim: Claim) -> Finding:
    arms = _grid(tables.arms)
    arms = arms[arms["mfu_bf16_peak_pct"].notna()]
    if arms.empty:
        return undecided("no arm at batch 1 was timed on a GPU with a known peak")
    low, high = claim.published["mfu_pct"]
    inside = arms["mfu_bf16_peak_pct"].between(low, high)
    own, peak = claim.published["bf16_tflops"], find_peak(claim.published["gpu"])
    dense = f"{100 * own / peak.bf16_tflops:.1f}" if peak else "unknown"
    why = (
        f"{inside.sum()} of {len(arms)} arms at batch 1 lie between {low:g} and {high:g} % of the "
        f"dense BF16 peak with all FLOPs counted; its own {own:g} TFLOP/s are {dense} % of a "
        f"{claim.published['gpu']}'s dense peak"
    )
    figure = spread("MFU (BF16 peak)", arms["mfu_bf16_peak_pct"], "%")
    return of_cells(inside, why, figure, behind(arms))


@judges("A23")
def amdahl(tables: Tables, claim: Claim) -> Finding:
    def share_of(run: StoredRun) -> dict[str, float] | None:
        record = run.record
        fp8, whole = (record.model.get(f"{n}flops_per_token") for n in ("fp8_", ""))
        if record.config.get("precision") != "fp8_tensorwise" or not fp8 or not whole:
            return None
        return {"share_pct": 100 * fp8 / whole}

    share = claim.published["share_pct"]
    bound = 1 / (1 - share / 200)
    sound = abs(bound - claim.published["speedup"]) < 0.05
    counted = tables.of_records(share_of, "share_pct").merge(
        tables.runs, on=["machine", "study", "run_id"]
    )
    if counted.empty:
        return undecided("no FP8 run counted which FLOPs it does in FP8")
    near = (counted["share_pct"] - share).abs() <= claim.published["within"]
    cells = tables.cells
    most = f"{1 + cells['speedup_pct'].max() / 100:.2f}" if len(cells) else "not measured"
    why = (
        f"{share:g} % of the FLOPs at twice the speed give {bound:.2f} times, and the document says"
        f" {claim.published['speedup']:g}; the share here is "
        f"{named(_by_model(counted, 'share_pct'), '.0f')}, and the largest lead {most} times"
    )
    figure = spread("share of FLOPs that FP8 takes over", _by_model(counted, "share_pct"), "%")
    return Finding(by_parts(sound, near.all()), why, figure, behind(counted))


@judges("A26")
def scales_over_pcie(tables: Tables, claim: Claim) -> Finding:
    links = tables.of_records(lambda run: {"link": run.record.machine.get("gpu_link")}, "link")
    on_pcie = ~links["link"].astype(str).str.startswith("NV") & links["link"].notna()
    keys = tables.runs.merge(links[on_pcie])["arm_key"]
    pairs = _efficiency(_grid(tables.arms[tables.arms["arm_key"].isin(keys)]))
    if pairs.empty:
        return undecided(_forecast(tables, claim))
    low, high = claim.published["efficiency_pct"]
    inside = pairs["efficiency_pct"].between(low, high)
    why = f"{inside.sum()} of {len(pairs)} arms without NVLink scale at {low:g} to {high:g} %"
    figure = spread("scaling efficiency on 4 GPUs", pairs["efficiency_pct"], "%")
    return of_cells(inside, why, figure, behind(pairs))


def _forecast(tables: Tables, claim: Claim) -> str:
    """Say what slower links would make of the profiled steps on NVLink.

    A model with one constant: communication takes as many times longer as the links are slower, and
    hides behind all of the computing, which is the most that it could.
    """
    busy = tables.kernels
    busy = busy[busy["communication"].fillna(0) > 0] if len(busy) else busy
    if busy.empty:
        return "no profiled step on several GPUs to calibrate a model of communication with"
    computing = busy["step_time_ms_median"] - busy["not_computing_ms"]
    slower = busy["communication"] * claim.published["times_slower"]
    forecast = 100 * computing / pd.concat([computing, slower], axis=1).max(axis=1)
    model = 100 * computing / pd.concat([computing, busy["communication"]], axis=1).max(axis=1)
    real = 100 * computing / busy["step_time_ms_median"]
    return (
        f"with links {claim.published['times_slower']:g} times slower the communication of "
        f"{count(len(busy), 'profiled arm')} would leave {forecast.min():.0f} to "
        f"{forecast.max():.0f} % of the computing speed; on NVLink the same model is up to "
        f"{(model - real).abs().max():.0f} points off"
    )
