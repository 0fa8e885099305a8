"""What the README and docs/results.md may say of document B's arms, from the records."""

import math

from fp8study.analysis.instruments import break_even_table
from fp8study.analysis.runs.frames import runs_frame
from fp8study.analysis.runs.naming import COLD_CACHE
from fp8study.analysis.runs.pairing import shorten_arms
from fp8study.analysis.speed import throughput_table
from tests.project.quotes import one, per_cent, stored

ARMS = ("fp8_tensorwise", "fp8_rowwise")


def document_b_texts() -> list[str]:
    """Give the order of its arms by tokens/s, and when a longer compilation is paid back."""
    runs = shorten_arms(runs_frame([run for run in stored() if run.record.study == "document-b"]))
    speed = throughput_table(runs)
    speed = speed[~speed["setting"].str.contains(COLD_CACHE)]
    assert set(speed["num_runs"]) == {3}
    is_eager = speed["setting"].str.contains("eager")
    compiled, eager = (part.set_index("precision") for part in (speed[~is_eager], speed[is_eager]))
    rates = [part.loc["bf16", "tokens_per_second_per_gpu"] for part in (eager, compiled)]
    leads = [[per_cent(part.loc[arm, "speedup_pct"]) for arm in ARMS] for part in (compiled, eager)]
    paid = break_even_table(runs).query("cache != 'not compiled'")
    tensorwise, rowwise = (paid[paid["precision"] == arm] for arm in ARMS)
    assert (rowwise["break_even_steps"] == math.inf).all()
    cold = tensorwise[tensorwise["cache"] == "cold"].sort_values("break_even_steps")
    warm = one(tensorwise, cache="warm")
    assert (len(tensorwise), cold["num_runs"].sum(), warm["num_runs"]) == (3, 3, 1)
    waits = [f"{cold[f'warm_up_seconds{of}'].min():.0f} to {cold[f'warm_up_seconds{of}'].max():.0f}"
             for of in ("", "_bf16")]  # fmt: skip
    assert set(cold["num_runs"]) == {1, 2}
    steps = [f"{cold['break_even_steps'].min():.0f}", f"{cold['break_even_steps'].max():.0f}"]
    return [
        f"Tensorwise, {leads[0][0]} over compiled BF16; then that, then rowwise ({leads[0][1]}), "
        f"then eager BF16 ({per_cent(100 * (rates[0] / rates[1] - 1))}). Eager, FP8 loses: "
        f"tensorwise {leads[1][0]}, rowwise {leads[1][1]}",
        f"FP8 waits {waits[0]} s for its first step, BF16 {waits[1]} (one run, and the median of "
        f"two): won back after {steps[0]} and {steps[1]} steps, with a warm one after "
        f"{warm['break_even_steps']:.0f}",
    ]
