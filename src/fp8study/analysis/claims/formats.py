"""Claims about the formats themselves and about data sheets: arithmetic, no runs."""

from __future__ import annotations

from fp8study.analysis.claims.finding import Claim, Figure, Finding, Verdict, judges, undecided
from fp8study.analysis.claims.rules import by_parts
from fp8study.analysis.claims.tables import Tables
from fp8study.analysis.noise import BF16, E4M3, E5M2, running_sum
from fp8study.core.hardware import find_peak


@judges("A20")
def peaks(tables: Tables, claim: Claim) -> Finding:
    said, gpu = claim.published, find_peak(claim.published["gpu"])
    if gpu is None or gpu.fp8_tflops is None:
        return undecided(f"the table of data sheets lacks the {said['gpu']}")
    times = said["bf16_tflops"] / gpu.bf16_tflops, said["fp8_tflops"] / gpu.fp8_tflops
    why = (
        f"dense, a {said['gpu']} reaches {gpu.bf16_tflops:,.0f} TFLOP/s in BF16 and "
        f"{gpu.fp8_tflops:,.0f} in FP8 ({gpu.source}); the document's figures are "
        f"{times[0]:.2g} and {times[1]:.2g} times that, and 2 times is what 2:4 sparsity would add"
    )
    verdict = by_parts(*(abs(factor - 1) < 0.05 for factor in times))
    return Finding(verdict, why, Figure("dense BF16 peak", gpu.bf16_tflops, "TFLOP/s", spec=",.0f"))


@judges("A21")
def relative_errors(tables: Tables, claim: Claim) -> Finding:
    found = {f.name: 100 * f.worst_relative_error() for f in (E4M3, E5M2)}
    near = [0.5 <= found[name] / claim.published[name] <= 2 for name in found]
    why = (
        f"over all numbers of the formats the worst rounding error is {found['E4M3']:.1f} % for "
        f"E4M3 and {found['E5M2']:.1f} % for E5M2"
    )
    return Finding(by_parts(*near), why, Figure("worst error of E4M3", found["E4M3"], "%"))


@judges("A22")
def sums(tables: Tables, claim: Claim) -> Finding:
    found = {f.name: running_sum(0.001, 1000, f) for f in (E4M3, E5M2, BF16)}
    exact = running_sum(0.001, 1000, None)
    near = [
        any(abs(found[name] - claim.published["fp8"]) < 0.05 for name in ("E4M3", "E5M2")),
        abs(found["BF16"] - claim.published["bf16"]) < 0.005,
    ]
    why = (
        f"the sum stops growing at {found['E4M3']:g} in E4M3, {found['E5M2']:g} in E5M2 and "
        f"{found['BF16']:g} in BF16; an FP32 accumulator gives {exact:.3f}"
    )
    verdict = by_parts(*near) if any(near) else Verdict.CONTRADICTED
    return Finding(verdict, why, Figure("the sum in BF16", found["BF16"], spec=".3f"))
