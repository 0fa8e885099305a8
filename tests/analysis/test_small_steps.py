"""Which form of the tuned path several GPUs have, by what the law says of their hosts."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from fp8study.analysis.laws.nearby import EARLIER, changed
from fp8study.analysis.runs.naming import BEFORE, COPY_ENGINES, IN_ONE_PASS, NORM_AS_SUMMED
from fp8study.analysis.small_steps import Form, are_small, form_of, todays_form
from fp8study.core.config import make_config
from fp8study.core.hardware import find_peak

SETTING = "{}, 4096 tokens, batch {}, compiled, FP32 masters, tuned"


@pytest.mark.parametrize(
    ("model", "num_gpus", "batch", "form"),
    [
        ("llama-3.1-8b", 1, 1, Form(True, False, False)),
        ("llama-3.1-8b", 2, 1, Form(True, True, False)),
        ("llama-3.1-8b", 2, 2, Form(True, True, False)),
        ("llama-3.1-8b", 4, 2, Form(True, False, False)),
        ("llama-3.2-1b", 2, 1, Form(False, False, False)),
        ("llama-3.2-3b", 2, 1, Form(False, False, False)),
    ],
)
def test_a_setting_has_one_form_whichever_its_runs_had(
    model: str, num_gpus: int, batch: int, form: Form
) -> None:
    setting = SETTING.format("not sharded" if num_gpus == 1 else "FSDP2", batch)
    later = f", {IN_ONE_PASS}, {COPY_ENGINES}"
    for words in ("", f", {IN_ONE_PASS}", later, f"{later}, {NORM_AS_SUMMED}"):
        row = {"model": model, "num_gpus": num_gpus, "gpu_name": "NVIDIA H200"}
        assert todays_form(pd.Series(row | {"setting": setting + words})) == form
        clipped = f"{setting}, gradients clipped at 1{words}"
        finds_norm = num_gpus == 1 or form.copy_engines
        assert todays_form(pd.Series(row | {"setting": clipped})) == form._replace(norm=finds_norm)


def test_what_the_path_never_does_is_of_no_later_form() -> None:
    row = pd.Series({"model": "llama-3.1-8b", "num_gpus": 2, "gpu_name": "NVIDIA H200"})
    for setting in (
        SETTING.format("FSDP2", 2).replace("FP32", "BF16"),
        SETTING.format("FSDP2", 2).removesuffix(", tuned"),
        SETTING.format("FSDP2", 2) + ", 4 accumulation steps",
    ):
        row["setting"] = setting
        assert todays_form(row) == form_of(setting) == Form(False, False, False)


#: A norm that only the path's own update and collectives have.
ASKED = {"max_grad_norm": 1.0, "gradient_norm": "as_summed"}


@pytest.mark.parametrize("precision", ["bf16", "fp8_tensorwise"])
@pytest.mark.parametrize(
    ("model", "batch", "own", "small"),
    [
        ("llama-3.2-1b", 1, {}, True),
        ("llama-3.2-3b", 1, {}, True),
        ("llama-3.2-1b", 4, {}, False),
        ("llama-3.1-8b", 1, {}, False),  # by the law 2 %
        ("llama-3.2-3b", 2, {}, False),  # 6 %
        ("llama-3.2-1b", 2, {"num_gpus": 4}, True),  # 17 %
        ("llama-3.2-1b", 1, ASKED, False),  # rests on the path's own choice
        ("llama-3.2-1b", 1, {"num_gpus": 1}, False),
    ],
)
def test_steps_are_small_where_bf16_is_gathered_faster_by_a_tenth_in_both_precisions(
    model: str, batch: int, own: dict[str, Any], small: bool, precision: str
) -> None:
    values = {"path": "tuned", "num_gpus": 2, "precision": precision, "model": model}
    config = make_config(values | {"micro_batch_size": batch} | own)
    assert are_small(config, find_peak("NVIDIA H200")) is small


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_the_path_of_small_steps_has_one_form_alone(max_grad_norm: float | None) -> None:
    """So what an earlier form of the path answers for has no small steps."""
    values = {
        "path": "tuned",
        "num_gpus": 2,
        "model": "llama-3.2-1b",
        "max_grad_norm": max_grad_norm,
    }
    small = changed(make_config(values).resolved(), BEFORE)
    assert are_small(small, find_peak("NVIDIA H200"))
    assert {changed(small, form) for form in EARLIER} == {small}
