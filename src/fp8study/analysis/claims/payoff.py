"""Claims about when FP8 pays: document B's four arms, compilation, sizes, batches and GPUs."""

from __future__ import annotations

import dataclasses

import pandas as pd

from fp8study.analysis.claims.finding import Claim, Figure, Finding, Verdict, judges
from fp8study.analysis.claims.rules import by_parts, by_rows, by_share, spread
from fp8study.analysis.claims.tables import RATE, Tables, along, steps
from fp8study.core.hardware import find_peak
from fp8study.core.records import StoredRun

#: Column by which document B's arms are ordered, and whether more is better.
_ORDERS = {
    "B02": (RATE, True), "B03": ("mfu_bf16_peak_pct", True), "B04": ("step_time_ms_median", False)
}  # fmt: skip


@judges(*_ORDERS)
def four_arms_in_order(tables: Tables, claim: Claim) -> Finding:
    """Judge an order of document B's arms, comparison by comparison within one setting each."""
    column, more = _ORDERS[claim.id]
    groups = list(along(_arms_b(tables.arms), "precision", "compile"))
    holds: list[bool] = []
    said, used, complete = [], [], True
    for better, worse in claim.published["order"]:
        found = []
        for group in groups:
            most = group.sort_values("num_runs", ascending=False, kind="stable")
            by_name = most.drop_duplicates("name").set_index("name")
            if {better, worse} <= {*by_name.index}:
                found.append((by_name[column][better] > by_name[column][worse]) == more)
                used.append(by_name.loc[[better, worse]])
        words = f"in {sum(found)} of {len(found)}" if found else "never run"
        said.append(f"{better} before {worse} {words}".replace("FP8 ", ""))
        holds, complete = holds + found, complete and bool(found)
    if not holds:
        return claim.open()
    verdict = by_share(sum(holds) / len(holds))
    if verdict is Verdict.REPRODUCED and not complete:
        verdict = Verdict.PARTLY
    return claim.found(verdict, Figure(100 * sum(holds) / len(holds)), *used, said=", ".join(said))


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
    own, values = (said["first_step"][0] - said["first_step"][1]) / saved, gains["break_even_steps"]
    return by_rows(claim, gains, values, values >= said["steps"], own=own)


@judges("B06")
def slow_without_compile(tables: Tables, claim: Claim) -> Finding:
    cells = tables.cells[tables.cells["compile"].eq(False)]
    return by_rows(claim, cells, cells["speedup_pct"], cells["speedup_pct"] < 0)


@judges("C01")
def helps_on_hopper(tables: Tables, claim: Claim) -> Finding:
    cells = tables.cells[tables.cells["gpu_name"].map(_has_fp8) & tables.cells["compile"].eq(True)]
    cells = cells[cells["precision"] == "fp8_tensorwise"]
    largest = cells[cells["num_parameters"] == cells["num_parameters"].max()]
    found = by_rows(claim, largest, largest["speedup_pct"], largest["speedup_pct"] > 0)
    if found.verdict is Verdict.UNDECIDED:
        return found
    lacks = not _has_fp8(claim.published["without"])
    verdict = by_parts(found.verdict is Verdict.REPRODUCED, lacks)
    return dataclasses.replace(found, verdict=verdict)


def _has_fp8(gpu_name: str) -> bool:
    peak = find_peak(gpu_name)
    return peak is not None and peak.fp8_tflops is not None


@judges("C02")
def narrow_gains_little(tables: Tables, claim: Claim) -> Finding:
    width = tables.cells["hidden_size"].astype(float)
    cells = tables.cells[width < claim.published["width"]]
    little = cells["speedup_pct"] < claim.published["little_pct"]
    known = width.notna().any()
    least = f"; the narrowest has a width of {width.min():.0f}" if known else ""
    return by_rows(claim, cells, cells["speedup_pct"], little, least=least)


@judges("C08")
def compile_and_pipelines(tables: Tables, claim: Claim) -> Finding:
    """Judge compilation by FP8's leads with and without; pipelines have never run here."""
    cells = tables.cells[tables.cells["precision"] == "fp8_tensorwise"]
    eager, compiled = (cells[cells["compile"].eq(flag)]["speedup_pct"] for flag in (False, True))
    pipelines = tables.runs[tables.runs["strategy"].fillna("").str.contains("pipeline")]
    if eager.empty or compiled.empty:
        return claim.open()
    worked = (pipelines["status"] == "completed").any()
    medians = {"compiled": compiled.median(), "eager": eager.median()}
    verdict = by_parts(medians["compiled"] > medians["eager"], worked)
    said = {"pipelines": len(pipelines), **medians}
    return claim.found(verdict, spread(compiled), cells, pipelines, **said)


@judges("C12")
def batch_extracts(tables: Tables, claim: Claim) -> Finding:
    pairs = steps(along(tables.cells, "micro_batch_size"), "speedup_pct")
    more = pairs["speedup_pct"] - pairs["speedup_pct_before"]
    return by_rows(claim, pairs, more, more > 0)


@judges("C13")
def old_gpus(tables: Tables, claim: Claim) -> Finding:
    def capability(run: StoredRun) -> dict[str, float] | None:
        text = str(run.record.machine.get("compute_capability") or "")
        return {"capability": float(text)} if text.replace(".", "", 1).isdigit() else None

    known = tables.of_records(capability, "capability")
    old = tables.runs.merge(known[known["capability"].astype(float) < claim.published["before"]])
    cells = tables.cells[tables.cells["arm_key"].isin(old["arm_key"])]
    even = cells["speedup_pct"] <= claim.published["little_pct"]
    return by_rows(claim, cells, cells["speedup_pct"], even)
