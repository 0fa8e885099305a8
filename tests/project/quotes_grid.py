"""What docs/results.md and the README may say of document A's grid, with NVLink and without."""

import pandas as pd

from fp8study.analysis.laws.cells import cells_of
from fp8study.analysis.leads import leads_table
from fp8study.analysis.runs.frames import run_path
from fp8study.analysis.scale import links_table
from tests.project.quotes import MACHINE, leads_of, per_cent, runs_of, stored

MODELS = {
    "1B": "llama-3.2-1b", "3B": "llama-3.2-3b", "Qwen3-4B": "qwen3-4b", "8B": "llama-3.1-8b",
    "Qwen3-14B": "qwen3-14b",
}  # fmt: skip
LENGTHS = (2048, 4096, 8192)
STUDIES = r"document-a-(?:grid|blocks|rowwise)|without-nvlink"


def grid_texts() -> list[str]:
    """What is said of its cells on one, two and four GPUs, and of rowwise beside tensorwise."""
    leads = pd.concat([leads_of(machine) for machine in (MACHINE, "h200x2")], ignore_index=True)
    cells = leads[leads["studies"].str.contains(STUDIES) & leads["lead_pct"].notna()]
    cells = cells[cells["precision"].eq("fp8_tensorwise") & cells["micro_batch_size"].eq(1)]
    place = ["model", "num_gpus", "sequence_length"]
    told = cells.sort_values("lead_pct").groupby(place)["lead_pct"].apply(_told)
    assert len(cells) == 37 and len(told) == 36  # a 1B's on one GPU is of two machines
    rows = [
        f"| {name} | {number} | {' | '.join(told.get((model, number, n), '–') for n in LENGTHS)} |"
        for name, model in MODELS.items()
        for number in (1, 2, 4)
        if (model, number) in told.droplevel(2).index
    ]
    own = cells[cells["machine"] == MACHINE].set_index(["num_gpus", "sequence_length", "model"])
    is_open = (own["ci_low_pct"] < 0) & (own["ci_high_pct"] > 0)
    decided = own[~is_open]["lead_pct"].map(lambda lead: "+" if lead > 0 else "-")
    behind = [*((2048, m) for m in MODELS.values() if m != "qwen3-14b"),
              *((4096, m) for m in MODELS.values() if m in ("llama-3.2-1b", "llama-3.2-3b",
                                                             "qwen3-4b"))]  # fmt: skip
    assert {*decided[decided == "-"].loc[[2, 4]].index} == {(n, *c) for n in (2, 4) for c in behind}
    assert {*decided[decided == "+"].index} == {(4, 8192, "llama-3.1-8b"), (4, 8192, "qwen3-14b")}
    assert {*decided.loc[1].index} == {(2048, "llama-3.2-1b"), (4096, "llama-3.2-1b")}
    longest = own["tokens_per_second_per_gpu"].groupby(["num_gpus", "model"]).idxmax()
    full = [at for at in longest if len(own.loc[at[0]].xs(at[2], level=1)) == len(LENGTHS)]
    assert len(full) == 11 and {length for _, length, _ in full} == {8192}
    of_four = own.loc[4]["lead_pct"].map(per_cent)
    small = [(of_four[n, MODELS["3B"]], of_four[n, MODELS["Qwen3-4B"]]) for n in LENGTHS]
    blocks = own[own["studies"].str.contains("blocks")]
    apart = (blocks["lead_high_pct"] - blocks["lead_low_pct"]).map("{:.1f}".format)
    alone = leads_of("h200x2")
    alone = alone[alone["studies"].eq("document-a-blocks")].iloc[0]
    assert (alone["num_gpus"], alone["num_pairs"]) == (1, 3)
    return [
        *rows, *_rowwise_texts(),
        f"{small[0][0]} and {small[0][1]} at", f"{small[1][0]} and {small[1][1]} at",
        f"at 8,192 ({small[2][0]} and {small[2][1]}) it is undecided, one or two runs each",
        f"an 8B's are {apart[1, 4096, MODELS['8B']]} points apart on one GPU and "
        f"{apart[2, 4096, MODELS['8B']]} on two, a 1B's "
        f"{alone['lead_high_pct'] - alone['lead_low_pct']:.1f} and "
        f"{apart[2, 4096, MODELS['1B']]}",
    ]  # fmt: skip


def _told(leads: pd.Series) -> str:
    """Write what one machine or several have."""
    *others, last = map(per_cent, leads)
    return "".join(f"{each.removesuffix(' %')}, " for each in others) + last


def _rowwise_texts() -> list[str]:
    runs = runs_of()
    recipes = leads_table(runs[runs["study"] == "document-a-rowwise"])
    recipes = recipes.set_index(["sequence_length", "precision", "model"])["lead_pct"]
    small_to_large = {4096: ("1B", "3B", "8B"), 8192: ("1B", "8B")}
    both = {
        (length, precision): ", ".join(
            f"{name} {per_cent(recipes.loc[length, precision, MODELS[name]])}" for name in names
        )
        for length, names in small_to_large.items()
        for precision in ("fp8_rowwise", "fp8_tensorwise")
    }
    return [
        f"Rowwise, at 4,096: {both[4096, 'fp8_rowwise']}, where tensorwise has "
        f"{both[4096, 'fp8_tensorwise']} in the same blocks; at 8,192: "
        f"{both[8192, 'fp8_rowwise']} against {both[8192, 'fp8_tensorwise']} "
        "(`document-a-rowwise`)",
    ]


def _rates(model: str) -> list[float]:
    """Return what a GPU of two received in each profiled step, GB/s."""
    found = []
    for run in stored():
        record = run.record
        if record.study != "without-nvlink" or record.config["model"] != model:
            continue
        step = record.instruments.get("step", {})
        if took := step.get("by_kind_ms", {}).get("communication"):
            moved = sum(row["gib"] for row in step["communication"]) / 2
            found.append(moved * 2**30 / took * 1e-6)
    return found


def slow_links_texts() -> list[str]:
    """What is said of two GPUs that leave NVLink unused."""
    links = links_table(cells_of([(run_path(run), run.record) for run in stored()]))
    rows = links.set_index(["model", "path"])
    small, large = rows.loc[MODELS["1B"], "plain"], rows.loc[MODELS["8B"], "plain"]
    tuned = rows.loc[MODELS["8B"], "tuned"]
    runs = runs_of()
    runs = runs[runs["study"].eq("without-nvlink") & runs["master_dtype"].eq("bf16")]
    rate = runs.groupby(["precision", "model", "num_gpus"])["tokens_per_second_per_gpu"].median()
    kept = {
        (precision, name): f"{100 * rate[precision, model, 2] / rate[precision, model, 1]:.0f}"
        for precision in ("bf16", "fp8_tensorwise")
        for name, model in MODELS.items()
        if name in ("1B", "8B")
    }
    received = {name: _rates(model) for name, model in MODELS.items() if name in ("1B", "8B")}
    every = [rate for rates in received.values() for rate in rates]
    assert 2 * rate["bf16", MODELS["8B"], 2] < rate["bf16", MODELS["8B"], 1]
    pairs = runs_of()
    pairs = pairs[pairs["study"].eq("without-nvlink") & pairs["num_gpus"].eq(2)]
    paths = ["model", "path_name", "repeat", "precision"]
    pairs = pairs.assign(path_name=pairs["master_dtype"].map({"bf16": "plain", "fp32": "tuned"}))
    each = pairs.set_index(paths)["tokens_per_second_per_gpu"].unstack("precision")
    each = (100 * (each["fp8_tensorwise"] / each["bf16"] - 1)).groupby(level=[0, 1])
    low, high = each.min().map(per_cent), each.max().map(per_cent)
    assert set(each.size()) == {2}
    errors = rows.loc[MODELS["8B"], ["bf16_error_pct", "fp8_error_pct"]].abs()
    misses = [-small[f"{side}_error_pct"] for side in ("bf16", "fp8")]
    return [
        f"at {large['link_gb_per_s']:.1f} GB/s (the upper quartile of its profiled steps, "
        f"{min(every):.1f} to {max(every):.1f}",
        f"whose exchange ran at {min(received['1B']):.1f} to {max(received['1B']):.1f} GB/s",
        f"An 8B in document A's settings keeps {kept['bf16', '8B']} % of one GPU's tokens/s in "
        f"BF16 and {kept['fp8_tensorwise', '8B']} % in FP8, which leads by "
        f"{per_cent(large['measured_pct'])}",
        f"A 1B keeps {kept['bf16', '1B']} and {kept['fp8_tensorwise', '1B']} %, and FP8 is at "
        f"{per_cent(small['measured_pct'])}",
        f"the 8B leads by {per_cent(tuned['measured_pct'])} on the tuned path",
        f"{per_cent(tuned['measured_pct'])} at batch 2, tuned",
        f"A 1B in a plain script: {per_cent(small['measured_pct'])}",
        *(f"{low[MODELS[name], path].removesuffix(' %')} and {high[MODELS[name], path]}"
          for name, path in (("8B", "plain"), ("1B", "plain"), ("8B", "tuned"))),
        f"within {errors.max(axis=None):.1f} % of an 8B's steps, and {min(misses):.0f} to "
        f"{max(misses):.0f} % below a 1B's",
        f"{per_cent(large['predicted_pct'])} and {per_cent(tuned['predicted_pct'])} of the 8B, "
        f"{per_cent(small['predicted_pct'])} of the 1B",
    ]  # fmt: skip
