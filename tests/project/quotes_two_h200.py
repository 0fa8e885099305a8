"""What the README and docs/results.md may say of the machines of two H200, from the records."""

import pandas as pd

from tests.project.quotes import ends, leads_of, one, per_cent, runs_of

MODELS = {"llama-3.2-1b": "1B", "llama-3.2-3b": "3B", "qwen3-4b": "Qwen3-4B", "llama-3.1-8b": "8B"}


def leads_of_two() -> pd.DataFrame:
    """Their leads, but those of runs that clip gradients, or in document A's settings."""
    leads = leads_of("h200x2")
    return leads[leads["path"].eq("tuned") & ~leads["setting"].str.contains("clipped")]


def two_h200_texts() -> list[str]:
    """What is said of leads by model and batch on one of two H200, and by width."""
    leads = leads_of_two()
    leads = leads[leads["num_gpus"].eq(1)].set_index(["model", "precision"]).sort_index()
    rows = []
    for model, name in MODELS.items():
        for recipe in ("tensorwise", "rowwise"):
            of = leads.loc[[(model, f"fp8_{recipe}")]].set_index("micro_batch_size")
            of = of[of["sequence_length"].eq(4096)]["lead_pct"].map(per_cent)
            cells = [of.get(batch, "") for batch in (1, 2, 4, 8, 16)]
            first = name if recipe == "tensorwise" else ""
            rows.append(" ".join(f"| {' | '.join([first, recipe, *cells])} |".split()))
    small = leads.loc[("llama-3.2-1b", "fp8_tensorwise")].set_index("sequence_length")
    assert small.loc[4096].set_index("micro_batch_size")["num_sessions"].to_dict() == {
        1: 3, 2: 2, 4: 2, 8: 2, 16: 1,
    }  # fmt: skip
    several = leads.loc[["llama-3.2-1b"]]
    apart = (several["lead_high_pct"] - several["lead_low_pct"]).max()
    large = leads.loc["llama-3.1-8b", "fp8_tensorwise"]
    assert (large["num_pairs"].item(), large["num_sessions"].item()) == (6, 2)
    others = leads.loc[["llama-3.2-3b", "qwen3-4b"]]
    assert set(others["num_pairs"]) == {1}
    return [
        *rows, *_width_texts(leads),
        f"differ by at most {apart:.1f} points",
        f"leads by {per_cent(small.loc[2048, 'lead_pct'])}, as",
    ]  # fmt: skip


def _width_texts(leads: pd.DataFrame) -> list[str]:
    """What is said of models of four widths, one run each."""
    wide = {n: leads.loc[f"llama-1b-width-{n}", "fp8_tensorwise"] for n in (512, 1024, 3072, 4096)}
    assert {row["num_pairs"].item() for row in wide.values()} == {1}
    lead = {width: per_cent(row["lead_pct"].item()) for width, row in wide.items()}
    return [
        f"{lead[512]} at a width of 512 (its step times still moved), {lead[1024]} at 1024, "
        f"{lead[3072]} at 3072 and {lead[4096]} at 4096",
    ]


#: Of steps of four passes: what comes after "tuned" in a setting, before, in between and today.
BEFORE, REDUCED = "", ", gradients reduced each pass, gradients' memory own"
ALL_KERNELS = "FP8 tensorwise, SwiGLU kernels, both layouts, FP8 loss head"
TODAY = {"llama-3.1-8b": ", updated in one pass, collectives by copy engines",
         "llama-3.2-3b": ", updated in one pass"}  # fmt: skip


def passes_texts() -> list[str]:
    """What is said of steps of four passes, of an 8B on two GPUs and a 3B on one."""
    runs = runs_of("h200x2")
    runs = runs[runs["study"] == "passes-form"]
    form = runs["setting"].str.partition("clipped at 1, tuned")[2]
    cells = runs.assign(form=form).set_index(["model", "precision", "form", "repeat"])
    rates, peaks = cells["tokens_per_second_per_gpu"], cells["memory_peak_gib"]

    def gain(model: str, precision: str, form: str, repeat: int = 1) -> float:
        before, after = (rates[model, precision, each, repeat] for each in (BEFORE, form))
        return 100 * (after / before - 1)

    gains = {
        precision: " and ".join(
            per_cent(gain(model, precision, form)) + where
            for (model, form), where in zip(TODAY.items(), said, strict=True)
        )
        for precision, said in [
            ("fp8_tensorwise", (" (8B, batch 2, two GPUs)", " (3B, batch 4, one)")),
            ("bf16", ("", "")),
        ]
    }  # fmt: skip
    boxes = [leads_of(machine) for machine in ("h200x2", "h200x4")]
    boxes = [leads[leads["studies"].str.contains("passes-form")] for leads in boxes]
    today, again = (
        [one(leads, model=m, num_pairs=1, arm=ALL_KERNELS) for m in TODAY] for leads in boxes
    )
    earlier, second_block = (
        " and ".join(
            per_cent(
                100 * (rates[m, "fp8_tensorwise", BEFORE, n] / rates[m, "bf16", BEFORE, n] - 1)
            )
            for m in TODAY
        )
        for n in (1, 0)
    )
    costs = [-gain("llama-3.1-8b", p, REDUCED, n) for p in gains for n in (0, 1)]
    freed = {
        f"{peaks['llama-3.1-8b', p, BEFORE, 1] - peaks['llama-3.1-8b', p, REDUCED, 1]:.1f}"
        for p in gains
    }  # fmt: skip
    needs = [peaks["llama-3.1-8b", p, TODAY["llama-3.1-8b"], 1] for p in gains]
    first, second = today
    return [
        f"FP8's tokens/s rise by {gains['fp8_tensorwise']} by what the path has for steps of one "
        f"pass, BF16's by {gains['bf16']}",
        f"leads by {per_cent(first['lead_pct'])} (95 % CI {ends(first)}) and "
        f"{per_cent(second['lead_pct'])} ({ends(second)}) instead of "
        f"{earlier}, in a second block {second_block}",
        "On another box FP8 leads by "
        + " and ".join(f"{per_cent(row['lead_pct'])} ({ends(row)})" for row in again),
        f"{_both(first, again[0])}ˡ at 2 in 4 passes",
        f"{_both(second, again[1])}ˡ at 4 in 4 passes",
        f"costs {min(costs):.1f} to {max(costs):.1f} % of tokens/s and frees {freed.pop()} GiB",
        f"takes {needs[0]:.1f} GiB in FP8 and {needs[1]:.1f} in BF16",
    ]


def _both(one_box: pd.Series, other: pd.Series) -> str:
    return f"{per_cent(one_box['lead_pct'])[:-2]}, {per_cent(other['lead_pct'])}"
