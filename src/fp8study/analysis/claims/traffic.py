"""Claims about bytes: what is gathered, reduced and kept in memory, and in which format."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from fp8study.analysis.claims.finding import Claim, Figure, Finding, Verdict, judges
from fp8study.analysis.claims.rules import by_parts, by_rows, ends, spread
from fp8study.analysis.claims.tables import Tables
from fp8study.analysis.runs.frames import PLACE
from fp8study.analysis.runs.pairing import in_fp8
from fp8study.core.recipes import SIXTEEN_BIT
from fp8study.core.records import StoredRun
from fp8study.core.words import count

#: What a profile and the tables call the bytes of FP8 tensors.
_FP8 = r"uint8|float8|E4M3|E5M2"


def _gathering(tables: Tables) -> pd.DataFrame:
    """Return the profiled arms whose all-gather carries FP8, beside BF16 arms."""
    table = tables.communication
    gathers = table["all_gather_dtypes"].fillna("").astype(str).str.contains(_FP8)
    return table[gathers & in_fp8(table) & table["all_gather_change_pct"].notna()]


@judges("A16", "C03")
def gathers_half(tables: Tables, claim: Claim) -> Finding:
    table = _gathering(tables)
    if table.empty:
        return claim.open()
    saved = -table["all_gather_change_pct"].astype(float)
    half, some = claim.published["saved_pct"]
    verdict = by_parts((saved >= some).all(), (saved >= half).all())
    return claim.found(
        verdict, spread(saved), table,
        model=table["model"].iloc[0], dtypes=table["all_gather_dtypes"].iloc[0],
    )  # fmt: skip


@judges("A17")
def reduces_in_fp8(tables: Tables, claim: Claim) -> Finding:
    table = _gathering(tables).dropna(subset="reduce_scatter_dtypes")
    formats = table["reduce_scatter_dtypes"].astype(str)
    in_fp8 = formats.str.contains(_FP8)
    return by_rows(claim, table, 100.0 * in_fp8, in_fp8, formats=", ".join(sorted({*formats})))


@judges("A18")
def upcast_before_matmul(tables: Tables, claim: Claim) -> Finding:
    table = tables.kernels[tables.kernels["arm_key"].isin(_gathering(tables)["arm_key"])]
    table = table[table["fp8_gemm_flops_pct"].notna() & (table["fp8_expected_pct"] > 0)]
    upcast = 100 - 100 * table["fp8_gemm_flops_pct"] / table["fp8_expected_pct"]
    return by_rows(claim, table, upcast.round(3), upcast > claim.published["upcast_pct"])


@judges("A19")
def halves_memory(tables: Tables, claim: Claim) -> Finding:
    table = tables.memory[tables.memory["working_gib_bf16"].notna()]
    if table.empty:
        return claim.open()
    saved = [100 * (1 - table[f"{name}_gib"].astype(float) / table[f"{name}_gib_bf16"]).median()
             for name in ("parameters", "working")]  # fmt: skip
    peak = table["memory_change_pct"].astype(float)
    return claim.found(
        by_parts(*(part >= claim.published["saved_pct"] for part in saved)), spread(peak), table,
        weights=saved[0], working=saved[1],
    )  # fmt: skip


@judges("C11")
def saves_no_memory(tables: Tables, claim: Claim) -> Finding:
    table = tables.memory[tables.memory["first_step_allocated_gib_bf16"].notna()]
    if table.empty:
        return claim.open()
    gathers = _gathering(tables)["all_gather_change_pct"].astype(float)
    fewer = -gathers.median()
    moves = f"moves {fewer:.0f} % fewer bytes" if len(gathers) else "was not profiled"
    change = table["memory_change_pct"].astype(float)
    first = table["first_step_allocated_gib"] - table["first_step_allocated_gib_bf16"]
    more = (first >= claim.published["first_gib"]).sum()
    lost = sum(_only_fp8_ran_out(pair) for _, pair in tables.runs.groupby("pair_key"))
    parts = [change.median() > -claim.published["slack_pct"], more or lost]
    parts += [fewer > 0] if len(gathers) else []
    return claim.found(
        by_parts(*parts), spread(change), table, gathers=moves, more=more,
        arms=count(len(table), "arm"), lost=count(lost, "pair"),
    )  # fmt: skip


def _only_fp8_ran_out(pair: pd.DataFrame) -> bool:
    bf16, fp8 = (pair[in_fp8(pair) == of]["status"] for of in (False, True))
    return bool((bf16 == "completed").any() and (fp8 == "out_of_memory").any())


@judges("A29")
def rest_in_high_precision(tables: Tables, claim: Claim) -> Finding:
    """Look where the audits look, and at the operators of profiled steps that were not compiled."""
    names = [f"audit.{kind}_dtypes" for kind in ("gradient", "optimizer_state", "master")]
    frame = tables.instruments
    frame = frame.reindex(columns=frame.columns.union(names, sort=False))
    audited = frame[frame[names].notna().all(axis=1) & in_fp8(frame)]
    usual = tables.of_records(
        lambda run: {} if run.record.config.get("optimizer_state", "fp32") == "fp32" else None
    )
    audited = audited.merge(usual[PLACE], on=PLACE)  # others have asked for FP8 there
    if audited.empty:
        return claim.open()
    found = [{*audited[name].explode()} for name in names]
    kinds = sum("float8" in " ".join(dtypes) for dtypes in found)
    formats = " or ".join(sorted(set().union(*found)))
    steps = tables.of_records(_low_operations, "names", "fast", "gemms")
    low = sorted(set().union(*steps["names"]))
    looked = "no profile names every operator"
    if len(steps):
        named = f"{count(len(steps), 'profile')} with every operator named"
        known = steps["fast"].notna().all()
        fast = ends(steps["fast"], ".0f") if known else "nobody knows how many"
        looked = f"{named}: in FP8 beside GEMMs {', '.join(low) or 'none'}; {fast} of "
        looked += f"{ends(steps['gemms'], 'd')} FP8 GEMMs a step may sum with fewer bits than FP32"
    holds = len(steps) and steps["fast"].eq(0).all()
    verdict = Verdict.REPRODUCED if holds else Verdict.PARTLY
    return claim.found(
        Verdict.CONTRADICTED if kinds or low else verdict, Figure(kinds + len(low)), audited, steps,
        runs=len(audited), formats=formats, looked=looked,
    )  # fmt: skip


def _low_operations(run: StoredRun) -> dict[str, Any] | None:
    """Return an FP8 step's operators that took FP8 tensors, and how many of its GEMMs sum fast."""
    step, config = run.record.instruments.get("step", {}), run.record.config
    is_open = config.get("precision") in SIXTEEN_BIT or config.get("compile")
    # Emulated GEMMs are FP32's.
    if is_open or "operations" not in step or config.get("fp8_emulate"):
        return None
    low = {name for dtype, names in step["operations"].items() if "float8" in dtype
           for name in names}  # fmt: skip
    in_fp8 = [row for row in step["gemm"] if "float8" in row["dtypes"]]
    fast = [row["num_fast"] for row in step["gemm"]]
    return {"names": low, "fast": math.nan if None in fast else sum(fast),
            "gemms": sum(row["num"] for row in in_fp8)}  # fmt: skip
