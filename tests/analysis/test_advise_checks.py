"""The checks that an advice asks for, and a step's sequences parted among GPUs and passes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8study.analysis import decision
from fp8study.analysis.advice.question import answer, question_for
from fp8study.core.errors import UserError
from fp8study.core.studies import load_study
from fp8study.report.advice_text import advice_text
from fp8study.run.terminal import parse_assignments
from tests.analysis.test_advise import advice


def test_a_loss_that_is_to_be_checked_has_its_command():
    """It makes the very setting of the study's runs, in both precisions."""
    found = advice("llama-3.2-1b", 1, 4096, 8, gpu="h200")
    assert found.verdict.action == decision.CHECK
    check = found.loss_check
    assert f"  {check.command}" in advice_text(found).splitlines()
    assert "(then ask again: your own runs count first)" in advice_text(found)
    command, *fields = check.command.split(" --set ")
    study = load_study(command.removeprefix("fp8study reproduce "), parse_assignments(fields))
    told = {name: found.config[name] for name in (
        "model", "num_gpus", "strategy", "sequence_length", "micro_batch_size", "path",
        "master_dtype", "gradient_accumulation_steps", "max_grad_norm")}  # fmt: skip
    for run in study.runs:
        assert {name: getattr(run.config, name) for name in told} == told
    assert {run.config.precision for run in study.runs} == {"bf16", "fp8_tensorwise"}
    (tokens,) = {run.config.num_steps * run.config.tokens_per_step for run in study.runs}
    assert (check.num_runs, check.tokens) == (len(study.runs), tokens)
    rates = [o.tokens_per_second_per_gpu.value for o in (found.options[0], found.chosen)]
    assert check.gpu_hours == pytest.approx(6 * sum(tokens / rate for rate in rates) / 3600)
    several = advice("llama-3.1-8b", 32, 4096, 3, gpu="h100-80gb").loss_check.command
    assert several.startswith("fp8study reproduce check-loss --profile slurm --set model=")
    assert "num_nodes=4" in several and "fp8_all_gather=true" not in several
    assert not advice("llama-3.2-1b", 1, 4096, 1, gpu="h200").loss_check  # BF16 it is


def test_losses_are_compared_at_a_batch_at_which_bf16_fits_too():
    found = advice("llama-3.1-8b", 8, 4096, 4, gpu="h100-80gb", max_grad_norm=1)
    assert found.verdict.action == decision.CHECK and found.fp8_fits and not found.fits
    smaller = advice("llama-3.1-8b", 8, 4096, found.loss_check.micro_batch_size, "h100-80gb")
    assert smaller.fits and found.loss_check.micro_batch_size < 4
    assert f"micro_batch_size={found.loss_check.micro_batch_size} " in found.loss_check.command
    assert "where BF16 fits, too" in advice_text(found)


def test_a_global_batch_is_parted_among_gpus_and_passes() -> None:
    """In the largest batch that fits; fewer tokens a step are no remedy."""

    def parted(sequences: int, batch: int | None = None, **others: Any) -> Any:
        values = {"max_grad_norm": 1.0, **others}
        return question_for(
            [], "llama-3.1-8b", 8, 4096, batch, "h100-80gb", values, None, sequences
        )

    for sequences, batch in ((8, None), (16, None), (48, None), (48, 3), (1008, 2)):
        config = parted(sequences, batch).config
        passes = config.gradient_accumulation_steps
        assert config.micro_batch_size * passes * 8 == sequences
        assert batch in (None, config.micro_batch_size)
    assert parted(16).config.micro_batch_size == 2  # of one pass, whose gradients are sharded
    large = question_for([], "llama-3.1-70b", 64, 4096, None, "h100-80gb", {}, None, 256).config
    assert (large.micro_batch_size, large.activation_checkpointing) == (4, True)  # saves memory
    assert answer(parted(128, 2)).fits
    assert parted(128, 2).config.gradient_reduction == "each_pass"
    remedies = answer(parted(128, 4)).remedies
    assert any(cure.what.endswith("--set gradient_reduction=each_pass") for cure in remedies)
    for cure in remedies:
        if "--num-gpus" not in cure.what:
            batch = int(re.findall(r"--micro-batch-size (\d+)", cure.what)[0])
            others = dict(re.findall(r"--set (\w+)=(\w+)", cure.what))
            again = parted(128, batch, **{n: yaml.safe_load(v) for n, v in others.items()})
            assert again.config.tokens_per_step == 128 * 4096 and answer(again).fits, cure.what


@pytest.mark.parametrize(
    ("gpu", "num_gpus", "sequences", "fields", "chosen"),
    [
        ("h100-80gb", 64, 1024, {"master_dtype": "bf16"}, (2, 8, True, False)),
        ("h100-pcie", 8, 64, {}, (8, 1, "half", True)),
        ("h100-80gb", 64, 1024, {}, (2, 8, "half", False)),
    ],
)
def test_a_step_is_parted_as_fp8_is_notably_faster(
    gpu: str, num_gpus: int, sequences: int, fields: dict[str, Any], chosen: tuple[Any, ...]
) -> None:
    """With layers gathered twice or recomputed for a larger batch, unasked, as without a step."""
    values = {"max_grad_norm": 1.0} | fields
    asked = question_for(
        [], "llama-3.1-8b", num_gpus, 4096, None, gpu, values, None, sequences
    ).config
    names = ("micro_batch_size", "gradient_accumulation_steps", "reshard_after_forward",
             "activation_checkpointing")  # fmt: skip
    assert tuple(getattr(asked, name) for name in names) == chosen
    assert asked.tokens_per_step == sequences * 4096


@pytest.mark.parametrize(
    ("model", "gpu", "sequences"),
    [("qwen3-14b", "h200", 512), ("llama-3.1-8b", "h100-80gb", 128), ("qwen3-14b", "b200", 512)],
)
def test_what_fits_the_gpus_asked_about_is_found(model: str, gpu: str, sequences: int) -> None:
    """Not with gradients reduced otherwise, nor in a form for small steps that does not fit."""
    found = answer(
        question_for([], model, 2, 4096, None, gpu, {"max_grad_norm": 1.0}, None, sequences)
    )
    assert found.fits
    assert found.config["gradient_reduction"] == "each_pass"


def test_no_more_gpus_are_told_where_these_do() -> None:
    reduced = {"max_grad_norm": 1.0, "gradient_reduction": "each_pass"}
    found = answer(question_for([], "qwen3-14b", 2, 4096, 1, "h200", reduced, None, 512))
    assert not found.fits
    first, *_ = found.remedies
    saved = "--set reshard_after_forward=true --set activation_checkpointing=true"
    assert first.what == f"--micro-batch-size 1 --set gradient_reduction=each_pass {saved}"


@pytest.mark.parametrize(
    ("model", "rate", "known", "more"),
    [
        ("llama-3.1-8b", 1e-4, ("llama-3.1-8b", "1e-4"), False),
        ("llama-3.1-8b", 3e-4, ("llama-3.1-8b", "1e-4"), True),  # its own, though lower
        ("llama-3.2-3b", 3e-4, ("llama-3.2-1b", "3e-4"), False),
    ],
)
def test_a_check_that_may_not_decide_says_so(
    model: str, rate: float, known: tuple[str, str], more: bool
) -> None:
    found = answer(question_for([], model, 1, 4096, 1, "h200", {"learning_rate": rate}))
    assert found.loss_check and found.loss_check.seeds
    text = " ".join(advice_text(found).split())
    pairs = "by the scatter of pairs of {} from random weights at {}".format(*known)
    said = f"6 seeds may not decide: {pairs} it takes "
    said += r"\d+( to \d+)?" + ", at a higher rate perhaps more" * more
    assert re.search(rf"{said}; to add one: the same with --set seed=6 ", text)
    usual = answer(question_for([], "llama-3.2-1b", 1, 4096, 8, "h200"))
    assert usual.loss_check and "may not decide" not in advice_text(usual)


def test_gradients_that_each_pass_reduces_leave_room_for_a_larger_batch() -> None:
    def parted(fields: dict[str, Any]) -> Any:
        return question_for([], "llama-3.1-8b", 8, 4096, None, "h100-80gb", fields, None, 512)

    asked = {way: parted({"gradient_reduction": way}) for way in ("last_pass", "each_pass")}
    assert [way.config.micro_batch_size for way in asked.values()] == [1, 2]
    assert parted({}).config == asked["each_pass"].config
    whole, shared = (advice_text(answer(question)) for question in asked.values())
    assert "Chosen for it: gradient_reduction=each_pass" in shared and "whole between" not in shared
    assert shared.count("gradients reduced after each pass: measured on H200, not on H100") == 1
    assert shared.count("--set gradient_reduction=each_pass") == 3  # to check speed and loss
    parts = answer(asked["each_pass"]).memory_parts_gib["gradients"].value
    assert (
        f"  --set gradient_reduction=each_pass keeps a GPU's share of gradients: {parts:.1f}"
        in whole
    )


@pytest.mark.parametrize(
    ("sequences", "batch", "fields", "named"),
    [
        (100, None, {}, "100 does not fill passes of 8 sequences on 8 GPUs; try 96"),
        (128, 3, {}, "128 does not fill passes of 24 .* try 120"),
        (0, None, {}, "try 8"),
        (128, None, {"gradient_accumulation_steps": 2}, "follows from it; leave one out"),
        (10**6, None, {}, "leave fewer than 100 steps .*give sequences, not tokens, at most"),
    ],
)
def test_a_global_batch_that_does_not_come_out_even_is_refused(
    sequences: int, batch: int | None, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=f"--global-batch-size: .*{named}"):
        question_for([], "llama-3.2-1b", 8, 4096, batch, "h200", fields, None, sequences)


def test_the_commands_for_more_seeds_and_from_weights_plan(tmp_path: Path) -> None:
    found = answer(question_for([], "llama-3.1-8b", 1, 4096, 1, "h200", {"learning_rate": 1e-4}))
    assert found.loss_check
    _, *fields = found.loss_check.command.split(" --set ")
    plain, more = (
        load_study("check-loss", parse_assignments([*fields, *extra])).runs
        for extra in ([], ["seed=6"])
    )
    assert {run.config.seed for run in more} == {6}
    assert replace(more[0].config, seed=0) == plain[0].config  # so it is of the same arm
    text = " ".join(advice_text(found).split())
    told = re.search(r"the same with (\S+) for check-loss, and ((--set \S+=\S+ ?)+)", text)
    assert told
    weights = told[2].replace("FOLDER", str(tmp_path)).split()
    from_weights = [each for each in weights if each != "--set"]
    runs = load_study(told[1], parse_assignments([*fields, *from_weights])).runs
    assert f"({len(runs)} runs of {runs[0].config.num_steps} steps" in text
    assert {run.config.learning_rate for run in runs} == {1e-4}
    unasked = answer(question_for([], "llama-3.1-8b", 2, 4096, 1, "h200", {"max_grad_norm": 1.0}))
    at_any = " ".join(advice_text(unasked).split())
    assert "for check-loss, and --set learning_rate=RATE --set init_from=FOLDER" in at_any
    assert {(run.config.init_from, run.config.runs_per_gpu) for run in runs} == {(str(tmp_path), 1)}


def test_a_speed_check_of_long_steps_does_few() -> None:
    long, short = (
        answer(question_for([], "llama-3.1-8b", 8, 4096, None, "h200", None, None, sequences))
        for sequences in (1000, 8)
    )
    assert all(
        command.endswith("num_warmup_steps=5 --set num_steps=15") for command in long.commands
    )
    assert not any("num_steps" in command for command in short.commands)


def test_formats_that_were_never_judged_are_open() -> None:
    formats = {"optimizer_state": "fp8", "master_dtype": "bf16"}
    found = answer(question_for([], "llama-3.2-1b", 1, 4096, 1, "h200", formats))
    assert {"master weights in BF16", "optimizer states in FP8"} <= {*found.loss_uncovered}
    usual = answer(question_for([], "llama-3.2-1b", 1, 4096, 1, "h200"))
    assert not any("weights in" in each or "states in" in each for each in usual.loss_uncovered)
