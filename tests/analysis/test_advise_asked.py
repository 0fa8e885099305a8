"""What may be asked besides the model, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fp8study.analysis.advice.question import answer, question_for
from fp8study.core.errors import UserError
from fp8study.report.advice_text import advice_text


def ask(model: str, num_gpus: int, gpu: str, *further: Any) -> Any:
    return answer(question_for([], model, num_gpus, 4096, 1, gpu, *further))


def test_what_would_fit_can_be_asked_about_as_it_is_written() -> None:
    first = ask("llama-3.1-8b", 1, "h100-80gb")
    assert not first.fits
    wanted = "--micro-batch-size 1 --set master_dtype=bf16"
    (cure,) = (c for c in first.remedies if c.what == wanted)
    assert "check the loss first" in advice_text(first)
    again = ask("llama-3.1-8b", 1, "h100-80gb", {"master_dtype": "bf16"})
    assert again.fits
    assert again.options[0].memory_gib.value == pytest.approx(cure.then.value)
    assert "Chosen for it: master_dtype=bf16" in advice_text(again)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_gpus": 2}, "--set: 'num_gpus' is an option of its own; give --num-gpus"),
        ({"strategy": "ddp"}, "--set: 'strategy' is fixed: the laws are of FSDP2, .* time both: "),
        ({"init_from": "a"}, "^--set: 'init_from' is no matter of speed; leave it out: an answer"),
        ({"skip": "*.o_proj"}, "--set: 'skip' is no field"),  # a lead of other layers
        ({"master_dtpye": "bf16"}, "did you mean 'master_dtype'"),
        ({"master_dtype": "fp16"}, "master_dtype: 'fp16' is not valid"),
    ],
)
def test_other_fields_are_checked(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        ask("llama-3.1-8b", 1, "h200", fields)


def test_days_follow_from_tokens_gpus_and_rates() -> None:
    found = ask("llama-3.1-8b", 1, "h200", None, 86400e6)
    days = 1e6 / found.options[0].tokens_per_second_per_gpu.value
    assert f"days for 86.4 billion tokens (--tokens), at best: {days:,.1f} in BF16" in advice_text(
        found
    )
    size = ask("llama-3.1-8b", 1, "h200").tokens
    assert size == pytest.approx(20 * 8.03e9, rel=0.01)


@pytest.mark.parametrize("tokens", [-1.0, 0.0, 1.0, 1e40, float("nan"), float("inf")])
def test_tokens_that_nobody_trains_on_are_refused(tokens: float) -> None:
    with pytest.raises(UserError, match=r"^--tokens: .* outside 1e\+06 to 1e\+15; give a number"):
        ask("llama-3.1-8b", 1, "h200", None, tokens)


@pytest.mark.parametrize(
    ("model", "num_gpus", "batch", "norm", "others"),
    [
        # Small steps, with torch's AdamW by itself unless they are a graph.
        ("llama-3.2-1b", 2, 1, "as_summed", {"step_launch": "by_kernel"}),
        ("llama-3.2-3b", 2, 1, "as_summed", {"step_launch": "by_kernel"}),
        ("llama-3.1-8b", 1, 2, "by_kernel", {}),  # fits with no FP8 weights kept
    ],
)
def test_a_norm_that_is_asked_for_keeps_the_form_that_it_goes_with(
    model: str, num_gpus: int, batch: int, norm: str, others: dict[str, Any]
) -> None:
    values = {"max_grad_norm": 1.0, **others}
    asked, own = (
        question_for([], model, num_gpus, 4096, batch, "h200", values | said).config
        for said in ({"gradient_norm": norm}, {})
    )
    assert (asked.gradient_norm, asked.update_kernel) == (norm, "one_pass")
    assert own.gradient_norm == "separate"


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UserError) as error:
        ask("no-such-model", 2000, "no-such-gpu", {"skip": "*", "seed": 1}, -1.0)
    starts = [line.partition(":")[0] for line in str(error.value).splitlines()]
    assert starts == ["model", "--gpu", "--num-gpus", "--tokens", "--set", "--set"]


def test_a_batch_near_the_largest_is_answered_for_without_other_batches_beyond_it() -> None:
    found = answer(question_for([], "llama-3.2-1b", 1, 4096, 300_000_000, "h200"))
    assert not found.fits
    assert not any(c.what == "micro_batch_size=1200000000" for c in found.changes)


def test_other_lengths_and_batches_keep_the_tokens_of_a_step() -> None:
    clipped = {"max_grad_norm": 1.0}
    found = answer(question_for([], "llama-3.1-8b", 64, 8192, 1, "h100-80gb", clipped, None, 1024))
    two = question_for([], "llama-3.2-1b", 1, 4096, 1, "h200", clipped, None, 2)
    assert two.config.gradient_accumulation_steps == 2  # four times the batch would be two steps'
    assert not {"micro_batch_size=4", "sequence_length=16384"} & {
        c.what for c in answer(two).changes
    }
    assert found.changes
    for change in found.changes:
        other = {name: int(value) for name, _, value in
                 (word.partition("=") for word in change.what.split())}  # fmt: skip
        now = {name: found.config[name] for name in
               ("sequence_length", "micro_batch_size", "gradient_accumulation_steps")}  # fmt: skip
        assert math.prod((now | other).values()) == math.prod(now.values()), change.what
        assert change.then.low < change.then.value < change.then.high
    assert f"{found.changes[0].what}: +" in advice_text(found)


def test_a_change_of_the_task_that_was_timed_has_that_lead() -> None:
    found = answer(question_for([], "llama-3.1-8b", 4, 4096, 5, "h200", {"max_grad_norm": 1.0}))
    (at_one,) = (c.then for c in found.changes if c.what == "micro_batch_size=1")
    assert at_one.kind == "measured"
    lead = ask("llama-3.1-8b", 4, "h200", {"max_grad_norm": 1.0}).verdict.lead_pct
    assert (at_one.value, at_one.low) == (lead.value, lead.low)


def test_a_change_of_the_task_is_as_sure_as_it_is_asked_directly() -> None:
    """Its interval was that of the BF16 run, whose host is less busy than FP8's."""
    found = answer(question_for([], "llama-3.1-8b", 8, 4096, 4, "h100", {"max_grad_norm": 1.0}))
    (at_one,) = (c.then for c in found.changes if c.what == "micro_batch_size=1")
    lead = ask("llama-3.1-8b", 8, "h100", {"max_grad_norm": 1.0}).verdict.lead_pct
    assert at_one.value == pytest.approx(lead.value)
    assert at_one.high - at_one.low == pytest.approx(lead.high - lead.low, rel=0.02)


def test_the_table_holds_its_columns_at_any_batch() -> None:
    found = answer(question_for([], "llama-3.1-8b", 8, 4096, 10**8, "h100-80gb"))
    rows = [row for row in advice_text(found).splitlines() if row.endswith(" x!")]
    assert len(rows) == len(found.options)
    assert all(row.endswith(" >9999 x!") and len(row) <= 80 for row in rows)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_attention_heads": 40, "num_key_value_heads": 7, "hidden_size": 5120},
         "has 40 heads and 7 key-value heads; heads must be a multiple"),
        ({"num_attention_heads": 33, "num_key_value_heads": 11}, "hidden size .* not a multiple"),
        ({"model_type": "qwen2", "num_attention_heads": 33, "num_key_value_heads": 11},
         "a hidden_size of 4096 and 33 heads; hidden_size must be a multiple"),
        ({"vocab_size": 10**12}, r"has 8.2e\+15 weights, more than 1e\+14"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_are_refused_in_a_line(
    fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    shape = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 32000, "max_position_embeddings": 8192,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape | fields))
    with pytest.raises(UserError, match=words) as caught:
        ask(str(tmp_path), 1, "h200")
    assert str(caught.value).startswith("model: ") and "\n" not in str(caught.value)
