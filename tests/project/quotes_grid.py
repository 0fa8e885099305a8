"""What docs/results.md and the README may say of document A's grid, with NVLink and without."""

from collections.abc import Callable

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
    assert len(cells) == 44 and len(told) == 42  # two of one GPU are of two machines
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
    others = cells[cells["machine"] == "h200x2"]
    assert ((others["ci_low_pct"] < 0) & (others["ci_high_pct"] > 0)).all()
    speeds = cells.set_index("sequence_length").groupby(["machine", "num_gpus", "model"])
    speeds = speeds["tokens_per_second_per_gpu"]
    longest = speeds.idxmax()[speeds.size() == len(LENGTHS)]
    assert len(longest) == 13 and set(longest) == {8192}
    of_four = own.loc[4]["lead_pct"].map(per_cent)
    small = [(of_four[n, MODELS["3B"]], of_four[n, MODELS["Qwen3-4B"]]) for n in LENGTHS]
    blocks = cells[cells["sequence_length"].eq(4096)].groupby(["num_gpus", "model"])
    low, high = blocks["lead_low_pct"].min(), blocks["lead_high_pct"].max()
    pairs = blocks["num_pairs"].sum()
    assert [pairs[n, MODELS[m]] for n in (1, 2) for m in ("8B", "1B")] == [6, 6, 3, 3]
    between = {
        (n, m): " and ".join(per_cent(end[n, MODELS[m]]) for end in (low, high)).replace(
            " %", "", 1
        )
        for n in (1, 2)
        for m in ("8B", "1B")
    }
    return [
        *rows, *_rowwise_texts(),
        f"{small[0][0]} and {small[0][1]} at", f"{small[1][0]} and {small[1][1]} at",
        f"at 8,192 ({small[2][0]} and {small[2][1]}) it is undecided, one or two runs each",
        f"six of an 8B on one GPU lie between {between[1, '8B']}, of a 1B between "
        f"{between[1, '1B']}; three of each on two GPUs between {between[2, '8B']} and between "
        f"{between[2, '1B']}",
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


def _rates(machine: str, model: str) -> list[float]:
    """Return what a GPU of two received in each profiled step, GB/s."""
    found = []
    for run in stored(machine):
        record = run.record
        if record.study != "without-nvlink" or record.config["model"] != model:
            continue
        step = record.instruments.get("step", {})
        if took := step.get("by_kind_ms", {}).get("communication"):
            moved = sum(row["gib"] for row in step["communication"]) / 2
            found.append(moved * 2**30 / took * 1e-6)
    return found


def _exchange_texts() -> list[str]:
    """What an 8B's steps consist of there, and what FP8 sends of BF16's bytes."""
    gib, share = {}, []
    for run in stored("h200x2"):
        record = run.record
        step = record.instruments.get("step", {})
        is_large = record.config["model"] == MODELS["8B"] and record.config["num_gpus"] == 2
        if record.study == "without-nvlink" and is_large:
            of = record.config["path"], record.config["precision"]
            gib[of] = sum(row["gib"] for row in step["communication"])
            took = step["by_kind_ms"]["communication"]
            share.append(100 * took / record.results["step_time_ms_median"])
    plain, tuned = (100 * (1 - gib[path, "fp8_tensorwise"] / gib[path, "bf16"])
                    for path in ("plain", "tuned"))  # fmt: skip
    assert len(share) == 4
    return [
        f"nearly all exchange, {min(share):.0f} to {max(share):.0f} % of it. FP8 sends "
        f"{plain:.0f} % fewer bytes in document A's settings and {tuned:.0f} % fewer on the tuned"
    ]


def slow_links_texts() -> list[str]:
    """What is said of two GPUs that leave NVLink unused, in three blocks on two hosts."""
    links = {
        machine: links_table(cells_of([(run_path(run), run.record) for run in stored(machine)]))
        for machine in (MACHINE, "h200x2")
    }
    pairs, alone = (links[machine].set_index(["model", "path"]) for machine in links)
    every_run = [run for machine in links for run in stored(machine)]
    pooled = links_table(cells_of([(run_path(run), run.record) for run in every_run]))
    pooled = pooled.set_index(["model", "path"])["measured_pct"].map(per_cent)
    runs = pd.concat([runs_of(machine) for machine in links], ignore_index=True)
    runs = runs[runs["study"].eq("without-nvlink")]
    runs = runs.assign(path=runs["master_dtype"].map({"bf16": "plain", "fp32": "tuned"}))
    assert set(runs.loc[runs["machine"] == "h200x2", "repeat"]) == {2}  # the block of one pair
    place = ["path", "num_gpus", "model", "precision", "repeat"]
    rate = runs.set_index(place)["tokens_per_second_per_gpu"].unstack("repeat")
    lead = 100 * (rate.xs("fp8_tensorwise", level=3) / rate.xs("bf16", level=3) - 1)
    kept = 100 * rate.loc["plain", 2] / rate.loc["plain", 1]
    of_large = rate.xs(MODELS["8B"], level="model").loc["plain"]
    assert (of_large.loc[2] < of_large.loc[1] / 2).all(axis=None)
    large, small = (lead.loc["plain", 2, MODELS[name]] for name in ("8B", "1B"))
    tuned = lead.loc["tuned", 2, MODELS["8B"]]
    both = [per_cent(each).removesuffix(" %") for each in (tuned.min(), tuned.max())]
    grown = 100 * (rate.loc["plain", 2][2] / rate.loc["plain", 2][[0, 1]].mean(axis=1) - 1)
    rates = {name: _rates(MACHINE, MODELS[name]) for name in ("8B", "1B")}
    single = _rates("h200x2", MODELS["1B"])
    every = [one for machine in links for name in ("8B", "1B")
             for one in _rates(machine, MODELS[name])]  # fmt: skip
    errors = ["bf16_error_pct", "fp8_error_pct"]
    missed = pd.concat([table.loc[MODELS["8B"], errors] for table in (pairs, alone)])
    misses = {name: -table.loc[(MODELS["1B"], "plain"), errors]
              for name, table in (("pairs", pairs), ("alone", alone))}  # fmt: skip
    first = pairs.loc[MODELS["8B"], "plain"]["link_gb_per_s"]
    return [
        f"at {first:.1f} GB/s on one host and "
        f"{alone.loc[MODELS['8B'], 'plain']['link_gb_per_s']:.1f} on another (the upper quartile "
        f"of the profiled steps, {min(every):.1f} to {max(every):.1f}",
        _row("8B, BF16 keeps", kept.loc[MODELS["8B"], "bf16"], "{:.0f} %".format),
        _row("8B, FP8 keeps", kept.loc[MODELS["8B"], "fp8_tensorwise"], "{:.0f} %".format),
        _row("8B, FP8's lead", large, per_cent),
        _row("1B, BF16 keeps", kept.loc[MODELS["1B"], "bf16"], "{:.0f} %".format),
        _row("1B, FP8 keeps", kept.loc[MODELS["1B"], "fp8_tensorwise"], "{:.0f} %".format),
        _row("1B, FP8's lead", small, per_cent),
        _row("8B tuned at batch 2, FP8's lead", tuned, per_cent),
        f"made {grown.min():.0f} to {grown.max():.0f} % more tokens/s than in the mean of the "
        "other two",
        f"{pooled[MODELS['8B'], 'tuned']} ({both[0]} to {both[1]}) at batch 2, tuned",
        f"A 1B in a plain script: {pooled[MODELS['1B'], 'plain']}",
        *_exchange_texts(),
        f"the means of both hosts, each of median rates, are {pooled[MODELS['8B'], 'plain']} with "
        "the 8B, "
        f"{pooled[MODELS['1B'], 'plain']} with the 1B and {pooled[MODELS['8B'], 'tuned']} tuned",
        f"within {missed.abs().max(axis=None):.1f} % of an 8B's steps. A 1B's it puts "
        f"{misses['pairs'].min():.0f} and {misses['pairs'].max():.0f} % too short where two pairs "
        f"exchanged, {misses['alone'].min():.0f} and {misses['alone'].max():.0f} % where one did",
        f"whose exchange ran at {min(rates['1B']):.1f} to {max(rates['1B']):.1f} GB/s, and at "
        f"{min(single):.1f} and {max(single):.1f} alone",
        f"{per_cent(pairs.loc[MODELS['8B'], 'plain']['predicted_pct'])} and "
        f"{per_cent(pairs.loc[MODELS['8B'], 'tuned']['predicted_pct'])} of the 8B, "
        f"{per_cent(alone.loc[MODELS['1B'], 'plain']['predicted_pct'])} to "
        f"{per_cent(pairs.loc[MODELS['1B'], 'plain']['predicted_pct'])} of the 1B",
    ]  # fmt: skip


def _row(name: str, blocks: pd.Series, told: Callable[[float], str]) -> str:
    """Write one row of the table of blocks, but for what was expected."""
    return f"| {name} | {' | '.join(told(blocks[block]) for block in range(3))} |"
