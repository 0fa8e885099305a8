"""The rows of docs/results.md's table of other trainers, from the records."""

import pandas as pd

from fp8study.analysis.peers import peer_table
from fp8study.analysis.runs.naming import FP8_HEAD
from tests.project.quotes import ends, leads_of, one, per_cent, stored

MODELS = {"llama-3.1-8b": "8B", "llama-3.2-1b-untied": "1B"}


def peer_rows() -> list[str]:
    """Each setting, clipped as torchtitan is, beside the trainer that took turns with us."""
    tables = [peer_table(stored(machine)) for machine in ("h200x2", "h200x4")]
    table = pd.concat(tables, ignore_index=True)
    table = table[table["max_grad_norm"].notna() & table["ratio"].notna()]
    # On four GPUs three runs of each, not by turns, of an earlier form; nothing later was run.
    by_turns = table["num_blocks"].notna() & table["study"].ne("beside-torchtitan-fsdp")
    table = table[by_turns | table["num_gpus"].eq(4)]
    assert {*table.loc[table["num_gpus"] == 4, "num_runs"]} == {3}
    batch = table["setting"].str.extract(r"batch (\d+)", expand=False)
    assert {*table["peer"]} == {"torchtitan 0.2.2", "accelerate 1.15.0"}
    assert (table["ratio"] > 1).all()
    said = (
        "**Is the tuned path as fast as torchtitan 0.2.2 and Accelerate 1.15.0?** Faster than both "
        "in every setting"
    )
    return [said] + [
        _row(model, num_gpus, batch, peer.split()[0], rows.set_index("precision"))
        for (model, num_gpus, batch, peer), rows in table.groupby(
            ["model", "num_gpus", batch, "peer"]
        )
    ]


def _row(model: str, num_gpus: int, batch: str, peer: str, rows: pd.DataFrame) -> str:
    bf16, fp8 = rows.loc["bf16"], rows.loc["fp8_tensorwise"]
    ratios = [
        f"{row['ratio']:.2f}" + f" ({row['ratio_interval']})" * (" to " in row["ratio_interval"])
        for row in (bf16, fp8)
    ]
    leads = [per_cent(fp8[f"{side}lead_pct"]) for side in ("", "peer_")]
    gib = [
        f"{bf16[f'{side}reserved_gib']:.1f}, {fp8[f'{side}reserved_gib']:.1f}"
        for side in ("", "peer_")
    ]
    place = f"{MODELS[model]}, {num_gpus} GPU{'s' * (num_gpus > 1)}, batch {batch}"
    return f"| {place} | {' | '.join([peer, *ratios, *leads, *gib])} |"


def all_pairs_texts() -> list[str]:
    """What is said of the 8B on two GPUs over all sessions beside torchtitan."""
    leads = leads_of("h200x2")
    leads = leads[leads["arm"].str.contains(FP8_HEAD)]
    row = one(leads, model="llama-3.1-8b", studies="beside-torchtitan-fsdp-8b")
    assert (row["num_pairs"], row["num_sessions"]) == (5, 4)
    lead = per_cent(row["lead_pct"])
    return [
        f"Over all five pairs the 8B's FP8 leads by {lead} (95 % CI {ends(row)})",
        f"FP8** | {lead.removesuffix(' %')}, ",
    ]
