"""Claims about bytes: what is gathered, reduced and kept in memory, and in which format."""

from __future__ import annotations

import pandas as pd

from fp8study.analysis.claims.finding import Claim, Figure, Finding, Verdict, judges, undecided
from fp8study.analysis.claims.rules import behind, by_parts, count, of_cells, spread
from fp8study.analysis.claims.tables import Tables

#: What a profile calls the bytes of FP8 weights; torch's own names of the formats begin so.
_FP8 = r"uint8|float8|E4M3|E5M2"


def _fp8_collectives(tables: Tables) -> pd.DataFrame:
    table = tables.communication
    if "all_gather_change_pct" not in table:
        return table.assign(all_gather_change_pct=[])
    gathers = table["all_gather_dtypes"].fillna("").str.contains(_FP8)
    return table[gathers & (table["precision"] != "bf16")]


@judges("A16", "C03")
def gathers_half(tables: Tables, claim: Claim) -> Finding:
    table = _fp8_collectives(tables)
    table = table[table["all_gather_change_pct"].notna()]
    if table.empty:
        return undecided("no profiled run gathers its weights in FP8 beside one in BF16")
    saved = -table["all_gather_change_pct"].astype(float)
    half, some = claim.published["saved_pct"]
    verdict = by_parts((saved >= some).all(), (saved >= half).all())
    why = (
        f"the all-gather of {count(len(table), 'profiled arm')} moves {saved.min():.1f} to "
        f"{saved.max():.1f} % fewer bytes than BF16's; what is not converted is gathered in BF16 "
        f"(of {table['model'].iloc[0]}, GiB a step: {table['all_gather_dtypes'].iloc[0]})"
    )
    figure = spread("fewer bytes in the all-gather", saved, "%")
    return Finding(verdict, why, figure, behind(table))


@judges("A17")
def reduces_in_fp8(tables: Tables, claim: Claim) -> Finding:
    table = _fp8_collectives(tables)
    table = table[table["reduce_scatter_dtypes"].notna()] if len(table) else table
    if table.empty:
        return undecided("no profiled FP8 run on several GPUs")
    in_fp8 = table["reduce_scatter_dtypes"].str.contains(_FP8)
    formats = ", ".join(sorted({*table["reduce_scatter_dtypes"]}))
    why = (
        f"gradients are reduced in FP8 in {in_fp8.sum()} of {count(len(table), 'profiled arm')}; "
        f"they travel as {formats}"
    )
    figure = Figure("arms that reduce in FP8", 100 * float(in_fp8.mean()), "%")
    return of_cells(in_fp8, why, figure, behind(table))


@judges("A18")
def upcast_before_matmul(tables: Tables, claim: Claim) -> Finding:
    gathered = tables.communication
    if gathered.empty or tables.kernels.empty:
        return undecided("no profiled run gathers its weights in FP8")
    keys = _fp8_collectives(tables)["arm_key"]
    table = tables.kernels[tables.kernels["arm_key"].isin(keys)]
    table = table[table["fp8_gemm_flops_pct"].notna() & (table["fp8_expected_pct"] > 0)]
    if table.empty:
        return undecided("no profiled run gathers its weights in FP8")
    upcast = 100 - 100 * table["fp8_gemm_flops_pct"] / table["fp8_expected_pct"]
    holds = upcast > claim.published["upcast_pct"]
    why = (
        f"in {count(len(table), 'profiled arm')} that gather in FP8, {(100 - upcast).min():.0f} % "
        "of the FLOPs of converted layers have FP8 inputs; a copy in BF16 on the way there, cast "
        "again, would leave no trace in a record"
    )
    figure = spread("converted FLOPs whose inputs are BF16", upcast.clip(lower=0), "%")
    return of_cells(holds, why, figure, behind(table))


@judges("A19")
def halves_memory(tables: Tables, claim: Claim) -> Finding:
    table = tables.memory
    split = table[table["working_gib_bf16"].notna()]
    if split.empty:
        return undecided("no FP8 run knows its memory beside a BF16 run")
    saved = -table["memory_change_pct"].astype(float)
    parts = {
        name: 100 * (1 - split[f"{name}_gib"].astype(float) / split[f"{name}_gib_bf16"])
        for name in ("parameters", "working")
    }
    half = claim.published["saved_pct"]
    why = (
        f"weights take {parts['parameters'].median():.0f} % less, all but weights and optimizer "
        f"{parts['working'].median():.0f} % less (medians of {count(len(split), 'arm')}), and the "
        f"peak is lower by {abs(saved.min()):.1f} to {saved.max():.1f} %"
    )
    verdict = by_parts(*(part.median() >= half for part in parts.values()))
    return Finding(verdict, why, spread("lower peak", saved, "%"), behind(table))


@judges("C11")
def saves_no_memory(tables: Tables, claim: Claim) -> Finding:
    table = tables.memory
    gathers = _fp8_collectives(tables)["all_gather_change_pct"].astype(float)
    split = table[table["first_step_allocated_gib_bf16"].notna()]
    if split.empty:
        return undecided("no FP8 run knows its first step's memory beside a BF16 run")
    change = table["memory_change_pct"].astype(float)
    first = split["first_step_allocated_gib"] - split["first_step_allocated_gib_bf16"]
    lost = sum(_only_fp8_ran_out(pair) for _, pair in tables.runs.groupby("pair_key"))
    slack = claim.published["slack_pct"]
    why = (
        f"the all-gather moves {gathers.median():+.0f} % bytes; "
        f"the peak changes by a median of {change.median():+.1f} % over {count(len(change), 'arm')}"
        f" ({change.min():+.1f} to {change.max():+.1f}); the first step's peak is higher than "
        f"BF16's by {claim.published['first_gib']:g} GiB or more in "
        f"{(first >= claim.published['first_gib']).sum()} of {len(first)}, and FP8 alone ran out "
        f"of memory in {count(lost, 'pair')}"
    )
    verdict = by_parts(
        len(gathers) and gathers.max() < 0,
        change.median() > -slack,
        (first >= claim.published["first_gib"]).any() or lost,
    )
    figure = spread("change of the peak", change, "%", "+.1f")
    return Finding(verdict, why, figure, behind(table))


def _only_fp8_ran_out(pair: pd.DataFrame) -> bool:
    is_bf16 = pair["precision"] == "bf16"
    bf16, fp8 = pair[is_bf16]["status"], pair[~is_bf16]["status"]
    return bool((bf16 == "completed").any() and (fp8 == "out_of_memory").any())


@judges("A29")
def rest_in_high_precision(tables: Tables, claim: Claim) -> Finding:
    """Look where the audits look: gradients, optimizer states, master weights, GEMM inputs."""
    frame = tables.instruments
    kinds = ("gradient", "optimizer_state", "master")
    names = [f"audit.{kind}_dtypes" for kind in kinds]
    if not {*names} <= {*frame}:
        return undecided("no run was audited")
    audited = frame[frame[names].notna().all(axis=1) & (frame["precision"] != "bf16")]
    if audited.empty:
        return undecided("no FP8 run was audited")
    found = {name: sorted(set().union(*audited[name])) for name in names}
    in_fp8 = [k for k, name in zip(kinds, names, strict=True) if "float8" in str(found[name])]
    formats = sorted({dtype for dtypes in found.values() for dtype in dtypes})
    why = (
        f"in {count(len(audited), 'audited FP8 run')} gradients, optimizer states and master "
        f"weights are {' or '.join(formats)}; norms, activations and the GEMMs' accumulators leave "
        "no trace in a record"
    )
    verdict = Verdict.CONTRADICTED if in_fp8 else Verdict.PARTLY
    figure = Figure("kinds of tensors outside GEMMs in FP8", len(in_fp8), spec=".0f")
    return Finding(verdict, why, figure, behind(audited))
