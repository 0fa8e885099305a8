"""What a verdict's reason says besides, and which runs it may rest on."""

from __future__ import annotations

from typing import Any

import pytest

from fp8study.analysis.claims.finding import Verdict
from fp8study.analysis.claims.ledger import judge, judge_claim
from fp8study.core.records import RunRecord
from fp8study.report.page import report_of
from tests.analysis.test_claims import (
    CLAIMS,
    ELSEWHERE,
    ENDS,
    OPEN,
    PARTLY,
    YES,
    four_arms,
    skips,
)
from tests.claim_factories import (
    FP8,
    LARGE,
    SMALL,
    Frames,
    curves,
    grid,
    losses,
    measured,
    operators,
    pair,
    run,
    sweep,
    tables,
)


def why(name: str, records: list[RunRecord]) -> str:
    return judge_claim(CLAIMS[name], tables(records)).why


def stale(gap: float, **changes: Any) -> list[RunRecord]:
    return losses(gap, outside=78.0, optimizer_binding="before_conversion", **changes)


def test_an_arm_whose_bf16_learnt_nothing_is_no_evidence() -> None:
    """Losses near 5 against 4 are what a uniform guess would do as well."""
    silent = losses(0, master_dtype="bf16", data={"unigram_loss": 4.0})
    assert judge_claim(CLAIMS["A12"], tables(silent)).verdict is Verdict.UNDECIDED
    broken = stale(50, master_dtype="bf16", data={"unigram_loss": 4.0})
    healthy = losses(0.04, data={"unigram_loss": 8.0})
    found = judge_claim(CLAIMS["A12"], tables(silent + broken + healthy))
    assert found.verdict is Verdict.ARTEFACT
    assert "+0.04 % from BF16 in 1 setting (FP32 master weights)" in found.why
    assert "above (BF16 master weights); with BF16 master weights BF16 itself learnt nothing" in (
        found.why
    )


def test_healthy_arms_of_other_studies_do_not_speak_for_document_as_script() -> None:
    elsewhere = losses(0, study="other")
    assert judge_claim(CLAIMS["A12"], tables(elsewhere)).verdict is Verdict.UNDECIDED
    assert judge_claim(CLAIMS["A12"], tables(elsewhere + stale(50))).verdict is Verdict.UNDECIDED


def test_early_and_late_gaps_stand_beside_the_spread_of_seeds() -> None:
    said = why("C09", curves(0.5, 0.1, crossing=100))
    assert "at most 0.50 % of the loss in the first 200 steps" in said
    assert "0.10 % beside 0.20 % in as many up to step 1,000" in said
    assert "BF16's seeds spread by 0.20 %" in said
    assert "(llama-3.2-1b, 3 seeds); of 0 arms with less new text 0 parted early" in said


def test_shorter_arms_are_told_and_do_not_decide() -> None:
    short = curves(5, 5, num_steps=300)
    for record in short:
        record.config["learning_rate"] = 1e-5
    found = judge_claim(CLAIMS["C09"], tables(curves(0.1, 0) + short))
    assert found.verdict is Verdict.CONTRADICTED
    assert "of 1 arm with less new text 1 parted early (at most 5.00 % beside 0.20 %)" in found.why
    assert judge_claim(CLAIMS["C09"], tables(short)).verdict is Verdict.UNDECIDED


def test_a_schedule_is_told_with_what_it_could_win_and_how_long_bf16_lasted() -> None:
    schedule = {"precision_schedule": ["bf16:10", "fp8_tensorwise"], "lr_warmup_steps": 40}
    plain = losses(0.01, both={"lr_warmup_steps": 40})
    said = why("C10", plain + losses(0.01, config=schedule, both={"lr_warmup_steps": 40})[1::2])
    assert "FP8 throughout itself ends +0.01 % (95 % CI -" in said
    assert "from BF16: no loss is shown that a schedule could win back" in said
    assert "BF16 at the start was 10 of 40 steps of warm-up" in said
    worse = losses(3, both={"lr_warmup_steps": 40})
    said = why("C10", worse + losses(0, config=schedule, both={"lr_warmup_steps": 40})[1::2])
    assert "no loss is shown" not in said


def test_cold_and_warm_caches_are_told_apart_and_never_counts() -> None:
    records = []
    for number, (lead, hits) in enumerate(((20, 0), (20, 2), (-5, 2))):
        both = pair(lead, model=LARGE, rate=10_000, sequence_length=1024 * (1 + number),
                    instruments={"memory": {"num_alloc_retries": 0}})  # fmt: skip
        for record, seconds in zip(both, (10.0, 30.0), strict=True):
            record.results.update(warm_up_seconds=seconds, compile_cache_hits=hits,
                                  compile_cache_misses=2 - hits)  # fmt: skip
        records += both
    said = why("B05", records)
    assert "with a cold compile cache, by 0 of 1 arms (300 steps)" in said
    assert "with a warm or partly warm one, by 1 of 2 arms (300 steps, 1 never)" in said
    assert "724 for tensorwise, 3,842 for rowwise, against compiled BF16" in said


def test_precisions_gpus_and_smaller_models_are_named() -> None:
    fast = {"bf16": 1.0, FP8[0]: 0.8}
    cells = grid(lambda m, s, g, p: 100 * (fast[p] if g == 4 else 1.0) + 0.001 * s)
    for record in cells:
        several = record.config["num_gpus"] > 1
        record.config["fp8_all_gather"] = several and record.config["precision"] != "bf16"
    only_four = [record for record in cells if record.config["num_gpus"] == 4]
    assert "BF16 100 %, FP8 tensorwise 80 to 82 %" in why("A08", cells)
    assert "lengths, on 4 GPUs" in why("A02", only_four)
    assert "doublings, on 1, 2 and 4 GPUs, keep" in why("A04", cells)
    leads = pair(20, model=LARGE) + pair(-30, model=SMALL, num_gpus=2)
    assert (
        "the largest model measured (llama-3.1-8b) gains in 1 of 1 tensorwise cells; smaller "
        "models in 0 of 1, at worst -30.0 % (llama-3.2-1b, batch 1, 2 GPUs)"
    ) in why("C01", leads)


def test_which_of_two_tries_failed_is_said() -> None:
    loads = {"cpu_ram_efficient_loading": True}
    both = [
        run(FP8[0], config=loads),
        run(FP8[0], fp8_all_gather=True, status="failed", status_detail="no", config=loads),
    ]
    said = why("A25", both)
    assert "in FP8 1 of 1, of those that gather them in BF16 0 of 1" in said


def test_gemms_that_sum_fast_are_counted_among_those_in_fp8() -> None:
    assert "2 of 7 FP8 GEMMs a step may sum" in why("A29", measured(fp8=operators(num_fast=2)))


def test_a_run_that_never_learnt_was_not_lost_early() -> None:
    how = "no better than frequencies"
    assert "2 of 2 of its lost runs were lost within 50 steps, 0 never" in why(
        "C14", sweep(1, 1e-2, how)()
    )
    found = judge_claim(CLAIMS["C14"], tables(sweep(1, 1e-2, how, at=0)()))
    assert "0 of 2 of its lost runs were lost within 50 steps, 2 never learnt" in found.why
    assert found.verdict is Verdict.PARTLY


def test_of_classes_that_decide_nothing_the_gpus_are_printed() -> None:
    """A model of slower links needs profiles, which the CPU's runs have not."""
    step = {"by_kind_ms": {"gemm_fp8": 20.0, "communication": 30.0}}
    on_cpu = Frames(pair(), "a-cpu").stored
    for each in on_cpu:
        each.record.machine.update(device="cpu", gpu_name=None)
    found = {
        each.claim.id: each.finding.why
        for each in judge(report_of([*on_cpu, *Frames(measured(step=step), "b-gpu").stored]))
    }
    alone = judge_claim(CLAIMS["A26"], tables(measured(step=step))).why
    assert "would keep" in alone
    assert found["A26"] == alone


@pytest.mark.parametrize(
    ("blocks", "end"),
    [(200, "seen up to 0.3 times"), (30, "after the first time 2 of 2 were equivalent")],
)
def test_only_of_text_seen_again_a_first_time_is_told(blocks: int, end: str) -> None:
    curve = {"step": [*range(1, 61)], "loss": [5.0] * 60}
    data = {"epochs": 60 / blocks, "num_train_tokens": blocks * 4096}
    both = [losses(0, name, curve=curve, data=data, num_gpus=1, num_steps=60, sequence_length=4096,
                   both={"micro_batch_size": 1, "gradient_accumulation_steps": 1})
            for name in FP8[:2]]  # fmt: skip
    found = judge_claim(CLAIMS["B01"], tables(both[0] + both[1][1::2]))
    assert end in found.why, found.why
    assert ("first time" in found.why) == (blocks < 60)


def test_repeated_text_does_not_drown_what_another_study_says_of_layers() -> None:
    loud = losses(0, wobble=0.15, study="repeated", config=ENDS)
    loud += losses(0, study="repeated", config={"skip": []})[1::2]
    assert judge_claim(CLAIMS["A24"], tables(loud)).verdict == OPEN
    assert judge_claim(CLAIMS["A24"], tables(loud + skips(0, 3)())).verdict == YES


def test_two_gpus_without_nvlink_are_told_though_four_are_claimed() -> None:
    slow = {"gpu_link": "SHM"}
    records = pair(rate=100, machine=slow) + pair(rate=60, num_gpus=2, machine=slow)
    found = judge_claim(CLAIMS["A26"], tables(records))
    assert found.verdict == ELSEWHERE
    assert "without NVLink; two keep 60 % of one's tokens/s per GPU" in found.why


def test_links_that_a_study_leaves_unused_stand_in_for_none() -> None:
    unused = pair(rate=40, num_gpus=2, config={"gpu_links": "unused"})
    alone = pair(rate=100, machine={"gpu_link": "NV18"})
    beside = pair(rate=90, num_gpus=2, machine={"gpu_link": "NV18"})
    found = judge_claim(CLAIMS["A26"], tables(alone + beside + unused))
    assert found.verdict == ELSEWHERE
    assert "without NVLink; two keep 40 % of one's tokens/s per GPU" in found.why
    assert judge_claim(CLAIMS["A07"], tables(alone + unused)).verdict == OPEN


def test_numbers_of_gpus_are_compared_within_a_session() -> None:
    """Hosts differ, and days of one: what changed between them is no matter of more GPUs."""

    def at(day: int, rate: float, num_gpus: int) -> RunRecord:
        when = f"2000-01-{day:02}T00:00:00+00:00"
        return run(rate=rate, num_gpus=num_gpus, started_at=when, ended_at=when)

    alone, fell = at(1, 100, 1), at(1, 90, 2)
    apart = judge_claim(CLAIMS["A07"], tables([alone, fell, at(9, 200, 4)]))
    assert apart.verdict == YES
    said = "in 1 of 1 steps to more GPUs: from 1 to 2 in 1 of 1; 1 step between sessions left out"
    assert said in apart.why
    together = judge_claim(CLAIMS["A07"], tables([alone, fell, at(1, 200, 4)]))
    assert together.verdict == PARTLY and "between sessions" not in together.why
    for claim in ("A07", "A08"):
        assert judge_claim(CLAIMS[claim], tables([alone, at(9, 200, 4)])).verdict == OPEN
    assert judge_claim(CLAIMS["A08"], tables([alone, at(1, 200, 4)])).verdict != OPEN


def test_of_two_caches_the_arm_of_the_most_runs_speaks_for_document_bs() -> None:
    once = [run(name, LARGE, 200 - n, config={"compile_cache": "fresh"}, num_gpus=1)
            for n, name in enumerate(("bf16", FP8[1], FP8[0]))]  # fmt: skip
    thrice = []
    for repeat in range(3):
        thrice += four_arms(108, 92, 87, 81)()[:4]
        for record in thrice[-4:]:
            record.config["repeat"] = repeat
    found = judge_claim(CLAIMS["B02"], tables(once + thrice))
    assert found.verdict == YES, found.why


@pytest.mark.parametrize(("rate", "verdict"), [(119, YES), (110, PARTLY), (None, PARTLY)])
def test_what_layers_in_bf16_cost_may_be_timed_by_another_study(
    rate: float | None, verdict: Verdict
) -> None:
    shared = skips(0, 3)()
    for record in shared:
        record.results["tokens_per_second_per_gpu"] = None
    timed = [*pair(20, study="timed", fp8={"config": {"skip": []}}),
             *([run(FP8[0], rate=rate, study="timed", config=ENDS)] if rate else [])]  # fmt: skip
    found = judge_claim(CLAIMS["A24"], tables(shared + timed))
    assert found.verdict == verdict
    assert (f"{120 - rate}.0 points" if rate else "not measured") in found.why
