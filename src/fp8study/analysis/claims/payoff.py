"""Claims about when FP8 pays: document B's four arms, compilation, sizes, batches and GPUs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from fp8study.analysis.claims.finding import Claim, Figure, Finding, Verdict, judges
from fp8study.analysis.claims.rules import by_parts, by_rows, by_share, ends, out_of, spread
from fp8study.analysis.claims.tables import RATE, Tables, along, steps
from fp8study.core.hardware import find_peak
from fp8study.core.records import MIN_PAIRS_FOR_INTERVAL, StoredRun
from fp8study.core.words import count

#: States in which a compiled run found torch's compile cache.
_CACHES = ("cold", "warm", "partly warm")
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
    """Judge the arms that found the compile cache empty; those that found it warm are told beside.

    An arm whose step is no shorter never pays its warm-up back: it counts for the claim. What a
    first run waits for only a cold cache shows, so a few such arms decide nothing.
    """
    table, said = tables.break_even, claim.published
    table = table[table["num_parameters"].astype(float) >= said["parameters"]]
    table = table[table["cache"].isin(_CACHES)]
    needed = table["break_even_steps"].astype(float)
    is_cold, late = table["cache"] == "cold", needed >= said["steps"]
    if table.empty:
        return claim.open()
    cold, warm = (_break_evens(needed[which], late[which]) for which in (is_cold, ~is_cold))
    enough = is_cold.sum() >= MIN_PAIRS_FOR_INTERVAL
    verdict = by_share(float(late[is_cold].mean())) if enough else Verdict.UNDECIDED
    shown = needed[is_cold] if is_cold.any() else needed
    shown = shown[shown < math.inf]
    return claim.found(
        verdict, spread(shown) if len(shown) else None, table, cold=cold, warm=warm,
        own=", ".join(_own_break_evens(said)),
    )  # fmt: skip


def _break_evens(needed: pd.Series, late: pd.Series) -> str:
    """Say how many arms need so many steps, and how many those need that do pay back."""
    if needed.empty:
        return "no arm"
    paid, never = needed[needed < math.inf], int((needed == math.inf).sum())
    steps = [f"{ends(paid, ',.0f')} steps"] if len(paid) else []
    return f"{out_of(late)} arms ({', '.join([*steps, *([f'{never} never'] if never else [])])})"


def _own_break_evens(said: Mapping[str, Any]) -> list[str]:
    """Return document B's own: first steps and rates of its recipes against compiled BF16."""
    base, first_base = said["rates"]["BF16"], said["first_step"]["BF16"]
    texts = []
    for name in (name for name in said["rates"] if name != "BF16"):
        saved_s = said["tokens_a_step"] * (1 / base - 1 / said["rates"][name])
        texts.append(f"{(said['first_step'][name] - first_base) / saved_s:,.0f} for {name}")
    return texts


@judges("B06")
def slow_without_compile(tables: Tables, claim: Claim) -> Finding:
    cells = tables.cells[tables.cells["compile"].eq(False)]
    return by_rows(claim, cells, cells["speedup_pct"], cells["speedup_pct"] < 0)


@judges("C01")
def helps_on_hopper(tables: Tables, claim: Claim) -> Finding:
    """Judge the largest model by its leads; what the smallest lead of the others is, is told."""
    cells = tables.cells[tables.cells["gpu_name"].map(_has_fp8) & tables.cells["compile"].eq(True)]
    cells = cells[cells["precision"] == "fp8_tensorwise"]
    is_largest = cells["num_parameters"] == cells["num_parameters"].max()
    largest, others = cells[is_largest], cells[~is_largest]
    small = ""
    if len(others):
        least = others.loc[others["speedup_pct"].astype(float).idxmin()]
        where = f"batch {least['micro_batch_size']:.0f}, {count(int(least['num_gpus']), 'GPU')}"
        small = (
            f"; smaller models in {out_of(others['speedup_pct'] > 0)}, at worst "
            f"{least['speedup_pct']:+.1f} % ({least['model']}, {where})"
        )
    rows = largest.drop(columns="model")  # the reason names it
    found = by_rows(claim, rows, rows["speedup_pct"], rows["speedup_pct"] > 0,
                    largest=", ".join(sorted({*largest["model"]})), small=small)  # fmt: skip
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
