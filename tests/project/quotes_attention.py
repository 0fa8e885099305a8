"""What docs/results.md may say of FlashAttention 4, from the records."""

import pandas as pd

from fp8study.analysis.runs.frames import runs_frame
from fp8study.analysis.runs.pairing import shorten_arms
from fp8study.analysis.speed import switch_table, throughput_table
from tests.project.quotes import one, per_cent, stored


def attention_texts() -> list[str]:
    """What the study attention-form measured."""
    runs = shorten_arms(runs_frame(stored("h200x4")))
    table = switch_table(runs)  # whose intervals are by the scatter of all switches there
    runs, table = (each[each["study"] == "attention-form"] for each in (runs, table))
    assert set(table["num_blocks"]) == {2} and set(table["num_sessions"]) == {1}
    assert table["memory_change_pct"].abs().max() < 0.001
    batch = table["setting_plain"].str.extract(r"batch (\d+)", expand=False).astype(int)
    table = table.assign(micro_batch_size=batch)
    small = table[table["micro_batch_size"].isin([1, 8])]
    (bf16, fp8), (large_bf16, large_fp8) = (
        [_gain(one(small, model=model, precision=name)) for name in ("bf16", "fp8_tensorwise")]
        for model in ("llama-3.2-1b-untied", "llama-3.1-8b")
    )
    graph = one(table, micro_batch_size=2)
    return [
        f"a 1B's tokens/s rise by {bf16} in BF16 and {fp8} in FP8 at batch 8, by {_gain(graph)} in "
        f"FP8 at batch 2, where its step is one CUDA graph; an 8B's by {large_bf16} and "
        f"{large_fp8} at batch 1",
        "FP8 then leads by {} and {} instead of {} and {}".format(*_leads(runs)),
    ]


def _gain(row: pd.Series) -> str:
    return f"{per_cent(row['gain_pct'])} ({row['gain_low_95']:+.1f} to {row['gain_high_95']:+.1f})"


def _leads(runs: pd.DataFrame) -> list[str]:
    """FP8's leads, of the 1B and the 8B with the kernel, then without, by medians."""
    table = throughput_table(runs).dropna(subset="speedup_pct")
    has_flash = table["setting"].str.contains("flash4")
    return [
        per_cent(one(table[has_flash == is_flash], model=model)["speedup_pct"])
        for is_flash in (True, False)
        for model in ("llama-3.2-1b-untied", "llama-3.1-8b")
    ]
