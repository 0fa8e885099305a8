"""What the README and docs/results.md may say of steps launched as one CUDA graph."""

from typing import Any

import pandas as pd

from fp8study.analysis.runs.frames import runs_frame
from fp8study.analysis.runs.naming import FP8_HEAD, GRAPH, SHARED_POOL
from tests.checkout import committed_runs
from tests.project.quotes import ends, leads_of, one, per_cent, runs_of, stored

SMALL, MIDDLE, LARGE = "llama-3.2-1b-untied", "llama-3.2-3b", "llama-3.1-8b"
TIED = "llama-3.2-1b"
PLACE = ["model", "num_gpus", "micro_batch_size"]
#: The steps of graph-narrow: model and batch.
NARROW = [(SMALL, 1), (SMALL, 2), (MIDDLE, 1), (LARGE, 1), (SMALL, 8)]


def graph_texts() -> list[str]:
    """Rows of what steps gain as a graph, block by block: on two H200s, then on one."""
    runs, leads = _graphs("h200x4")
    runs = runs[runs["study"] != "graph-narrow"]
    graphs = leads[leads["is_graph"] & leads["num_gpus"].eq(2)]
    two = one(graphs, model=SMALL, micro_batch_size=1)
    assert (two["num_pairs"], two["num_sessions"]) == (5, 4)
    gains = " | ".join(_gains(runs, SMALL, 2, 1))
    return [
        f"1B, batch 1, two H200 | {gains} | {per_cent(two['lead_pct'])} ({ends(two)}) |",
        *_narrow_texts(),
    ]


def _narrow_texts() -> list[str]:
    """What graph-narrow measured on one GPU of two machines, by block."""
    both = [_graphs(machine) for machine in ("h200x2", "h200x4")]
    runs = pd.concat(runs for runs, _ in both)
    runs = runs[runs["study"] == "graph-narrow"]
    alone = both[0][1][lambda leads: leads["is_graph"] & leads["num_gpus"].eq(1)]
    small = one(alone, model=SMALL, micro_batch_size=1)
    assert small["num_pairs"] == 2
    leads = [_leads(runs, *place, is_graph=True) for place in NARROW]
    leads[0] = f"{per_cent(small['lead_pct'])} ({ends(small)})"
    names = {SMALL: "1B", MIDDLE: "3B", LARGE: "8B"}
    return [
        f"| {names[model]}, batch {batch}, one H200 | {gain} | {plain} | {lead} |"
        for (model, batch), lead in zip(NARROW, leads, strict=True)
        for gain, plain in [_gains(runs, model, 1, batch)]
    ]


def tied_texts() -> list[str]:
    """What a loss head in FP8 that is the embedding gave such steps, in tied-graph."""
    runs, leads = (
        runs_of("h200x4"),
        leads_of("h200x4"),
    )  # an interval rests on what all runs of a machine scatter by
    leads = leads[leads["run_ids"].str.contains("/tied-graph/")]
    runs = runs[runs["study"] == "tied-graph"]
    runs = runs.assign(has_head=runs["arm"].str.contains(FP8_HEAD))
    leads = leads.assign(has_head=leads["arm"].str.contains(FP8_HEAD)).set_index(
        ["model", "has_head"]
    )
    assert set(leads["num_pairs"]) == {2, 3}
    fp8 = runs[runs["precision"] != "bf16"]
    gain = [_changes(fp8[fp8["model"] == model], "has_head") for model in (TIED, MIDDLE)]
    small, middle = (leads.loc[model, True] for model in (TIED, MIDDLE))
    less = [f"{-row['memory_change_pct']:.1f} %" for row in (small, middle)]
    told = [f"{per_cent(row['lead_pct'])} (95 % CI {ends(row)})" for row in (small, middle)]
    before = [per_cent(leads.loc[(model, False), "lead_pct"]) for model in (TIED, MIDDLE)]
    return [
        f"a 1B's FP8 gains {gain[0]}, a 3B's {gain[1]}; FP8 then leads by {told[0]} and {told[1]} "
        f"instead of {before[0]} and {before[1]}, with {less[0]} and {less[1]} less memory",
        f"| 1B | {per_cent(small['lead_pct'])} at batch 1 | H100",
        f"3B: {per_cent(middle['lead_pct'])} at batch 1,",
    ]


def pool_texts() -> list[str]:
    """What graph-pool measured on two GPUs: memory reserved in GiB, and tokens/s."""
    runs = runs_frame([run for run in stored("h200x4") if run.record.study == "graph-pool"])
    shared = runs["setting"].str.contains(SHARED_POOL).rename("is_shared")
    gib = runs.assign(gib=reserved(runs)).groupby(["model", "precision", shared])["gib"]
    assert (gib.max() - gib.min()).max() < 0.01
    mean = gib.mean().unstack()
    said = []
    assert set(runs.groupby(["model", "precision", shared]).size()) == {2}
    for model, words in ((SMALL, "for a 1B"), (MIDDLE, "For a 3B it is")):
        pairs = [
            f"{mean.loc[(model, precision), True]:.1f} GiB instead of "
            f"{mean.loc[(model, precision), False]:.1f}"
            for precision in ("bf16", "fp8_tensorwise")
        ]
        said.append(f"{words} {pairs[0]} in BF16 and {pairs[1]} in FP8")
    leads = leads_of("h200x4")  # all say how pairs scatter
    lead = one(leads[leads["setting"].str.contains(SHARED_POOL)], model=SMALL, num_pairs=2)
    return [*said, f"at 8 | {per_cent(lead['lead_pct'])} at batch 1; H100"]


def _graphs(machine: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The runs and the leads of the studies of graphs."""
    runs, leads = runs_of(machine), leads_of(machine)
    runs, leads = (
        table[table[name].str.startswith(("graph-form", "graph-reach", "graph-narrow"))]
        for table, name in ((runs, "study"), (leads, "studies"))
    )
    runs = runs.assign(in_fp8=runs["precision"] != "bf16")
    runs, leads = (
        table.assign(is_graph=table["setting"].str.contains(GRAPH)) for table in (runs, leads)
    )
    return runs, leads


def reserved(runs: pd.DataFrame) -> Any:
    """Return what torch had reserved in each run, GiB."""
    records = {run.record.run_id: run.record for run in committed_runs()}
    return runs["run_id"].map(
        lambda name: records[name].instruments["memory"]["steady_reserved_gib"]
    )


def _gains(runs: pd.DataFrame, model: str, num_gpus: int, batch: int) -> list[str]:
    """By how much each block's tokens/s change as a graph, in FP8 and in BF16."""
    there = runs[(runs[PLACE] == [model, num_gpus, batch]).all(axis=1)]
    return [
        _changes(there[there["in_fp8"] == in_fp8], "is_graph") or "?" for in_fp8 in (True, False)
    ]


def _leads(runs: pd.DataFrame, model: str, batch: int, is_graph: bool) -> str:
    """By how much FP8 leads on one GPU, block by block."""
    there = runs[(runs[[*PLACE, "is_graph"]] == [model, 1, batch, is_graph]).all(axis=1)]
    return _changes(there, "in_fp8")


def _changes(runs: pd.DataFrame, by: str) -> str:
    """How tokens/s change in each block with what `by` says: +3.7 % and +1.0 %."""
    rates = runs.set_index(["machine", "study", "repeat", by])["tokens_per_second_per_gpu"]
    blocks = rates.unstack().reindex(columns=[False, True]).dropna().to_numpy()
    *first, last = [per_cent(100 * (now / then - 1)) for then, now in blocks] or [""]
    return " and ".join(filter(None, [", ".join(first), last]))
