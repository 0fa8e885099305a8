"""What the README and docs/results.md may say of the machines of two H200, from the records."""

from functools import cache

import pandas as pd

from fp8study.analysis.laws.account import lead_table
from fp8study.analysis.laws.cells import cells_of, read_runs
from fp8study.analysis.leads import leads_table
from fp8study.analysis.peers import peer_table
from fp8study.analysis.runs.frames import runs_frame
from fp8study.analysis.runs.naming import FP8_HEAD
from fp8study.analysis.runs.pairing import shorten_arms
from fp8study.analysis.speed import switch_table, throughput_table
from tests.project.quotes import ROOT, ends, one, per_cent, stored


@cache
def runs_of_two() -> pd.DataFrame:
    """The runs on the machines of two H200."""
    return shorten_arms(runs_frame(stored("h200x2")))


@cache
def leads_of_two() -> pd.DataFrame:
    """Their leads, but those of runs that clip gradients."""
    leads = leads_table(runs_of_two())
    return leads[~leads["setting"].str.contains("clipped")]


@cache
def forecasts() -> pd.DataFrame:
    """What the frozen law said of FP8 tensorwise in the study `shapes`."""
    law = lead_table(cells_of(read_runs(ROOT / "results")))
    return law[
        law["run_ids"].str.contains("h200x2/shapes") & (law["precision"] == "fp8_tensorwise")
    ]


def two_h200_texts() -> list[str]:
    """What is said of two H200."""
    leads = leads_of_two()
    tensorwise = leads[leads["precision"] == "fp8_tensorwise"]
    both = one(tensorwise, model="llama-3.1-8b", num_gpus=2, micro_batch_size=4)
    rowwise = one(leads, model="llama-3.1-8b", precision="fp8_rowwise", num_gpus=2)
    machine = leads_table(runs_of_two().query("study == 'machine'"))
    first = one(machine, model="llama-3.1-8b", num_gpus=1)
    plain = one(tensorwise, model="llama-3.2-1b", arm="FP8 tensorwise, BF16 all-gather")
    rates = (
        "{tokens_per_second_per_gpu:,.0f} against {tokens_per_second_per_gpu_bf16:,.0f} tokens/s"
    )
    assert (plain["num_sessions"], both["num_pairs"]) == (2, 1)
    return [
        f"{per_cent(both['lead_pct'])} on both at batch 4 ({rates.format(**both)} a GPU; rowwise "
        f"{per_cent(rowwise['lead_pct'])})",
        f"{per_cent(first['lead_pct'])} on one at batch 1",
        f"it is {per_cent(plain['lead_pct'])} on two other machines (95 % CI {ends(plain)};",
        *gathering_texts(),
        *width_texts(),
        *growth_texts(),
        *larger_texts(),
        *kept_texts(),
    ]


def gathering_texts() -> list[str]:
    """What is said of the two ways to gather FP8 weights."""
    runs = runs_of_two()
    speed = throughput_table(runs[runs["study"] == "all-gather"]).dropna(subset="speedup_pct")
    assert set(speed["num_runs"]) == {1}
    lead = speed.set_index(["model", "arm"])["speedup_pct"].map(per_cent)
    return [
        f"the {name} {at}at {lead[model, 'FP8 tensorwise, BF16 all-gather']} instead of "
        f"{lead[model, 'FP8 tensorwise']}"
        for name, model, at in (
            ("1B", "llama-3.2-1b", "is "), ("3B", "llama-3.2-3b", ""), ("8B", "llama-3.1-8b", "")
        )
    ]  # fmt: skip


def width_texts() -> list[str]:
    """What is said of models of four widths, and what the frozen law said of them."""
    leads = leads_of_two()
    widths = leads["model"].str.extract(r"llama-1b-width-(\d+)", expand=False)
    lead = leads.set_index([widths, "precision"])["lead_pct"]
    assert set(leads.loc[widths.notna(), "num_pairs"]) == {1}
    lead = lead.map(per_cent)
    tensorwise = {w: lead[w, "fp8_tensorwise"] for w in ("512", "1024", "3072", "4096")}
    rowwise = [lead[w, "fp8_rowwise"] for w in ("512", "1024", "4096")]
    law = forecasts()
    said = law.set_index("model")["predicted_pct"].map(per_cent)
    forecast = [said[f"llama-1b-width-{w}"] for w in tensorwise]
    return [
        f"{tensorwise['512']} at a width of 512 (its step times still moved), {tensorwise['1024']} "
        f"at 1024, {tensorwise['3072']} at 3072, {tensorwise['4096']} at 4096; rowwise "
        f"{rowwise[0]}, {rowwise[1]} and {rowwise[2]} at",
        f"frozen before, had said {', '.join(forecast[:3])} and {forecast[3]}",
    ]


def growth_texts() -> list[str]:
    """What is said of a 1B by batch, and what the frozen law said of it."""
    leads = leads_of_two()
    leads = leads[leads["model"].eq("llama-3.2-1b") & leads["num_gpus"].eq(1)]
    lead = leads.set_index(["precision", "sequence_length", "micro_batch_size"]).sort_index()
    tensorwise, rowwise = lead.loc["fp8_tensorwise", 4096], lead.loc["fp8_rowwise", 4096]
    assert tensorwise["num_sessions"].to_dict() == {1: 3, 2: 2, 4: 2, 8: 2, 16: 1}
    apart = (lead["lead_high_pct"] - lead["lead_low_pct"]).max()
    gains = [per_cent(gain) for gain in tensorwise["lead_pct"]]
    less = [per_cent(gain) for gain in rowwise["lead_pct"]]
    shorter = lead.loc[("fp8_tensorwise", 2048, 16), "lead_pct"]
    law = forecasts()
    law = law[law["model"].eq("llama-3.2-1b") & law["setting"].str.contains("4096 tokens")]
    said = law.assign(batch=law["setting"].str.extract(r"batch (\d+)", expand=False).astype(int))
    said = said.sort_values("batch")
    assert list(said["batch"]) == [1, 2, 4, 8, 16]
    forecast = [per_cent(points) for points in said["predicted_pct"]]
    return [
        f"{gains[0]} at batch 1 (95 % CI {ends(tensorwise.loc[1])}), {gains[1]} at 2, {gains[2]} "
        f"at 4, {gains[3]} at 8, {gains[4]} at 16; rowwise {', '.join(less[:3])} and {less[3]} at",
        f"differ by at most {apart:.1f} points",
        f"lead by {per_cent(shorter)}",
        f"frozen before, had said {', '.join(forecast[:4])} and {forecast[4]}.",
    ]


def larger_texts() -> list[str]:
    """What is said of a 3B, a 4B and an 8B by batch on one H200, and what the frozen law said."""
    leads = leads_of_two()
    leads = leads[leads["num_gpus"].eq(1)].set_index(["model", "precision"])
    law = forecasts().set_index("model")["predicted_pct"]
    gains, said = {}, []
    for model in ("llama-3.2-3b", "qwen3-4b"):
        for kind in ("tensorwise", "rowwise"):
            rows = leads.loc[[(model, f"fp8_{kind}")]].sort_values("micro_batch_size")
            assert (list(rows["micro_batch_size"]), set(rows["num_pairs"])) == ([1, 2, 4], {1})
            gains[model, kind] = [per_cent(gain) for gain in rows["lead_pct"]]
        said.append(", ".join(per_cent(points) for points in law[model]))
    small, big = (gains[model, "tensorwise"] for model in ("llama-3.2-3b", "qwen3-4b"))
    texts = [f"{name} {g[0]}, {g[1]} and {g[2]}" for name, g in (("3B", small), ("4B", big))]
    rowwise = [f"{g[0]}, {g[1]} and {g[2]}" for (_, kind), g in gains.items() if kind == "rowwise"]
    alone, rowwise_8b = (
        leads.loc[[("llama-3.1-8b", f"fp8_{kind}")]].iloc[0] for kind in ("tensorwise", "rowwise")
    )
    assert (alone["num_pairs"], alone["num_sessions"]) == (6, 2)
    return [
        *texts,
        f"rowwise {'; '.join(rowwise)}",
        f"8B at batch 1 {per_cent(alone['lead_pct'])} (95 % CI {ends(alone)}; six pairs, two",
        f"rowwise {per_cent(rowwise_8b['lead_pct'])}. One",
        f"frozen before, had said {'; '.join(said)}.",
    ]


def kept_texts() -> list[str]:
    """What is said of weights cast once an update, and of AdamW in one pass."""
    runs = runs_of_two().query("study == 'weight-cast'")
    gains, speed = switch_table(runs), throughput_table(runs)
    assert set(gains["num_runs"]) == {2, 3}
    gains["clips"] = gains["setting_plain"].str.contains("clipped")
    gain = gains.set_index(["model", "precision", "setting", "clips"]).sort_index()
    both, one_pass = "weights cast each update, one pass AdamW", "one pass AdamW"
    points = gain["gain_pct"].map(per_cent)
    big, small = "llama-3.1-8b", "llama-3.2-1b-untied"
    fp8 = speed[speed["model"].eq(big) & speed["precision"].eq("fp8_tensorwise")]
    clips = fp8["setting"].str.contains("clipped")
    kept = fp8["setting"].str.endswith(both)
    plain = fp8["setting"].str.endswith("tuned")
    lead = [
        [per_cent(one(fp8[arms & c], model=big)["speedup_pct"]) for c in (~clips, clips)]
        for arms in (kept, plain)
    ]
    peak = [
        fp8.loc[arms & c, "memory_peak_gib"].item()
        for arms, c in ((kept, ~clips), (plain, ~clips), (kept, clips), (plain, clips))
    ]
    assert round(peak[2], 1) == round(peak[3], 1)
    tensorwise = "fp8_tensorwise"
    return [
        f"{points[big, tensorwise, both, False]} in FP8, {points[big, tensorwise, both, True]} "
        "where gradients are clipped; of that `weight_cast` alone "
        f"{points[big, tensorwise, 'weights cast each update', False]}",
        f"gives BF16 {points[big, 'bf16', one_pass, False]} and, clipped, "
        f"{points[big, 'bf16', one_pass, True]}",
        f"leads by {lead[0][0]}, clipped by {lead[0][1]} (ratios of medians), instead of "
        f"{lead[1][0]} and {lead[1][1]}",
        f"clipped: {points[small, tensorwise, both, True]} in FP8, "
        f"{points[small, 'bf16', one_pass, True]} in BF16",
        f"{peak[0]:.1f} GiB instead of {peak[1]:.1f}, clipped {peak[2]:.1f} either way",
    ]


def two_gpu_peer_texts() -> list[str]:
    """What is said of torchtitan and Accelerate beside the path as it is now, on two GPUs."""
    table = peer_table(stored("h200x2"))
    table = table[table["study"].str.contains("fsdp-")]
    table = table.assign(peer=table["peer"].str.split().str[0])
    counts = table.set_index(["peer", "model", "precision"])["num_blocks"]
    assert counts.pop(("torchtitan", "llama-3.1-8b", "bf16")) == 5
    assert set(counts.loc["torchtitan"]) == {4}
    assert set(counts.loc["accelerate"]) == {1}
    leads = leads_table(runs_of_two())
    leads = leads[leads["arm"].str.contains(FP8_HEAD)]
    large = one(leads, model="llama-3.1-8b", studies="beside-torchtitan-fsdp-8b")
    assert (large["num_pairs"], large["num_sessions"]) == (5, 4)
    lead = per_cent(large["lead_pct"])
    texts = [
        f"Over all five pairs the 8B's FP8 leads by {lead} (95 % CI {ends(large)})",
    ]
    for peer, its in (("torchtitan", "torchtitan's"), ("accelerate", "Accelerate's")):
        for model, words in (("llama-3.1-8b", "an 8B"), ("llama-3.2-1b-untied", "a 1B")):
            bf16, fp8 = (
                one(table, peer=peer, model=model, precision=name)
                for name in ("bf16", "fp8_tensorwise")
            )
            texts.append(
                f"{words} {bf16['ratio']:.2f} times as fast in BF16, {fp8['ratio']:.2f} times in "
                f"FP8; FP8 leads by {per_cent(fp8['lead_pct'])}, {its} by "
                f"{per_cent(fp8['peer_lead_pct'])}"
            )
            if peer == "torchtitan":
                spans = [row["ratio_interval"] for row in (bf16, fp8)]
                texts.append(f"95 % CIs are {spans[0]} and {spans[1]}")
                texts.append(
                    f"{bf16['reserved_gib']:.1f} and {fp8['reserved_gib']:.1f} GiB, torchtitan "
                    f"{bf16['peer_reserved_gib']:.1f} and {fp8['peer_reserved_gib']:.1f}"
                )
    return texts
