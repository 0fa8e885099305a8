"""Captions say what their tables hold, and nothing where there is nothing."""

import pandas as pd

from fp8study.analysis.decision import BF16, CHECK, MORE
from fp8study.report import captions, speed_sentences


def test_an_empty_table_has_nothing_to_say() -> None:
    empty = pd.DataFrame(columns=["masters", "rung", "verdict", "gap_pct_low_90", "stale"])
    assert captions.ends(empty) == captions.rungs(empty) == captions.verdict_counts(empty) == ""


def test_ends_are_given_by_master_weights() -> None:
    table = pd.DataFrame({
        "masters": ["BF16", "BF16", "FP32"], "arm": ["BF16", "FP8", "BF16"],
        "loss_last20_mean": [7.749, 11.782, 4.575],
    })  # fmt: skip
    assert captions.ends(table) == (
        "Final losses, nats: with BF16 master weights BF16 7.75, FP8 11.78; "
        "with FP32 master weights BF16 4.58."
    )


def test_only_healthy_arms_with_a_verdict_are_counted() -> None:
    table = pd.DataFrame({
        "verdict": ["equivalent", "different", "equivalent", "different"],
        "gap_pct": [0.02, 1.82, -0.05, 52.0],
        "gap_pct_low_90": [0.0, 1.5, -0.1, 51.0],
        "stale": [False, False, False, True],
    })  # fmt: skip
    said = captions.verdict_counts(table)
    assert said == "Mean gaps of \u22120.05 to +1.82 %: 2 equivalent, 1 different."


def test_gemms_are_counted_with_fp8s() -> None:
    kinds = dict.fromkeys(captions.KINDS, 0.0)
    table = pd.DataFrame([
        kinds | {"precision": "bf16", "gemm_bf16": 50.0, "attention": 50.0},
        kinds | {"precision": "fp8_tensorwise", "gemm_fp8": 20.0, "gemm_bf16": 10.0, "fused": 70.0},
    ])  # fmt: skip
    assert captions.kernels(table) == (
        "GEMMs' share of kernel time: BF16 50 %, FP8 tensorwise 30 %."
    )


def test_settings_are_counted_by_the_rule_and_not_by_the_sign_of_their_lead() -> None:
    table = pd.DataFrame({
        "machine": "h200x2", "action": [CHECK, BF16, MORE, MORE],
        "lead_pct": [11.0, -2.0, 36.9, float("nan")],
    })  # fmt: skip
    told = speed_sentences.rates(table)
    assert "Of 4 settings FP8 in 1 (+11.0 %), BF16 in 1 (\u22122.0 %), open in 2 (+36.9 %)." in told


def test_hollow_marks_are_told_only_where_there_are_some() -> None:
    table = pd.DataFrame({"rung": ["another seed"], "median_pct": [0.5], "num_equal": [0]})
    assert captions.rungs(table) == "Medians: another seed 0.50 %."
    assert captions.rungs(table.assign(num_equal=2)).endswith("Hollow: equal to the last digit.")
