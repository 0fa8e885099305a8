"""What the README and docs/results.md may say of the machines of one H200, from the records."""

import statistics

from fp8study.analysis.claims.stability import stable_rates
from fp8study.analysis.claims.tables import Tables
from fp8study.analysis.speed import switch_table
from fp8study.report.page import report_of
from tests.project.quotes import gap_ends, one, per_cent, runs_of, stored

MACHINE = "h200x1"


def one_h200_texts() -> list[str]:
    """What is said of one H200."""
    return [*learning_rate_texts(), *same_loss_texts(), *eight_b_texts()]


def learning_rate_texts() -> list[str]:
    """What is said of the highest learning rate that trains, with two seeds."""
    runs = [run for run in stored(MACHINE) if run.record.study == "stability"]
    rates = stable_rates(Tables(report_of(runs), [MACHINE])).set_index(
        ["master_dtype", "lr_warmup_steps", "precision"]
    )
    assert set(rates["num_seeds"]) == {2}
    stable = rates["stable"].map("{:g}".format)
    fp8, bf16 = (stable.xs(name, level="precision") for name in ("fp8_tensorwise", "bf16"))
    assert fp8["fp32", 20] == bf16["fp32", 20]
    ended: dict[tuple[str, str, float], list[float]] = {}
    for run in runs:
        config = run.record.config
        arm = config["precision"], config["master_dtype"], config["learning_rate"]
        if (config["master_dtype"] == "bf16") == (config["lr_warmup_steps"] == 20):
            ended.setdefault(arm, []).append(run.record.results["loss_last20_mean"])
    (limit,) = {round(run.record.data["unigram_loss"], 2) for run in runs}

    def losses(precision: str, masters: str, rate: str) -> str:
        return " and ".join(f"{loss:.2f}" for loss in ended[precision, masters, float(rate)])

    return [
        f"{fp8['fp32', 20]} in both with FP32 master weights after 20 warm-up steps; after 100, "
        f"{fp8['fp32', 100]}, the highest tried, in FP8 and {bf16['fp32', 100]} in BF16",
        f"with BF16 ones {fp8['bf16', 20]} in FP8 and {bf16['bf16', 20]} in BF16",
        f"({losses('bf16', 'fp32', fp8['fp32', 100])} in BF16, "
        f"{losses('fp8_tensorwise', 'bf16', bf16['bf16', 20])} in FP8), where {limit} is what",
    ]


def same_loss_texts() -> list[str]:
    """What is said of the losses that the switches leave as they were, with six seeds."""
    gains = switch_table(runs_of(MACHINE))
    gains = gains[gains["study"] == "weight-cast-loss"]
    assert set(gains["verdict"]) == {"equivalent"}
    assert set(gains["num_pairs"]) == {6}
    most = gains["loss_gap_pct"].abs().groupby(gains["precision"]).max()
    low, high = gains["low_95"].min(), gains["high_95"].max()
    return [
        f"by at most {most['bf16']:.3f} % in BF16 and {most['fp8_tensorwise']:.2f} % in FP8",
        f"95 % CIs within {per_cent(low, 2)} and {per_cent(high, 2)}",
    ]


def eight_b_texts() -> list[str]:
    """What is said of the 8B's loss at the first of its study's two learning rates."""
    runs = [run for run in stored(MACHINE) if run.record.study == "loss-8b"]
    runs = [run for run in runs if run.record.config["learning_rate"] == 1e-4]
    report = report_of(runs)
    trained, unseen = one(report.loss_gaps), one(report.validation_gaps)
    assert {trained["verdict"], unseen["verdict"]} == {"undecided"}
    assert trained["num_pairs"] == 6
    highest: dict[str, dict[int, float]] = {}
    last: dict[tuple[str, int], float] = {}
    for run in runs:
        precision, seed = (run.record.config[name] for name in ("precision", "seed"))
        results = run.record.results
        losses = report.metrics.loc[report.metrics["run_id"] == run.record.run_id, "loss"]
        highest.setdefault(precision, {})[seed] = losses.max() / results["loss_start"]
        last[precision, seed] = results["loss_last20_mean"]
    gaps = [100 * (last["fp8_tensorwise", seed] / last["bf16", seed] - 1) for seed in range(6)]
    risen = [seed for ratios in highest.values() for seed in ratios if ratios[seed] >= 1.05]
    (calm,) = (gap for seed, gap in enumerate(gaps) if seed not in risen)
    bf16, fp8 = (max(highest[name].values()) for name in ("bf16", "fp8_tensorwise"))
    return [
        f"{per_cent(trained['gap_pct'], 2)} (95 % CI {gap_ends(trained)})",
        f"on held-out text {per_cent(unseen['gap_pct'], 2)} ({gap_ends(unseen)})",
        f"In {len(risen)} of the {len(runs)} runs a step's loss was 5 % or more above the first, "
        f"at most {bf16:.2f} times it in BF16 and {fp8:.2f} times in FP8",
        f"the one pair without such a step is at {per_cent(calm, 2)}",
        f"pairs scatter by {statistics.stdev(gaps):.2f} %",
    ]
