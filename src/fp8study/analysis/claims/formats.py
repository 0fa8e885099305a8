"""Claims about the formats themselves and about data sheets: arithmetic, no runs."""

from __future__ import annotations

from fp8study.analysis.claims.finding import Claim, Figure, Finding, judges
from fp8study.analysis.claims.rules import by_parts
from fp8study.analysis.claims.tables import Tables
from fp8study.analysis.noise.moments import BF16, E4M3, E5M2, running_sum
from fp8study.core.hardware import find_peak


@judges("A20")
def peaks(tables: Tables, claim: Claim) -> Finding:
    said, gpu = claim.published, find_peak(claim.published["gpu"])
    if gpu is None or gpu.fp8_tflops is None:
        return claim.open()
    times = said["bf16_tflops"] / gpu.bf16_tflops, said["fp8_tflops"] / gpu.fp8_tflops
    verdict = by_parts(*(abs(factor - 1) < 0.05 for factor in times))
    return claim.found(verdict, Figure(gpu.bf16_tflops), bf16=gpu.bf16_tflops, fp8=gpu.fp8_tflops,
                       source=gpu.source, times=times)  # fmt: skip


@judges("A21")
def relative_errors(tables: Tables, claim: Claim) -> Finding:
    found = {f.name: 100 * f.worst_relative_error() for f in (E4M3, E5M2)}
    near = (0.5 <= error / claim.published[name] <= 2 for name, error in found.items())
    return claim.found(by_parts(*near), Figure(found["E4M3"]), found=found)


@judges("A22")
def sums(tables: Tables, claim: Claim) -> Finding:
    found = {f.name: running_sum(0.001, 1000, f) for f in (E4M3, E5M2, BF16)}
    in_fp8 = min(abs(found[name] - claim.published["fp8"]) for name in ("E4M3", "E5M2"))
    verdict = by_parts(in_fp8 < 0.05, abs(found["BF16"] - claim.published["bf16"]) < 0.005)
    exact = running_sum(0.001, 1000, None)
    return claim.found(verdict, Figure(found["BF16"]), found=found, exact=exact)
