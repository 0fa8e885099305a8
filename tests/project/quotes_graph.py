"""What the README and docs/results.md may say of steps launched as one CUDA graph."""

from fp8study.analysis.leads import leads_table
from fp8study.analysis.runs.frames import runs_frame
from fp8study.analysis.runs.naming import GRAPH
from fp8study.analysis.runs.pairing import shorten_arms
from tests.project.quotes import ends, one, per_cent, stored

SMALL, LARGE = "llama-3.2-1b-untied", "llama-3.1-8b"


def graph_texts() -> list[str]:
    """What graph-form and graph-reach measured, by block."""
    runs = shorten_arms(runs_frame(stored("h200x4")))
    leads = leads_table(runs)
    runs = runs[runs["study"].str.startswith("graph-")]
    is_graph, in_fp8 = runs["setting"].str.contains(GRAPH), runs["precision"] != "bf16"
    runs = runs.assign(is_graph=is_graph, in_fp8=in_fp8)
    own = leads[leads["setting"].str.contains(GRAPH)]
    two, large = one(own, model=SMALL, num_gpus=2), one(own, model=LARGE, num_gpus=2)
    assert (two["num_pairs"], two["num_sessions"], large["num_pairs"]) == (3, 2, 1)
    less = [f"{-two[f'{what}_change_pct']:.1f} %" for what in ("memory", "energy")]

    def gained(model: str, num_gpus: int, batch: int, in_fp8: bool) -> str:
        place = ["model", "num_gpus", "micro_batch_size", "in_fp8"]
        there = runs[(runs[place] == [model, num_gpus, batch, in_fp8]).all(axis=1)]
        rates = there.set_index(["study", "repeat", "is_graph"])["tokens_per_second_per_gpu"]
        by_block = rates.unstack().dropna()
        *first, last = (per_cent(100 * (now / then - 1)) for then, now in by_block.to_numpy())
        return " and ".join(filter(None, [", ".join(first), last]))

    fp8, bf16 = (gained(SMALL, 2, 1, in_fp8) for in_fp8 in (True, False))
    fp8_alone, bf16_alone = (gained(SMALL, 1, 1, in_fp8) for in_fp8 in (True, False))
    fp8_more, bf16_more = (gained(SMALL, 1, 2, in_fp8) for in_fp8 in (True, False))
    span = f"{per_cent(two['lead_pct'])} (95 % CI {ends(two)})"
    return [
        f"a 1B's tokens/s at batch 1 on two H200, clipped, change by {fp8} in FP8, by {bf16} in "
        "BF16, block by block",
        f"FP8 then leads by {span[:-1]}; three pairs of two sessions), with {less[0]} less memory "
        f"and {less[1]} less energy",
        f"An 8B's FP8 there changes by {gained(LARGE, 2, 1, True)} in one block and leads by "
        f"{per_cent(large['lead_pct'])} (one pair)",
        f"On one H200 the 1B changes by {fp8_alone} in FP8, by {bf16_alone} in BF16 at batch 1, by "
        f"{fp8_more} and {bf16_more} at batch 2",
        f"as the tuned path does there now, FP8 leads by {span}",
    ]
