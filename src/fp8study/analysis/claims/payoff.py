"""Claims about when FP8 pays: document B's four arms, compilation, sizes, batches and GPUs."""

from __future__ import annotations

import pandas as pd

from fp8study.analysis.claims.finding import Claim, Figure, Finding, Verdict, judges, undecided
from fp8study.analysis.claims.rules import behind, by_parts, by_share, count, of_cells, spread
from fp8study.analysis.claims.tables import RATE, Tables, along, steps
from fp8study.core.hardware import find_peak
from fp8study.core.records import StoredRun


def _arm_b(arms: pd.DataFrame) -> pd.DataFrame:
    """Name document B's arms among those of its model's size and setting, on one GPU or several."""
    size = arms["num_parameters"].astype(float).between(7e9, 9e9)
    alike = size & (arms["sequence_length"] == 4096) & (arms["micro_batch_size"] == 1)
    compiled = arms["compile"].eq(True)
    name = arms["precision"].where(
        arms["precision"] != "bf16", compiled.map({True: "bf16 compiled", False: "bf16 eager"})
    )
    return arms.assign(name=name)[alike & (compiled | (arms["precision"] == "bf16"))]


def _ordered(tables: Tables, claim: Claim, column: str, what: str, sign: int = 1) -> Finding:
    """Judge an order of document B's arms, comparison by comparison within one setting each."""
    groups = list(along(_arm_b(tables.arms), "precision", "compile"))
    holds, said, used = [], [], []
    for better, worse in claim.published["order"]:
        changes = []
        for group in groups:
            by_name = group.drop_duplicates("name").set_index("name")[column]
            if {better, worse} <= {*by_name.index}:
                changes.append(100 * (by_name[better] / by_name[worse] - 1))
                used.append(group)
        right = sum(sign * change > 0 for change in changes)
        words = f"{better} v {worse}".replace("_", " ").replace("fp", "FP").replace("bf", "BF")
        if changes:
            holds += [sign * change > 0 for change in changes]
            said.append(f"{words} in {right} of {count(len(changes), 'setting')}")
        else:
            said.append(f"{words} never run")
    missing = sum("never" in text for text in said)
    why = f"{what} of an 8B at 4096 tokens and batch 1: {'; '.join(said)}"
    runs = behind(*used)
    if not holds or missing == len(said):
        return undecided(why, runs)
    share = sum(holds) / len(holds)
    verdict = by_share(share)
    if missing and verdict is Verdict.REPRODUCED:
        verdict = Verdict.PARTLY
    return Finding(verdict, why, Figure("comparisons in that order", 100 * share, "%"), runs)


@judges("B02")
def order_of_rates(tables: Tables, claim: Claim) -> Finding:
    return _ordered(tables, claim, RATE, "tokens/s")


@judges("B03")
def order_of_utilisation(tables: Tables, claim: Claim) -> Finding:
    return _ordered(tables, claim, "mfu_bf16_peak_pct", "MFU with one FLOPs count")


@judges("B04")
def order_of_times(tables: Tables, claim: Claim) -> Finding:
    return _ordered(tables, claim, "step_time_ms_median", "step times", sign=-1)


@judges("B05")
def warm_up_pays(tables: Tables, claim: Claim) -> Finding:
    table = tables.break_even
    table = table[table["num_parameters"].astype(float) >= claim.published["parameters"]]
    gains = table[table["break_even_steps"] < float("inf")]
    first, seconds, tokens = (claim.published[n] for n in ("first_step", "rates", "tokens_a_step"))
    own = (first[0] - first[1]) / (tokens / seconds[1] - tokens / seconds[0])
    if gains.empty:
        return undecided("no FP8 arm with a shorter step has a measured warm-up")
    long = gains["break_even_steps"] >= claim.published["steps"]
    why = (
        f"{long.sum()} of {len(gains)} arms of an 8B with a shorter step need "
        f"{claim.published['steps']:,} steps or more to win their warm-up back; the document's own "
        f"figures give {own:,.0f} for tensorwise against the compiled baseline"
    )
    figure = spread("steps to break even", gains["break_even_steps"])
    return of_cells(long, why, figure, behind(gains))


@judges("B06")
def slow_without_compile(tables: Tables, claim: Claim) -> Finding:
    cells = tables.cells[tables.cells["compile"].eq(False)]
    if cells.empty:
        return undecided("no FP8 run without torch.compile is timed beside its BF16 run")
    slower = cells["speedup_pct"] < 0
    why = f"eager FP8 is slower than eager BF16 in {slower.sum()} of {count(len(cells), 'cell')}"
    figure = spread("lead of eager FP8", cells["speedup_pct"], "%")
    return of_cells(slower, why, figure, behind(cells))


@judges("C01")
def helps_on_hopper(tables: Tables, claim: Claim) -> Finding:
    cells = tables.cells[tables.cells["gpu_name"].map(_has_fp8) & tables.cells["compile"].eq(True)]
    cells = cells[cells["precision"] == "fp8_tensorwise"]
    if cells.empty:
        return undecided("no compiled FP8 run on a GPU with FP8 units is timed beside BF16")
    largest = cells[cells["num_parameters"] == cells["num_parameters"].max()]
    without = find_peak(claim.published["without"])
    ahead = largest["speedup_pct"] > 0
    why = (
        f"the largest model, {largest['model'].iloc[0]}, gains in {ahead.sum()} of "
        f"{count(len(largest), 'cell')} here; that an {claim.published['without']} does not is "
        "read off its data sheet, which knows no FP8 units"
    )
    verdict = by_parts(ahead.all(), without is not None and without.fp8_tflops is None)
    figure = spread("lead of the largest model", largest["speedup_pct"], "%")
    return Finding(verdict, why, figure, behind(largest))


def _has_fp8(gpu_name: str) -> bool:
    peak = find_peak(gpu_name)
    return peak is not None and peak.fp8_tflops is not None


@judges("C02")
def narrow_gains_little(tables: Tables, claim: Claim) -> Finding:
    cells = tables.cells[tables.cells["hidden_size"].notna()]
    narrow = cells[cells["hidden_size"].astype(float) < claim.published["width"]]
    if narrow.empty:
        least = cells["hidden_size"].min() if len(cells) else None
        seen = f"the narrowest model timed has a width of {least:.0f}" if least else "none is timed"
        return undecided(f"no model below a width of {claim.published['width']} is timed: {seen}")
    little = narrow["speedup_pct"] < claim.published["little_pct"]
    most = claim.published["little_pct"]
    why = f"{little.sum()} of {count(len(narrow), 'narrow cell')} gain under {most} %"
    figure = spread("lead below that width", narrow["speedup_pct"], "%")
    return of_cells(little, why, figure, behind(narrow))


@judges("C08")
def compile_and_pipelines(tables: Tables, claim: Claim) -> Finding:
    """Judge compilation by FP8's leads with and without; pipelines have never run here."""
    cells = tables.cells[tables.cells["precision"] == "fp8_tensorwise"]
    eager, compiled = (cells[cells["compile"].eq(flag)]["speedup_pct"] for flag in (False, True))
    pipelines = tables.runs[tables.runs["strategy"].fillna("").str.contains("pipeline")]
    worked = bool((pipelines["status"] == "completed").any())
    if eager.empty or compiled.empty:
        return undecided("FP8 is not timed both with and without torch.compile")
    why = (
        f"FP8's median lead is {compiled.median():+.1f} % compiled and {eager.median():+.1f} % "
        f"eager; {count(len(pipelines), 'run')} with pipeline parallelism, which this trainer lacks"
    )
    verdict = by_parts(compiled.median() > eager.median(), worked)
    figure = spread("lead of compiled FP8", compiled, "%")
    return Finding(verdict, why, figure, behind(cells, pipelines))


@judges("C12")
def batch_extracts(tables: Tables, claim: Claim) -> Finding:
    pairs = steps(along(tables.cells, "micro_batch_size"), "speedup_pct")
    if pairs.empty:
        return undecided("no FP8 arm is timed beside BF16 at two batch sizes")
    more = pairs["speedup_pct"] - pairs["speedup_pct_before"]
    why = (
        f"the lead grows with the batch in {(more > 0).sum()} of {len(pairs)} steps to a larger one"
        f", from a median of {pairs['speedup_pct_before'].median():+.1f} % to "
        f"{pairs['speedup_pct'].median():+.1f} %"
    )
    figure = spread("points of lead gained", more)
    return of_cells(more > 0, why, figure, behind(pairs))


@judges("C13")
def old_gpus(tables: Tables, claim: Claim) -> Finding:
    def capability(run: StoredRun) -> dict[str, float] | None:
        text = str(run.record.machine.get("compute_capability") or "")
        return {"capability": float(text)} if text.replace(".", "", 1).isdigit() else None

    known = tables.of_records(capability, "capability")
    old = known[known["capability"] < claim.published["capability"]]
    keys = tables.runs.merge(old[["machine", "study", "run_id"]])["arm_key"]
    cells = tables.cells[tables.cells["arm_key"].isin(keys)]
    if cells.empty:
        return undecided("every FP8 run on a GPU is of one that has FP8 units")
    even = cells["speedup_pct"] <= claim.published["little_pct"]
    why = f"FP8 has no lead in {even.sum()} of {count(len(cells), 'cell')} on older GPUs"
    figure = spread("lead before Hopper", cells["speedup_pct"], "%")
    return of_cells(even, why, figure, behind(cells))
