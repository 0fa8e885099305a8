"""Every verdict follows its records and can come out otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from fp8study.analysis.claims.finding import Verdict
from fp8study.analysis.claims.ledger import (
    all_claims,
    judge_claim,
)
from fp8study.core.records import RunRecord
from tests.claim_factories import (
    FP8,
    LARGE,
    SMALL,
    Records,
    curves,
    gathered,
    grid,
    losses,
    measured,
    noisy,
    operators,
    pair,
    run,
    sweep,
    tables,
    with_warm_up,
)  # fmt: skip

CLAIMS = {claim.id: claim for claim in all_claims()}
YES, PARTLY, NO = Verdict.REPRODUCED, Verdict.PARTLY, Verdict.CONTRADICTED
OPEN, ARTEFACT, ELSEWHERE = Verdict.UNDECIDED, Verdict.ARTEFACT, Verdict.NOT_TESTABLE

ENDS = {"skip": ["model.layers.0.self_attn.q_proj", "lm_head"]}
SCHEDULE = {"precision_schedule": ["bf16:10", "fp8_tensorwise"]}
BOTH_ENDS = {"precision_schedule": ["bf16:10", "fp8_tensorwise:-10", "bf16"]}
WORK = {SMALL: 1.0, LARGE: 6.7}


def leads(pct: float) -> Records:
    return lambda: grid(lambda m, s, g, p: 100 * (1 + pct / 100 * (p != "bf16")))


def rates(rate: Callable[[str, int, int], float]) -> Records:
    return lambda: grid(lambda m, s, g, p: rate(m, s, g))


def one_batch(batch: int, gap: float, **changes: Any) -> list[RunRecord]:
    return losses(gap, micro_batch_size=batch, study="effective-batch", **changes)


def diverged(records: list[RunRecord]) -> list[RunRecord]:
    """In FP8 alone."""
    for number in range(1, len(records), 2):
        records[number] = dataclasses.replace(records[number], status="diverged")
    return records


def and_an_8b(gap: float) -> Records:
    """Small models whose losses are equal on four GPUs, and large ones whose pairs scatter."""
    large = partial(losses, gap, wobble=0.02, model=LARGE, num_gpus=4)
    return lambda: losses(0, num_gpus=4) + large()


def four_arms(tensorwise: float, rowwise: float, compiled: float, eager: float) -> Records:
    return lambda: [
        run(precision, LARGE, rate, compile=rate != eager, num_gpus=1)
        for precision, rate in (
            (FP8[0], tensorwise), (FP8[1], rowwise), ("bf16", compiled), ("bf16", eager),
        )
    ] + pair(tensorwise / compiled, model=LARGE, study="other")  # fmt: skip


def warm_up(*seconds: float, hits: int = 0, lead: float = 20) -> Records:
    """Pairs at as many lengths, whose FP8 run warms up for so long and BF16's for 10 s."""

    def records() -> list[RunRecord]:
        found = []
        for number, cost in enumerate(seconds):
            both = pair(lead, model=LARGE, rate=10_000, sequence_length=1024 * (1 + number),
                        instruments={"memory": {"num_alloc_retries": 0}})  # fmt: skip
            for record, warm_up_s in zip(both, (10.0, cost), strict=True):
                record.results.update(
                    warm_up_seconds=warm_up_s,
                    compile_cache_hits=hits,
                    compile_cache_misses=2 - hits,
                )
            found += both
        return found

    return records


def with_stale(at_1: float, at_4: float | None) -> Records:
    """Healthy arms that work at batch 1 and 4, beside stale ones that end so far above BF16."""
    stale = {"outside": 78.0, "optimizer_binding": "before_conversion"}

    def records() -> list[RunRecord]:
        found = one_batch(1, 0) + one_batch(4, 0) + one_batch(1, at_1, **stale)
        return found + ([] if at_4 is None else one_batch(4, at_4, **stale))

    return records


def recipes(speeds: tuple[float, ...], errors: tuple[float, ...]) -> Records:
    return lambda: [run(rate=100)] + [
        run(precision, rate=rate) for precision, rate in zip(FP8, speeds, strict=True)
    ] + [noisy(errors)]  # fmt: skip


def memories(parameters: float, working: float, peak: float, first: float = 18.0) -> Records:
    memory = {"parameters_gib": parameters, "steady_allocated_gib": parameters + 10 + working,
              "first_step_allocated_gib": first}  # fmt: skip
    return lambda: measured(memory=memory, fp8={"results": {"memory_peak_gib": peak}})


def kernels(name: str) -> Records:
    gemm = {"dtypes": "float8_e4m3fn × float8_e4m3fn", "num": 1, "tflop": 1.0, "time_ms": 1.0,
            "kernels": [name]}  # fmt: skip
    return lambda: measured(step={"gemm": [gemm]})


def mixture(**audit: Any) -> Records:
    return lambda: measured(audit={"skipped": {"router of a mixture of experts": 4}} | audit)


def skips(first_and_last: float, none: float) -> Records:
    return lambda: losses(first_and_last, config=ENDS) + losses(none, config={"skip": []})[1::2]


def flops_of(parameters: float, in_fp8: float) -> Records:
    facts = {"num_parameters": parameters, "flops_per_token": 4e9, "fp8_flops_per_token": in_fp8}
    return lambda: pair(model_facts=facts)


def nothing() -> list[RunRecord]:
    return []


#: Claim, verdict, records, and what is changed in the document's figures.
CASES: list[tuple[str, Verdict, Records, dict[str, Any]]] = [
    ("A01", YES, leads(12), {}),
    ("A01", NO, leads(-12), {}),
    ("A02", YES, rates(lambda m, s, g: {2048: 90, 4096: 100, 8192: 80}[s]), {}),
    ("A02", NO, rates(lambda m, s, g: {2048: 100, 4096: 90, 8192: 80}[s]), {}),
    ("A03", YES, rates(lambda m, s, g: 100), {}),
    ("A03", NO, rates(lambda m, s, g: 100 / WORK[m] ** 2), {}),
    ("A04", YES, rates(lambda m, s, g: 1e6 / s), {}),
    ("A04", NO, rates(lambda m, s, g: 100), {}),
    ("A05", YES, rates(lambda m, s, g: 100 / WORK[m]), {}),
    ("A05", NO, rates(lambda m, s, g: 100), {}),
    ("A06", YES, lambda: pair(0, fp8={"results": {"tflops_per_gpu": 5.0}}), {}),
    ("A06", NO, leads(5), {}),
    ("A07", YES, rates(lambda m, s, g: 100 / g), {}),
    ("A07", NO, rates(lambda m, s, g: 100 + g), {}),
    ("A08", YES, rates(lambda m, s, g: 100 - g), {}),
    ("A08", NO, rates(lambda m, s, g: 100 / g), {}),
    ("A09", YES, lambda: pair(results={"mfu_bf16_peak_pct": 5.0}), {}),
    ("A09", NO, lambda: pair(results={"mfu_bf16_peak_pct": 45.0}), {}),
    ("A10", YES, lambda: losses(0, num_gpus=4), {}),
    ("A10", NO, lambda: losses(3, num_gpus=4), {}),
    ("A10", PARTLY, and_an_8b(0.1), {}),  # undecided
    ("A11", YES, lambda: losses(0, num_gpus=2), {}),
    ("A11", NO, lambda: losses(3, num_gpus=2), {}),
    ("A12", YES, lambda: losses(50, master_dtype="bf16"), {}),
    ("A12", NO, lambda: losses(0, master_dtype="bf16"), {}),
    ("A12", ARTEFACT, lambda: losses(0, master_dtype="bf16")
     + losses(50, master_dtype="bf16", outside=78.0, optimizer_binding="before_conversion"), {}),
    ("A13", YES, lambda: one_batch(1, 40) + one_batch(2, 0) + [noisy([0.9])], {"batches": [1, 2]}),
    ("A13", NO, lambda: one_batch(1, 0) + one_batch(2, 0) + [noisy([0.01])], {}),
    ("A13", PARTLY, lambda: diverged(one_batch(1, 0)) + one_batch(2, 0) + [noisy([0.01])], {}),
    ("A14", YES, lambda: one_batch(1, 40) + one_batch(4, 0), {}),
    ("A14", NO, lambda: one_batch(1, 40) + one_batch(4, 40), {}),
    ("A14", ARTEFACT, with_stale(0, 0), {}),
    ("A14", OPEN, lambda: one_batch(1, 0) + one_batch(4, 0), {}),
    ("A14", OPEN, with_stale(40, None), {}),
    ("A14", YES, with_stale(40, 0), {}),
    ("A14", NO, with_stale(40, 40), {}),
    ("A14", YES, lambda: diverged(one_batch(1, 0)) + one_batch(4, 0), {}),
    ("A15", YES, lambda: [noisy()], {"within": 0.3}),
    ("A15", NO, lambda: [noisy(alike=4) for _ in range(3)], {}),
    ("A16", YES, lambda: measured(step=gathered("uint8", 5.0)), {}),
    ("A16", NO, lambda: measured(step=gathered("uint8", 10.0)), {}),
    ("A17", YES, lambda: measured(step=gathered("uint8", 5.0, "uint8")), {}),
    ("A17", NO, lambda: measured(step=gathered("uint8", 5.0)), {}),
    ("A18", YES, lambda: measured(step={"fp8_gemm_flops_pct": 0.0}), {}),
    ("A18", NO, lambda: measured(), {}),
    ("A19", YES, memories(2.5, 4.0, 10.0), {}),
    ("A19", NO, memories(5.0, 8.0, 20.0), {}),
    ("A20", YES, nothing, {"bf16_tflops": 2250, "fp8_tflops": 4500}),
    ("A21", YES, nothing, {"E4M3": 6, "E5M2": 11}),
    ("A22", YES, nothing, {"fp8": 0.03125, "bf16": 0.5}),
    ("A23", YES, flops_of(8e9, 3e9), {"speedup": 1.6}),
    ("A23", NO, flops_of(8e9, 1e9), {}),
    ("A23", OPEN, flops_of(14e9, 3e9), {}),  # of an 8B
    ("A24", YES, skips(0, 3), {}),
    ("A24", NO, skips(3, 0), {}),
    ("A24", PARTLY, skips(0, 0), {}),
    ("A25", YES, lambda: [run(FP8[0], status="failed", status_detail="no",
                              config={"cpu_ram_efficient_loading": True})], {}),
    ("A25", NO, lambda: [run(FP8[0], config={"cpu_ram_efficient_loading": True})], {}),
    ("A26", YES, lambda: pair(rate=100, machine={"gpu_link": "PHB"})
     + pair(rate=60, num_gpus=4, machine={"gpu_link": "PHB"}), {}),
    ("A26", ELSEWHERE, leads(10), {}),
    ("A27", YES, recipes((125, 110, 108), (0.3, 0.2, 0.1)), {}),
    ("A27", PARTLY, recipes((125, 108, 110), (0.3, 0.2, 0.1)), {}),
    ("A27", NO, recipes((105, 110, 108), (0.1, 0.2, 0.3)), {}),
    ("A28", YES, lambda: pair(strategy="ddp", num_gpus=2), {}),
    ("A28", NO, lambda: pair(strategy="ddp", num_gpus=2, fp8={"status": "failed",
                                                               "status_detail": "no"}), {}),
    ("A29", NO, lambda: measured(audit={"gradient_dtypes": ["float8_e5m2"]}), {}),
    ("A29", PARTLY, lambda: measured(), {}),
    ("A29", PARTLY, lambda: measured(fp8=operators(num_fast=2)), {}),
    ("A29", PARTLY, lambda: measured(fp8=operators(num_fast=None)), {}),
    ("A29", YES, lambda: measured(fp8=operators()), {}),
    ("A29", NO, lambda: measured(fp8=operators("mul")), {}),
    ("B01", YES, lambda: losses(0) + losses(0, FP8[1])[1::2], {}),
    ("B01", NO, lambda: losses(3) + losses(3, FP8[1])[1::2], {}),
    ("B01", YES, lambda: losses(0, sequence_length=2048, data={"epochs": 0.9})
     + losses(0, FP8[1], sequence_length=2048, data={"epochs": 0.9})[1::2], {}),
    ("B01", OPEN, lambda: losses(0, both={"init_from": "a/run"})
     + losses(0, FP8[1], both={"init_from": "a/run"})[1::2], {}),
    ("B01", OPEN, lambda: losses(0, sequence_length=2048, data={"epochs": 1.1})
     + losses(0, FP8[1], sequence_length=2048, data={"epochs": 1.1})[1::2], {}),
    ("B02", YES, four_arms(108, 92, 87, 81), {}),
    ("B02", NO, four_arms(81, 87, 92, 108), {}),
    ("B03", NO, four_arms(81, 87, 92, 108), {}),
    ("B04", YES, four_arms(108, 92, 87, 81), {}),
    ("B04", NO, four_arms(81, 87, 92, 108), {}),
    ("B05", YES, warm_up(500, 500, 500), {}),
    ("B05", PARTLY, warm_up(500, 500, 11), {}),
    ("B05", NO, warm_up(11, 11, 11), {}),
    ("B05", OPEN, warm_up(11, 11), {}),
    ("B05", OPEN, warm_up(11, 11, 11, hits=2), {}),
    ("B05", YES, warm_up(11, 11, 11, lead=-5), {}),  # never paid back
    ("B06", YES, lambda: pair(-70, compile=False), {}),
    ("B06", NO, lambda: pair(10, compile=False), {}),
    ("C01", YES, lambda: pair(10), {}),
    ("C01", PARTLY, lambda: pair(-10), {}),
    ("C01", NO, lambda: pair(-10), {"without": "H100"}),
    ("C02", YES, lambda: pair(2, model="tiny-llama"), {}),
    ("C02", NO, lambda: pair(20, model="tiny-llama"), {}),
    ("C02", OPEN, lambda: pair(20), {}),
    ("C03", YES, lambda: measured(step=gathered("uint8", 5.0)), {}),
    ("C04", YES, lambda: measured(audit={"fp8_gemm_flops_pct": 0.0}), {"wrong": [{}]}),
    ("C04", NO, lambda: measured(), {}),
    ("C05", YES, kernels("sm90_scaled_mm_tn"), {}),
    ("C05", NO, kernels("nvjet_sm90_qqtst"), {}),
    ("C06", NO, nothing, {"setting": {"num_gpus": 2}}),
    ("C06", YES, nothing, {"setting": {"precision": "fp8_rowwise_gw_hp", "strategy": "none"}}),
    ("C07", YES, mixture(), {}),
    ("C07", NO, mixture(num_linear_fp8=0), {}),
    ("C08", PARTLY, lambda: pair(20) + pair(-70, compile=False), {}),
    ("C08", NO, lambda: pair(-70) + pair(20, compile=False), {}),
    ("C09", YES, lambda: curves(5, 0), {}),
    ("C09", NO, lambda: curves(0, 5), {}),
    ("C09", PARTLY, lambda: curves(0.4, 0.4, period=100), {}),  # as far apart late as early
    ("C09", NO, lambda: curves(0.1, 0, crossing=100), {}),  # beside no spread at one step
    ("C09", OPEN, lambda: curves(5, 0, blocks=900), {}),  # seen again at step 1000
    ("C09", OPEN, lambda: curves(5, 0, seeds=2), {}),
    ("C10", YES, lambda: losses(3) + losses(0, both=SCHEDULE), {}),
    ("C10", NO, lambda: losses(0) + losses(3, both=BOTH_ENDS), {}),
    ("C10", NO, lambda: losses(3) + losses(3, both=BOTH_ENDS), {}),
    ("C10", OPEN, lambda: losses(3) + losses(3, both=SCHEDULE), {}),  # the end was not tried
    ("C10", OPEN, lambda: losses(0) + losses(0, both=SCHEDULE), {}),  # nothing to win back
    ("C11", YES, memories(5.0, 8.0, 20.0, first=19.0), {}),
    ("C11", PARTLY, memories(5.0, 8.0, 10.0), {}),
    ("C12", YES, lambda: pair(0) + pair(20, micro_batch_size=8), {}),
    ("C12", NO, lambda: pair(20) + pair(0, micro_batch_size=8), {}),
    ("C13", YES, lambda: pair(0, machine={"compute_capability": "8.0"}), {}),
    ("C13", NO, lambda: pair(30, machine={"compute_capability": "8.9"}), {}),
    ("C13", ELSEWHERE, lambda: pair(30, machine={"compute_capability": "9.0"}), {}),
    ("C14", YES, sweep(1e-2, 1e-3), {}),
    ("C14", YES, sweep(1e-2, 1e-3, "above"), {}),
    ("C14", YES, sweep(1e-2, 1e-3, "no better than frequencies"), {}),
    ("C14", YES, with_warm_up(1e-3, 1e-2), {}),
    ("C14", PARTLY, with_warm_up(1e-3, 1e-3), {}),
    ("C14", PARTLY, sweep(1e-2, 1e-3, at=55), {}),
    ("C14", PARTLY, sweep(1e-2, 1e-3, "above", at=55), {}),
    ("C14", OPEN, sweep(1e-2, 1e-3, seed=0), {}),
    ("C14", NO, sweep(1e-3, 1e-3), {}),
    ("C14", NO, sweep(1e-3, 1e-2, "above"), {}),
    ("C14", OPEN, sweep(1, 1), {}),
    ("C14", OPEN, lambda: pair(learning_rate=1e-2, fp8={"status": "diverged"}), {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "verdict", "records", "figures"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES]
)
def test_a_verdict_follows_its_records(
    name: str, verdict: Verdict, records: Records, figures: dict[str, Any]
) -> None:
    claim = CLAIMS[name]
    changed = dataclasses.replace(claim, published={**claim.published, **figures})
    found = judge_claim(changed, tables(records()))
    assert found.verdict == verdict, found.why
    assert found.why
