"""Claims about bytes: what is gathered, reduced and kept in memory, and in which format."""

from __future__ import annotations

import pandas as pd

from fp8study.analysis.claims.finding import Claim, Figure, Finding, Verdict, judges, undecided
from fp8study.analysis.claims.rules import behind, by_parts, count, judged_by_rows, spread
from fp8study.analysis.claims.tables import Tables

#: What a profile and the tables call the bytes of FP8 tensors.
_FP8 = r"uint8|float8|E4M3|E5M2"


def _gathering(tables: Tables) -> pd.DataFrame:
    """Return the profiled arms whose all-gather carries FP8; no column may be relied on if none."""
    table = tables.communication
    if table.empty or "all_gather_dtypes" not in table:
        return table[:0]
    gathers = table["all_gather_dtypes"].fillna("").str.contains(_FP8)
    return table[gathers & (table["precision"] != "bf16") & table["all_gather_change_pct"].notna()]


@judges("A16", "C03")
def gathers_half(tables: Tables, claim: Claim) -> Finding:
    table = _gathering(tables)
    if table.empty:
        return undecided("no profiled run gathers its weights in FP8 beside one in BF16")
    saved = -table["all_gather_change_pct"].astype(float)
    half, some = claim.published["saved_pct"]
    why = (
        f"the all-gather moves {saved.min():.1f} to {saved.max():.1f} % fewer bytes than BF16's in "
        f"{count(len(table), 'profiled arm')}; what is not converted is gathered in BF16 "
        f"({table['model'].iloc[0]}, GiB a step: {table['all_gather_dtypes'].iloc[0]})"
    )
    verdict = by_parts((saved >= some).all(), (saved >= half).all())
    return Finding(verdict, why, spread("fewer bytes gathered", saved, "%"), behind(table))


@judges("A17")
def reduces_in_fp8(tables: Tables, claim: Claim) -> Finding:
    table = _gathering(tables)
    formats = table.get("reduce_scatter_dtypes", pd.Series(dtype=str)).dropna()
    in_fp8 = formats.str.contains(_FP8)
    words = f"gradients are reduced in FP8 in {{}} arms; they travel as {', '.join({*formats})}"
    missing = "no profiled FP8 run on several GPUs"
    return judged_by_rows(table.loc[formats.index], 100.0 * in_fp8, in_fp8, words, "reduced in FP8",
                          missing, spec=".0f")  # fmt: skip


@judges("A18")
def upcast_before_matmul(tables: Tables, claim: Claim) -> Finding:
    keys = _gathering(tables)["arm_key"]
    table = tables.kernels[tables.kernels["arm_key"].isin(keys)]
    table = table[table["fp8_gemm_flops_pct"].notna() & (table["fp8_expected_pct"] > 0)]
    upcast = 100 - 100 * table["fp8_gemm_flops_pct"] / table["fp8_expected_pct"]
    words = (
        "converted layers multiply in BF16 in {} profiled arms that gather in FP8; a copy in BF16 "
        "on the way, cast again, would leave no trace in a record"
    )
    what, missing = "their FLOPs with BF16 inputs", "no profiled run gathers its weights in FP8"
    return judged_by_rows(table, upcast.round(3), upcast > claim.published["upcast_pct"], words,
                          what, missing)  # fmt: skip


@judges("A19")
def halves_memory(tables: Tables, claim: Claim) -> Finding:
    table = tables.memory[tables.memory["working_gib_bf16"].notna()]
    if table.empty:
        return undecided("no FP8 run knows its memory beside a BF16 run")
    parts = [100 * (1 - table[f"{name}_gib"].astype(float) / table[f"{name}_gib_bf16"])
             for name in ("parameters", "working")]  # fmt: skip
    peak = table["memory_change_pct"].astype(float)
    why = (
        f"over {count(len(table), 'arm')} the weights take {parts[0].median():.0f} % less, all but "
        f"weights and optimizer {parts[1].median():.0f} % less (medians), and the peak changes by "
        f"{peak.min():+.1f} to {peak.max():+.1f} %"
    )
    verdict = by_parts(*(part.median() >= claim.published["saved_pct"] for part in parts))
    return Finding(verdict, why, spread("change of the peak", peak, "%", "+.1f"), behind(table))


@judges("C11")
def saves_no_memory(tables: Tables, claim: Claim) -> Finding:
    table, more = tables.memory, claim.published["first_gib"]
    table = table[table["first_step_allocated_gib_bf16"].notna()]
    if table.empty:
        return undecided("no FP8 run knows its first step's memory beside a BF16 run")
    gathers = _gathering(tables)
    fewer = -gathers["all_gather_change_pct"].astype(float).median() if len(gathers) else 0.0
    change = table["memory_change_pct"].astype(float)
    first = table["first_step_allocated_gib"] - table["first_step_allocated_gib_bf16"]
    lost = sum(_only_fp8_ran_out(pair) for _, pair in tables.runs.groupby("pair_key"))
    why = (
        f"the all-gather moves {fewer:.0f} % fewer bytes; the peak changes by "
        f"{change.median():+.1f} % (median of {count(len(table), 'arm')}); the first step takes "
        f"{more:g} GiB more than BF16's in {(first >= more).sum()} of them, and FP8 alone ran out "
        f"of memory in {count(lost, 'pair')}"
    )
    verdict = by_parts(
        fewer > 0, change.median() > -claim.published["slack_pct"], (first >= more).any() or lost
    )
    return Finding(verdict, why, spread("change of the peak", change, "%", "+.1f"), behind(table))


def _only_fp8_ran_out(pair: pd.DataFrame) -> bool:
    is_bf16 = pair["precision"] == "bf16"
    bf16, fp8 = pair[is_bf16]["status"], pair[~is_bf16]["status"]
    return bool((bf16 == "completed").any() and (fp8 == "out_of_memory").any())


@judges("A29")
def rest_in_high_precision(tables: Tables, claim: Claim) -> Finding:
    """Look where the audits look: gradients, optimizer states, master weights."""
    names = [f"audit.{kind}_dtypes" for kind in ("gradient", "optimizer_state", "master")]
    frame = tables.instruments.reindex(columns=[*tables.instruments, *names])
    frame = frame.loc[:, ~frame.columns.duplicated()]
    audited = frame[frame[names].notna().all(axis=1) & (frame["precision"] != "bf16")]
    if audited.empty:
        return undecided("no FP8 run was audited")
    found = {name: sorted(set().union(*audited[name])) for name in names}
    in_fp8 = sum("float8" in " ".join(dtypes) for dtypes in found.values())
    formats = sorted({dtype for dtypes in found.values() for dtype in dtypes})
    why = (
        f"in {count(len(audited), 'audited FP8 run')} gradients, optimizer states and master "
        f"weights are {' or '.join(formats)}; norms, activations and the GEMMs' accumulators leave "
        "no trace in a record"
    )
    verdict = Verdict.CONTRADICTED if in_fp8 else Verdict.PARTLY
    figure = Figure("kinds of such tensors in FP8", in_fp8, spec=".0f")
    return Finding(verdict, why, figure, behind(audited))
