"""What the report calls the earlier path, how a row was timed, and switches that are gone."""

import pandas as pd
import pytest

from fp8study.report.speed_rows import decisions, gains, is_of_before

SHARDED = "FSDP2, 4096 tokens, batch {}, compiled, FP32 masters, tuned"
ALONE = "not sharded, 4096 tokens, batch 1, compiled, FP32 masters, tuned"


@pytest.mark.parametrize(
    ("model", "setting", "expected"),
    [
        ("llama-3.2-1b", ALONE, True),
        ("llama-3.2-1b", f"{ALONE}, updated in one pass", False),
        ("llama-3.2-1b", ALONE.replace("FP32", "BF16"), False),
        ("llama-3.2-1b", ALONE.removesuffix(", tuned"), False),
        ("llama-3.2-1b", f"{ALONE}, 4 accumulation steps", True),
        ("llama-3.2-1b", f"{ALONE}, activation checkpointing", False),
        ("llama-3.1-8b", SHARDED.format(2), True),
        ("llama-3.1-8b", f"{SHARDED.format(2)}, updated in one pass", False),
        ("llama-3.2-1b", SHARDED.format(1), True),
        ("a-model-of-yours", SHARDED.format(1), False),
        ("llama-3.1-8b", SHARDED.format(2).replace("FSDP2", "FSDP2, 2 nodes"), True),
        ("llama-3.1-8b", SHARDED.replace("FSDP2", "FSDP2, 2 nodes, sharded within each"), False),
    ],
)
def test_a_row_is_of_the_path_before_where_todays_updates_in_one_pass(
    model: str, setting: str, expected: bool
) -> None:
    row = {"model": model, "setting": setting, "gpu_name": "NVIDIA H200"}
    row["num_gpus"] = 1 if "not sharded" in setting else 2
    assert is_of_before(pd.Series(row)) is expected


@pytest.mark.parametrize(("gpu_name", "expected"), [("NVIDIA A100", False), (None, True)])
def test_of_a_gpu_without_fp8_no_path_is_the_one_before(
    gpu_name: str | None, expected: bool
) -> None:
    row = {"model": "llama-3.1-8b", "setting": SHARDED.format(2), "num_gpus": 2}
    assert is_of_before(pd.Series(row | {"gpu_name": gpu_name})) is expected


@pytest.mark.parametrize(
    ("setting", "norm", "passes", "expected"),
    [
        (ALONE, None, 1, "earlier path"),
        (f"{ALONE}, updated in one pass", None, 1, "one pass"),
        (f"{ALONE}, updated in one pass", 1.0, 4, "4 passes a step, one pass, clipped"),
        (ALONE.removesuffix(", tuned"), None, 1, "–"),
        (SHARDED.format(8), None, 1, "FSDP2"),
        (SHARDED.format(8), 1.0, 1, "clipped, FSDP2"),
    ],
)
def test_a_row_says_in_what_it_is_not_todays_path_at_one_pass(
    setting: str, norm: float | None, passes: int, expected: str
) -> None:
    row = {
        "model": "llama-3.1-8b", "gradient_accumulation_steps": passes,
        "setting": setting, "max_grad_norm": norm, "num_gpus": 1, "path": "tuned", "num_pairs": 2,
        "arm": "FP8 tensorwise", "sequence_length": 4096, "master_dtype": "fp32",
        "ci_of_days": True, "ci_low_pct": 1.0, "ci_high_pct": 2.0, "loss_verdict": None,
        "action": "FP8",
    }  # fmt: skip
    (form,) = decisions(pd.DataFrame([row]))["form"]
    assert form.replace("\u00a0", " ") == expected


def test_a_switch_that_was_taken_out_says_so_and_no_other() -> None:
    row = {"machine": "box", "model": "a", "num_gpus": 1, "precision": "bf16", "gain_pct": 1.0,
           "gain_low_95": 0.0, "gain_high_95": 2.0, "num_blocks": 2, "setting_plain": "tuned",
           "setting": "gradients copied by foreach, gradients by all to all, FP8 written once, "
           "8 NCCL CTAs"}  # fmt: skip
    (setting,) = gains(pd.DataFrame([row]))["setting"]
    assert setting == (
        "gradients copied by foreach, gradients by all to all (taken out), "
        "FP8 written once (taken out), 8 NCCL CTAs (taken out)"
    )
