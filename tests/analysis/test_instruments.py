"""From records with instruments to tables and sentences; the numbers are planted."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest

from fp8study.analysis import instruments as tables
from fp8study.analysis.instruments import break_even_table, cache_state
from fp8study.analysis.runs.frames import runs_frame
from fp8study.core.records import load_runs
from fp8study.report import instrument_plots as plots
from fp8study.report import instrument_sentences as sentences
from fp8study.report import rows
from tests.checkout import committed_runs
from tests.factories import make_record, store
from tests.instrument_factories import audit_of, instruments_of, make_instruments, store_measured
from tests.study_factories import make_quick


def frame(results: Path) -> pd.DataFrame:
    stored = load_runs(results)
    return tables.instruments_frame(stored, runs_frame(stored))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    results = tmp_path_factory.mktemp("results")
    make_instruments(results)
    make_quick(results)  # older records, without instruments
    return frame(results)


def row(table: pd.DataFrame, precision: str, num_gpus: int = 4) -> pd.Series:
    found = table[(table["precision"] == precision) & (table["num_gpus"] == num_gpus)]
    assert len(found) == 1
    return found.iloc[0]


def test_only_runs_with_instruments_are_in_the_frame(measured: pd.DataFrame) -> None:
    assert len(measured) == 6
    assert set(measured["study"]) == {"instruments"}
    assert measured["memory.rest_gib"].tolist() == [3.0] * 6


def test_waiting_is_the_timed_step_less_the_computing_of_the_profiled_one(
    measured: pd.DataFrame,
) -> None:
    table = tables.kernels_table(measured)
    # The profiled step computed for 110 - 5 - 15 = 90 ms.
    assert row(table, "bf16")["not_computing_ms"] == pytest.approx(10)
    assert row(table, "fp8_tensorwise")["not_computing_ms"] == 0  # kernels overlapped
    assert row(table, "fp8_rowwise")["not_computing_ms"] == pytest.approx(30)
    assert math.isnan(row(table, "bf16")["gemm_fp8"])


def test_the_fp8_all_gather_is_compared_with_bf16s(measured: pd.DataFrame) -> None:
    table = tables.communication_table(measured)
    assert set(table["num_gpus"]) == {4}
    tensorwise = row(table, "fp8_tensorwise")
    assert tensorwise["all_gather_gib"] == 6
    assert tensorwise["all_gather_change_pct"] == pytest.approx(-40)
    assert tensorwise["all_gather_dtypes"] == "uint8 4, BF16 2"
    assert row(table, "fp8_rowwise")["all_gather_change_pct"] == 0
    assert row(table, "bf16")["reduce_scatter_dtypes"] == "FP32"


def test_bytes_are_parted_where_an_arm_has_several_nodes(tmp_path: Path) -> None:
    store_measured(tmp_path, "bf16", 4)
    assert "between_gib" not in tables.communication_table(frame(tmp_path))
    step = instruments_of("bf16", 4)["step"]
    gathered, reduced = step["communication"]
    step["communication"] = [
        gathered | {"reach": "inside"}, reduced | {"reach": "inside"},
        {"collective": "all_reduce", "dtype": "float32", "num": 8, "gib": 5.0, "reach": "between"},
    ]  # fmt: skip
    on_two = {"instruments": instruments_of("bf16", 4) | {"step": step}, "config": {"num_nodes": 2}}
    store_measured(tmp_path, "bf16", 4, run_id="nodes", **on_two)
    table = tables.communication_table(frame(tmp_path)).set_index("setting")
    known = table.dropna(subset="between_gib")
    assert known[["inside_gib", "between_gib"]].to_numpy().tolist() == [[30.0, 5.0]]
    assert len(table) == 2


def test_energy_is_compared_only_where_no_allocator_was_in_distress(tmp_path: Path) -> None:
    make_instruments(tmp_path)
    table = tables.energy_table(frame(tmp_path))
    assert row(table, "fp8_tensorwise")["change_pct"] == pytest.approx(-20)
    assert row(table, "fp8_tensorwise")["power_cap_pct"] == 0
    told = sentences.energy(table)
    assert told.startswith("In the study") and ", on the plain path, FP8 takes less energy" in told
    assert "less energy per token than BF16 in 4 and more in 0 of 4" in told
    store_measured(tmp_path, "fp8_tensorwise", 2, run_id="stale", outside_pct=78.4)
    store_measured(tmp_path, "bf16", 2)
    stale = row(tables.energy_table(frame(tmp_path)), "fp8_tensorwise", 2)
    assert stale["stale"]
    assert math.isnan(stale["change_pct"])  # it does less work
    strained = tmp_path / "strained"
    store_measured(strained, "bf16", results={"num_device_allocs": 3})
    store_measured(strained, "fp8_tensorwise")
    assert math.isnan(row(tables.energy_table(frame(strained)), "fp8_tensorwise", 1)["change_pct"])
    told = sentences.left_out(frame(strained))
    assert told.endswith("left out of times and energy here: llama-3.2-1b on 1 GPU (1 run).")
    assert sentences.left_out(frame(strained)[:0]) == ""


def test_energy_is_compared_seed_by_seed_and_a_repeat_is_no_seed(tmp_path: Path) -> None:
    """As in the speeds beside it: a ratio of two arms' medians would be 0.8 here, not 0.5."""
    joules = {
        "bf16": {(0, 0): 10.0, (1, 0): 20.0, (2, 0): 40.0, (2, 1): 60.0, (2, 2): 80.0},
        "fp8_tensorwise": {(0, 0): 5.0, (1, 0): 22.0, (2, 0): 16.0},
    }
    for precision, taken in joules.items():
        for (seed, repeat), joule in taken.items():
            seen = instruments_of(precision, energy={"joule_per_token": joule})
            store_measured(tmp_path, precision, run_id=f"{precision}-{seed}-{repeat}", seed=seed,
                           config={"repeat": repeat}, instruments=seen)  # fmt: skip
    table = tables.energy_table(frame(tmp_path))
    bf16, fp8 = (row(table, precision, 1) for precision in joules)
    assert (bf16["joule_per_token"], bf16["num_runs"]) == (20.0, 5)
    assert fp8["change_pct"] == pytest.approx(-50)


def test_a_run_that_never_met_the_power_cap_counts_as_none(tmp_path: Path) -> None:
    for seed, caps in enumerate(({}, {}, {"power_cap": 30.0})):
        seen = instruments_of("bf16", energy={"throttled_pct": caps})
        store_measured(tmp_path, "bf16", run_id=f"bf16-{seed}", seed=seed, instruments=seen)
    assert row(tables.energy_table(frame(tmp_path)), "bf16", 1)["power_cap_pct"] == 0


def test_break_even_is_the_extra_warm_up_over_the_gain_of_a_step(measured: pd.DataFrame) -> None:
    table = break_even_table(measured)
    # Six seconds more at the start, 20 ms less a step.
    assert row(table, "fp8_tensorwise")["break_even_steps"] == pytest.approx(300)
    assert row(table, "fp8_tensorwise")["cache"] == "cold"
    assert row(table, "fp8_rowwise")["break_even_steps"] == math.inf


def test_break_even_pairs_equal_states_of_the_cache_and_leaves_distress_out(
    tmp_path: Path,
) -> None:
    store_measured(tmp_path, "bf16", cache=(2, 0), warm_up_s=10.0)
    store_measured(tmp_path, "fp8_tensorwise", cache=(0, 4), step_ms=80.0)
    assert break_even_table(frame(tmp_path)).empty
    store_measured(
        tmp_path, "fp8_tensorwise", cache=(4, 0), step_ms=80.0, warm_up_s=12.0, run_id="warm",
        seed=1,
    )  # fmt: skip
    warm = break_even_table(frame(tmp_path))
    assert warm["break_even_steps"].tolist() == [pytest.approx(100)]
    store_measured(tmp_path, "bf16", 4, results={"num_alloc_retries": 1})
    store_measured(tmp_path, "fp8_tensorwise", 4)
    assert set(break_even_table(frame(tmp_path))["num_gpus"]) == {1}


def test_fp8_has_its_partner_where_a_switch_of_fp8_alone_names_its_setting(tmp_path: Path) -> None:
    """Another BF16 arm of the same setting in words is no partner."""
    other = {"learning_rate": 1e-5, "num_steps": 61, "strategy": "none"}
    store_measured(tmp_path, "bf16", warm_up_s=99.0, run_id="other", **other)
    store_measured(tmp_path, "bf16", warm_up_s=20.0, strategy="none")
    store_measured(tmp_path, "fp8_tensorwise", step_ms=80.0, warm_up_s=26.0, seed=1,
                   strategy="none", config={"weight_cast": "each_update"})  # fmt: skip
    table = break_even_table(frame(tmp_path))
    assert table["setting"].str.contains("cast each update").all()
    assert table["warm_up_seconds_bf16"].tolist() == [20.0]
    assert table["break_even_steps"].tolist() == [pytest.approx(300)]


@pytest.mark.parametrize(
    ("hits", "misses", "state"),
    [(0, 2, "cold"), (2, 0, "warm"), (1, 1, "partly warm"), (0, 0, "not compiled"),
     (math.nan, math.nan, "not compiled")],
)  # fmt: skip
def test_state_of_the_compile_cache(hits: float, misses: float, state: str) -> None:
    assert cache_state(hits, misses) == state


def test_ceilings_are_medians_with_their_spread(measured: pd.DataFrame) -> None:
    table = tables.ceilings_table(measured)
    assert table[["num_runs", "bf16_tflops", "spread_pct"]].values.tolist() == [[6, 750, 0]]


def test_gemms_inside_a_step_are_held_against_their_peak(tmp_path: Path) -> None:
    slow = {"gemm": [{"dtypes": "x", "num": 1, "tflop": 15.0, "time_ms": 20.0}]}  # 750 TFLOP/s
    store_measured(tmp_path, "bf16", instruments=instruments_of("bf16", step=slow))
    assert rows.utilisation(frame(tmp_path))["gemm_pct"].tolist() == [pytest.approx(100)]
    fast = {"gemm": [{"dtypes": "x", "num": 1, "tflop": 33.0, "time_ms": 20.0}]}  # of 1100
    measured = instruments_of("fp8_tensorwise", step=fast)
    store_measured(tmp_path, "fp8_tensorwise", instruments=measured)
    both = rows.utilisation(frame(tmp_path))  # the faster GEMMs are the peak
    assert both["gemm_pct"].tolist() == [pytest.approx(100)] * 2
    assert both["achievable_tflops"].tolist() == [pytest.approx(750), pytest.approx(1650)]


def test_proof_counts_runs_and_calls_a_silent_one_by_name(tmp_path: Path) -> None:
    make_instruments(tmp_path)
    text = sentences.proof(frame(tmp_path))
    assert "4 of 4 profiled FP8 runs did the expected share of their GEMMs in FP8." in text
    assert "Of 2 other profiled runs, none did any." in text
    found = sentences.audits(frame(tmp_path))
    assert found == "Of the runs that were timed or profiled 6 were audited: no problem was found."
    step = {"fp8_gemm_flops_pct": 0.0, "fp8_gemm_time_pct": 0.0}
    store_measured(
        tmp_path, "fp8_rowwise", 2, run_id="silent", audit=audit_of("fp8_rowwise", silent=True),
        instruments=instruments_of("fp8_rowwise", 2, step=step),
    )  # fmt: skip
    assert "**1 FP8 run did no GEMM in FP8.**" in sentences.proof(frame(tmp_path))
    assert "1 failed, 1 of them not on purpose: `silent`" in sentences.audits(frame(tmp_path))


def test_emulated_fp8_on_a_gpu_is_no_silent_failure(tmp_path: Path) -> None:
    """A GPU without FP8 units: no FP8 product is to be seen, and the audit expects none."""
    audit = audit_of("fp8_tensorwise", silent=True)
    del audit["fp8_gemm_flops_pct"], audit["fp8_gemm_flops_pct_expected"]
    step = {"fp8_gemm_flops_pct": 0.0, "fp8_gemm_time_pct": 0.0}
    emulated = instruments_of("fp8_tensorwise", step=step)
    store_measured(tmp_path, "fp8_tensorwise", audit=audit, instruments=emulated)
    text = sentences.proof(frame(tmp_path))
    assert "1 profiled FP8 run cannot be judged: FP8 was emulated" in text
    assert "did no GEMM" not in text
    store_measured(tmp_path, "fp8_rowwise")
    assert "1 of 1 profiled FP8 run did the expected share" in sentences.proof(frame(tmp_path))


def test_the_split_at_the_peak_does_not_suppose_that_gradients_are_there(
    measured: pd.DataFrame,
) -> None:
    """The peak may come at the loss, before there is any gradient; 23 - 5 - 10 is known."""
    table = tables.memory_split_table(measured)
    assert table["working_gib"].tolist() == [8.0] * 6
    stacked = set(plots._MEMORY)
    assert table.loc[0, list(stacked)].sum() == table.loc[0, "steady_allocated_gib"]
    assert "gradients_gib" not in stacked
    assert "rest_gib" not in stacked


def test_working_memory_of_sharded_and_whole_models_agrees_in_the_reference_records() -> None:
    """One sequence has the same activations on one GPU and on four."""
    stored = [run for run in committed_runs() if run.machine_label == "h200x4"]
    every = tables.instruments_frame(stored, runs_frame(stored))
    table = tables.memory_split_table(tables.of_the_instruments(every))
    small = table[(table["model"] == "llama-3.2-1b") & (table["precision"] == "bf16")]
    one, four = (small.loc[small["num_gpus"] == n, "working_gib"].item() for n in (1, 4))
    assert one == pytest.approx(four, rel=0.001)


def test_a_power_cap_that_nobody_sampled_is_missing_not_absent(tmp_path: Path) -> None:
    measured = instruments_of("bf16")
    for name in ("clock_sm_mhz_median", "clock_sm_mhz_min", "throttled_pct"):
        del measured["energy"][name]
    store_measured(tmp_path, "bf16", instruments=measured)
    assert math.isnan(row(tables.energy_table(frame(tmp_path)), "bf16", 1)["power_cap_pct"])


def test_the_table_of_a_steps_time_leaves_no_kind_out() -> None:
    beside = {"communication"}  # runs at the same time as the others
    assert set(tables.KINDS) - beside == set(plots.TIME) - {"not_computing_ms"}


def test_a_wild_block_does_not_move_the_cost_of_measuring(measured: pd.DataFrame) -> None:
    (row,) = rows.overhead(measured).to_dict("records")
    assert row["num_pairs"] == 48  # one of the eight in each run was half as long again
    assert row["median_pct"] == pytest.approx(0.1)
    assert "change the time of a step by +0.10 %" in sentences.overhead(rows.overhead(measured))


def test_nothing_measured_says_what_to_run(tmp_path: Path) -> None:
    empty = frame(tmp_path)
    for said in (
        sentences.proof(empty),
        sentences.audits(empty),
        sentences.energy(tables.energy_table(empty)),
        sentences.overhead(rows.overhead(empty)),
    ):
        assert "make reproduce STUDY=instruments" in said
    for make in (
        tables.utilisation_table,
        tables.ceilings_table,
        tables.kernels_table,
        tables.memory_split_table,
        tables.energy_table,
        tables.communication_table,
        break_even_table,
        rows.utilisation,
        rows.overhead,
    ):
        assert make(empty).empty


def test_a_run_that_knows_its_start_up_only_has_no_row(tmp_path: Path) -> None:
    record = make_record(instruments={"startup": {"launch_seconds": 1.0}})
    store(tmp_path, "local", record)
    assert frame(tmp_path).empty
