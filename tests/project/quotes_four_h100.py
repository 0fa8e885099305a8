"""What the README and docs/results.md may say of four H100s: of graphs, and of the laws."""

from __future__ import annotations

from typing import Any

import pandas as pd

from fp8study.analysis.laws.account import lead_table
from fp8study.analysis.laws.cells import cells_of
from fp8study.analysis.losses import loss_gap_table
from fp8study.analysis.runs.frames import run_path
from fp8study.analysis.runs.naming import FP8_HEAD, GRAPH, SHARED_POOL
from fp8study.analysis.speed import switch_table
from tests.project.quotes import ends, gap_ends, leads_of, one, per_cent, runs_of, stored
from tests.project.quotes_graph import reserved

MACHINE = "h100x4"
OWN_HEAD = "llama-3.2-1b-untied"
TENSORWISE = "fp8_tensorwise"


def four_h100_texts() -> list[str]:
    """What is said of pool-loss, graph-lead, graph-reach and the study machine there."""
    runs, leads = runs_of(MACHINE), leads_of(MACHINE)
    return [
        *_loss_texts(runs), *_lead_texts(leads), *_four_texts(runs, leads), *_path_texts(leads),
    ]  # fmt: skip


def _loss_texts(runs: pd.DataFrame) -> list[str]:
    chosen = runs[runs["study"] == "pool-loss"]
    said = []
    for loss in ("loss_last20_mean", "validation_loss"):
        gaps = loss_gap_table(chosen, loss)
        assert (set(gaps["verdict"]), set(gaps["num_pairs"])) == ({"equivalent"}, {4})
        is_shared = gaps["setting"].str.contains(SHARED_POOL)
        said.append([
            f"{per_cent(row['gap_pct'], 2)} ({gap_ends(row)})"
            for row in (one(gaps[is_shared]), one(gaps[~is_shared]))
        ])  # fmt: skip
    (shared, own), (shared_unseen, own_unseen) = said
    moved = switch_table(chosen).set_index("precision")
    assert (set(moved["verdict"]), set(moved["num_blocks"])) == ({"equivalent"}, {4})
    bf16, fp8 = (moved.loc[name] for name in ("bf16", TENSORWISE))
    return [
        f"{shared.replace('(', '(95 % CI ')}, on held-out text {shared_unseen}",
        f"with memory of their own {own} and {own_unseen}",
        f"the last losses by {per_cent(bf16['loss_gap_pct'], 3)} in BF16 and by "
        f"{per_cent(fp8['loss_gap_pct'], 3)} in FP8 ({ends(fp8, '{}_95', 3)})",
        f"tokens/s by {per_cent(bf16['gain_pct'])} and {per_cent(fp8['gain_pct'])}",
    ]


def _lead_texts(leads: pd.DataFrame) -> list[str]:
    graphs = leads[leads["studies"].eq("graph-lead")]
    assert set(graphs["num_pairs"]) == {2}
    two = {model: one(graphs, model=model, num_gpus=2)
           for model in ("llama-3.2-1b", "llama-3.2-3b", "qwen3-4b")}  # fmt: skip
    told = {model: f"{per_cent(row['lead_pct'])} ({ends(row)})" for model, row in two.items()}
    alone = one(graphs, num_gpus=1)
    head = one(leads[leads["setting"].str.contains(SHARED_POOL)], model=OWN_HEAD)
    assert head["num_pairs"] == 4
    eight, by_row = (
        one(leads, model="llama-3.1-8b", precision=name) for name in (TENSORWISE, "fp8_rowwise")
    )
    assert eight["num_pairs"] == 1
    rates = [eight[f"tokens_per_second_per_gpu{end}"] for end in ("", "_bf16")]
    memory, energy = (f"{-eight[f'{what}_change_pct']:.1f} %" for what in ("memory", "energy"))
    return [
        f"1B {told['llama-3.2-1b']}, a 3B {told['llama-3.2-3b']}, a Qwen3-4B {told['qwen3-4b']}, a "
        f"1B with a head of its own {per_cent(head['lead_pct'])} ({ends(head)})",
        f"a 1B at batch 2 on one {per_cent(alone['lead_pct'])} ({ends(alone)})",
        f"{per_cent(eight['lead_pct'])} at batch 2 on four ({rates[0]:,.0f} against "
        f"{rates[1]:,.0f} tokens/s a GPU; rowwise {per_cent(by_row['lead_pct'])}), with {memory} "
        f"less memory and {energy} less energy",
        f"H100: 3B {per_cent(two['llama-3.2-3b']['lead_pct'])}, 4B "
        f"{per_cent(two['qwen3-4b']['lead_pct'])} at batch 1 |",
        f"| H100: {per_cent(two['llama-3.2-1b']['lead_pct'])} at batch 1 |",
        f"at batch 1; H100: **{per_cent(head['lead_pct'])}: FP8** |",
        f"at batch 1; H100: {per_cent(eight['lead_pct'])}ᵘ at 2 |",
    ]  # fmt: skip


def _four_texts(runs: pd.DataFrame, leads: pd.DataFrame) -> list[str]:
    reach = runs[(runs["study"] == "graph-reach") & (runs["repeat"] == 4)]
    assert (set(reach["num_gpus"]), len(reach), set(reach["model"])) == ({4}, 4, {OWN_HEAD})
    assert not reach["arm"].str.contains(FP8_HEAD).any()
    is_graph = reach["setting"].str.contains(GRAPH)
    rate = reach.assign(graph=is_graph).pivot(
        index="precision", columns="graph", values="tokens_per_second_per_gpu"
    )
    gain = (100 * (rate[True] / rate[False] - 1)).map(per_cent)
    assert set(reach.loc[reach["unsteady"], "precision"]) == {"bf16"}
    lead = leads[leads["studies"].eq("graph-reach")]
    of_graph = lead["setting"].str.contains(GRAPH)
    graph = one(lead[of_graph])
    gib = reach.assign(graph=is_graph, gib=reserved(reach)).pivot(
        index="precision", columns="graph", values="gib"
    )
    bf16, fp8 = (gib.loc[name].map("{:.1f}".format) for name in ("bf16", TENSORWISE))
    return [
        f"for them: {bf16[True]} GiB instead of {bf16[False]} in BF16, {fp8[True]} instead of "
        f"{fp8[False]} in FP8",
        f"| {gain[TENSORWISE]} | {gain['bf16']} | {per_cent(graph['lead_pct'])} ({ends(graph)}) |",
    ]


def _path_texts(leads: pd.DataFrame) -> list[str]:
    """What graph-four timed: small steps on four GPUs as the tuned path has them."""
    law: Any = lead_table(
        cells_of((run_path(run), run.record) for run in stored(MACHINE)
                 if run.record.study == "graph-four")
    )  # fmt: skip
    told, said = [], []
    for model in (OWN_HEAD, "llama-3.2-3b", "qwen3-4b"):
        row = one(leads[leads["studies"].eq("graph-four")], model=model)
        assert row["num_pairs"] == 1
        told.append(per_cent(row["lead_pct"]))
        said.append(per_cent(one(law, model=model)["predicted_pct"]))
    return [
        f"lead by {told[0]} (the 1B), {told[1]} (a 3B) and {told[2]} (a Qwen3-4B)",
        f"the law, frozen before, had said {said[0]}, {said[1]} and {said[2]}",
        f"| H100: {told[0]}ᵘ at batch 1 |",
        f"| H100: 3B {told[1]}ᵘ, 4B {told[2]}ᵘ at batch 1 |",
    ]
