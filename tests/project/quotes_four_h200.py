"""What the README and docs/results.md may say of scaling to four H200s, and of a 14B there."""

import pandas as pd

from fp8study.analysis.laws.account import lead_table
from fp8study.analysis.laws.cells import cells_of, read_runs
from fp8study.analysis.leads import leads_table
from fp8study.analysis.losses import loss_gap_table
from fp8study.analysis.runs.frames import runs_frame
from fp8study.analysis.runs.pairing import shorten_arms
from tests.checkout import ROOT
from tests.project.quotes import one, per_cent, stored

RATES = {"BF16": "tokens_per_second_per_gpu_bf16", "FP8": "tokens_per_second_per_gpu"}
LARGE, SMALL = "llama-3.1-8b", "llama-3.2-1b"


def four_h200_texts() -> list[str]:
    """What is said of the study scaling, and of the default study on four GPUs."""
    runs = shorten_arms(runs_frame(stored("h200x4")))
    leads = leads_table(runs)
    scaling = leads[leads["studies"] == "scaling"]
    law = lead_table(cells_of(read_runs(ROOT / "results")))
    said = law[law["run_ids"].str.contains("h200x4/scaling/") & law["model"].eq(LARGE)]
    at_one = said[said["tokens"].eq(4096)].set_index("num_gpus")["predicted_pct"].map(per_cent)
    assert (len(scaling), set(scaling["num_pairs"]), set(scaling["max_grad_norm"])) == (
        11,
        {1},
        {1},
    )
    forecast = f"the law, frozen before, had said {at_one[2]} and {at_one[4]}"
    return [*_scaling_texts(scaling), *_machine_texts(leads), *_loss_texts(runs), forecast]


def _kept(rows: pd.DataFrame, precision: str, fewest: int) -> list[str]:
    """What each GPU keeps on 2 and 4 GPUs, or on 4, of what it makes on the fewest, %."""
    rates = rows.set_index("num_gpus")[RATES[precision]]
    return [f"{100 * rates[n] / rates[fewest]:.1f} %" for n in (2, 4) if n > fewest]


def _scaling_texts(scaling: pd.DataFrame) -> list[str]:
    def of(model: str, batch: int) -> tuple[pd.DataFrame, list[str]]:
        rows = scaling[(scaling["model"] == model) & (scaling["micro_batch_size"] == batch)]
        rows = rows.sort_values("num_gpus")
        return rows, [per_cent(lead) for lead in rows["lead_pct"]]

    (wide, wide_leads), (alone, leads) = of(LARGE, 4), of(LARGE, 1)
    (small, small_leads), (late, late_leads) = of(SMALL, 4), of(SMALL, 1)
    assert [list(rows["num_gpus"]) for rows in (wide, alone)] == [[2, 4], [1, 2, 4]]
    kept = {name: _kept(wide, name, 2)[0] for name in RATES}
    assert kept["BF16"] == kept["FP8"]
    (bf16, fp8), (bf16_late, fp8_late) = (
        [" and ".join(_kept(rows, name, 1)) for name in RATES] for rows in (alone, late)
    )
    to_four = [_kept(small, name, 1)[1] for name in RATES]
    return [
        f"makes {kept['BF16']} of what one of two makes of an 8B, in both precisions, and "
        f"{to_four[0]} (BF16) and {to_four[1]} (FP8) of what one alone makes of a 1B",
        f"by {' and '.join(wide_leads)} (8B, on 2 and 4 GPUs",
        f"{', '.join(small_leads[:2])} and {small_leads[2]} (1B, on 1, 2 and 4)",
        f"an 8B keeps {bf16} on 2 and 4 GPUs in BF16, {fp8} in FP8",
        f"leads by {', '.join(leads[:2])} and {leads[2]}",
        f"A 1B keeps {bf16_late} in BF16, {fp8_late} in FP8",
        f"which is at {', '.join(late_leads[:2])} and {late_leads[2]}",
        f"on 4 at batch 1 by {leads[2]}",
    ]


def _machine_texts(leads: pd.DataFrame) -> list[str]:
    own = leads[leads["studies"] == "machine"]
    late = one(own, model=SMALL, num_gpus=4)
    four = own[own["model"] == "qwen3-14b"]
    fp8, rowwise = (one(four, precision=name) for name in ("fp8_tensorwise", "fp8_rowwise"))
    rates = [f"{fp8[RATES[name]]:,.0f}" for name in ("FP8", "BF16")]
    memory = fp8["memory_peak_gib"], fp8["memory_peak_gib_bf16"]
    return [
        f"({per_cent(late['lead_pct'])} on 4 with BF16 all-gather, unclipped)",
        f"{per_cent(fp8['lead_pct'])} at batch 2 ({rates[0]} against {rates[1]} tokens/s a GPU; "
        f"rowwise {per_cent(rowwise['lead_pct'])}), at {memory[0]:.1f} GiB instead of "
        f"{memory[1]:.1f}",
        f"a Qwen3-14B, unclipped, on 4 at batch 2 by {per_cent(fp8['lead_pct'])}",
    ]


def _loss_texts(runs: pd.DataFrame) -> list[str]:
    own = runs[runs["study"] == "machine"]
    gaps = [one(loss_gap_table(own, loss=name), model=SMALL)
            for name in ("loss_last20_mean", "validation_loss")]  # fmt: skip
    assert {gap["num_pairs"] for gap in gaps} == {2}
    train, held_out = (per_cent(gap["gap_pct"], 2) for gap in gaps)
    return [f"ends at {train} from BF16 at batch 21 on one GPU, {held_out} on held-out text"]
