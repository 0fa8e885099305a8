"""Claims about when FP8 pays: document B's four arms, compilation, sizes, batches and GPUs."""

from __future__ import annotations

import pandas as pd

from fp8study.analysis.claims.finding import Claim, Figure, Finding, Verdict, judges, undecided
from fp8study.analysis.claims.rules import behind, by_parts, by_share, count, judged_by_rows, spread
from fp8study.analysis.claims.tables import RATE, Tables, along, steps
from fp8study.core.hardware import find_peak
from fp8study.core.records import StoredRun

#: Column by which document B's arms are ordered → what it is, and whether more is better.
_ORDERS = {
    "B02": (RATE, "tokens/s", True),
    "B03": ("mfu_bf16_peak_pct", "MFU with one FLOPs count", True),
    "B04": ("step_time_ms_median", "step times", False),
}


@judges(*_ORDERS)
def four_arms_in_order(tables: Tables, claim: Claim) -> Finding:
    """Judge an order of document B's arms, comparison by comparison within one setting each."""
    column, what, more = _ORDERS[claim.id]
    groups = list(along(_arms_b(tables.arms), "precision", "compile"))
    holds: list[bool] = []
    said, used = [], []
    for better, worse in claim.published["order"]:
        found = []
        for group in groups:
            by_name = group.drop_duplicates("name").set_index("name")
            if {better, worse} <= {*by_name.index}:
                found.append((by_name[column][better] > by_name[column][worse]) == more)
                used.append(by_name.loc[[better, worse]])
        words = f"{sum(found)} of {count(len(found), 'setting')}" if found else "never run"
        said.append(f"{better} before {worse}: {words}")
        holds += found
    why = f"{what} of an 8B at 4096 tokens and batch 1; {'; '.join(said)}"
    if not holds:
        return undecided(why)
    verdict = by_share(sum(holds) / len(holds))
    if verdict is Verdict.REPRODUCED and "never run" in why:
        verdict = Verdict.PARTLY
    figure = Figure("comparisons in that order", 100 * sum(holds) / len(holds), "%", spec=".0f")
    return Finding(verdict, why, figure, behind(*used))


def _arms_b(arms: pd.DataFrame) -> pd.DataFrame:
    """Name document B's arms, of a model of its size at its length, on one GPU or several."""
    size = arms["num_parameters"].astype(float).between(7e9, 9e9)
    alike = size & (arms["sequence_length"] == 4096) & (arms["micro_batch_size"] == 1)
    compiled, is_bf16 = arms["compile"].eq(True), arms["precision"] == "bf16"
    name = arms["arm"].where(~is_bf16, compiled.map({True: "BF16 compiled", False: "BF16 eager"}))
    return arms.assign(name=name)[alike & (compiled | is_bf16)]


@judges("B05")
def warm_up_pays(tables: Tables, claim: Claim) -> Finding:
    table, said = tables.break_even, claim.published
    table = table[table["num_parameters"].astype(float) >= said["parameters"]]
    gains = table[table["break_even_steps"] < float("inf")]
    saved = said["tokens_a_step"] * (1 / said["rates"][1] - 1 / said["rates"][0])
    own = (said["first_step"][0] - said["first_step"][1]) / saved
    words = (
        f"{{}} arms of an 8B with a shorter step need {said['steps']:,} steps or more to win their "
        f"warm-up back; the document's own figures give {own:,.0f} for tensorwise against compiled "
        "BF16"
    )
    values, missing = gains["break_even_steps"], "no FP8 arm of an 8B has a measured warm-up"
    return judged_by_rows(gains, values, values >= said["steps"], words, "steps to break even",
                          missing, "", ".0f")  # fmt: skip


def _leads(cells: pd.DataFrame, holds: pd.Series, words: str, missing: str) -> Finding:
    return judged_by_rows(
        cells, cells["speedup_pct"], holds, words, "lead over BF16", missing, spec="+.1f"
    )


@judges("B06")
def slow_without_compile(tables: Tables, claim: Claim) -> Finding:
    cells = tables.cells[tables.cells["compile"].eq(False)]
    words = "eager FP8 is slower than eager BF16 in {} cells"
    return _leads(cells, cells["speedup_pct"] < 0, words, "no eager FP8 run is timed beside BF16")


@judges("C01")
def helps_on_hopper(tables: Tables, claim: Claim) -> Finding:
    cells = tables.cells[tables.cells["gpu_name"].map(_has_fp8) & tables.cells["compile"].eq(True)]
    cells = cells[cells["precision"] == "fp8_tensorwise"]
    largest = cells[cells["num_parameters"] == cells["num_parameters"].max()]
    words = (
        "the largest model gains in {} cells; that an "
        f"{claim.published['without']} does not is read off its data sheet"
    )
    found = _leads(largest, largest["speedup_pct"] > 0, words, "no compiled FP8 run is timed")
    if found.verdict is Verdict.UNDECIDED:
        return found
    return Finding(
        by_parts(found.verdict is Verdict.REPRODUCED, not _has_fp8(claim.published["without"])),
        found.why, found.figure, found.runs,
    )  # fmt: skip


def _has_fp8(gpu_name: str) -> bool:
    peak = find_peak(gpu_name)
    return peak is not None and peak.fp8_tflops is not None


@judges("C02")
def narrow_gains_little(tables: Tables, claim: Claim) -> Finding:
    width = tables.cells["hidden_size"].astype(float)
    narrow = tables.cells[width < claim.published["width"]]
    words = f"FP8 gains less than {claim.published['little_pct']} % in {{}} narrow cells"
    known = f"the narrowest has a width of {width.min():.0f}" if width.notna().any() else "none"
    missing = f"of the models that are timed, {known}"
    return _leads(narrow, narrow["speedup_pct"] < claim.published["little_pct"], words, missing)


@judges("C08")
def compile_and_pipelines(tables: Tables, claim: Claim) -> Finding:
    """Judge compilation by FP8's leads with and without; pipelines have never run here."""
    cells = tables.cells[tables.cells["precision"] == "fp8_tensorwise"]
    eager, compiled = (cells[cells["compile"].eq(flag)]["speedup_pct"] for flag in (False, True))
    pipelines = tables.runs[tables.runs["strategy"].fillna("").str.contains("pipeline")]
    if eager.empty or compiled.empty:
        return undecided("FP8 is not timed both with and without torch.compile")
    why = (
        f"FP8's median lead is {compiled.median():+.1f} % compiled and {eager.median():+.1f} % "
        f"eager; {count(len(pipelines), 'run')} with pipeline parallelism"
    )
    worked = (pipelines["status"] == "completed").any()
    figure = spread("lead of compiled FP8", compiled, "%", "+.1f")
    verdict = by_parts(compiled.median() > eager.median(), worked)
    return Finding(verdict, why, figure, behind(cells, pipelines))


@judges("C12")
def batch_extracts(tables: Tables, claim: Claim) -> Finding:
    pairs = steps(along(tables.cells, "micro_batch_size"), "speedup_pct")
    more = pairs["speedup_pct"] - pairs["speedup_pct_before"]
    words = "FP8's lead grows in {} steps to a larger batch"
    missing = "no FP8 arm is timed beside BF16 at two batch sizes"
    return judged_by_rows(
        pairs, more, more > 0, words, "points of lead gained", missing, "", "+.1f"
    )


@judges("C13")
def old_gpus(tables: Tables, claim: Claim) -> Finding:
    def capability(run: StoredRun) -> dict[str, float] | None:
        text = str(run.record.machine.get("compute_capability") or "")
        return {"capability": float(text)} if text.replace(".", "", 1).isdigit() else None

    known = tables.of_records(capability, "capability")
    old = tables.runs.merge(known[known["capability"].astype(float) < claim.published["before"]])
    cells = tables.cells[tables.cells["arm_key"].isin(old["arm_key"])]
    holds = cells["speedup_pct"] <= claim.published["little_pct"]
    words = "FP8 has no lead in {} cells on GPUs before Hopper"
    return _leads(cells, holds, words, "no FP8 run is of a GPU before Hopper")
