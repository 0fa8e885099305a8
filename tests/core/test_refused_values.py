"""Values that no run can have, alone or together: each is refused in a line that names it."""

from typing import Any

import pytest

from fp8study.core.config import REFUSED, make_config
from fp8study.core.errors import UserError
from fp8study.core.path.switches import RETIRED

EARLY = {"optimizer_binding": "before_conversion"}
FSDP2 = {"strategy": "fsdp2"}
FP16 = {"precision": "fp16"}
IN_BACKWARD = {"optimizer_step": "in_backward"}
SHARED = {"gradient_pool": "shared", "num_gpus": 2}
KEPT = {"precision": "fp8", "strategy": "none", "weight_cast": "each_update"}
ONE_PASS = {"strategy": "none", "update_kernel": "one_pass"}
COPIES = {"num_gpus": 2, "collectives": "copy_engines"}
PASSES = {"num_gpus": 2, "gradient_accumulation_steps": 2, "gradient_reduction": "each_pass"}
NARROW = ONE_PASS | {"gradient_dtype": "compute"}
GRAPH = ONE_PASS | {"step_launch": "as_graph", "attention_mask": "causal"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"precision": "FP8"}, ["precision", "'FP8' is not valid (did you mean 'fp8'?)"]),
        ({"precision": "fp8_tensorwse"}, ["precision", "fp8_tensorwse", "mean 'fp8_tensorwise'?"]),
        ({"precision": ["bf16"]}, ["precision", "choose one of bf16"]),
        ({"strategy": "fsdp"}, ["strategy", "mean 'fsdp2'?"]),
        ({"num_gpus": "two"}, ["num_gpus", "'two'", "a whole number"]),
        ({"num_gpus": 1.5}, ["num_gpus", "1.5", "a whole number"]),
        ({"num_gpus": True}, ["num_gpus", "True", "a whole number"]),
        ({"num_gpus": None}, ["num_gpus", "None", "a whole number"]),
        ({"learning_rate": False}, ["learning_rate", "False", "a number"]),
        ({"compile": 1}, ["compile", "1", "true or false"]),
        ({"model": 3}, ["model", "3", "a text"]),
        ({"skip": [1]}, ["skip", "list of texts"]),
        ({"noise_at_steps": "0,x"}, ["noise_at_steps", "'0,x'", "list of whole numbers"]),
        ({"noise_at_steps": [0.5]}, ["noise_at_steps", "0.5", "list of whole numbers"]),
        ({"noise_at_steps": [True]}, ["noise_at_steps", "True", "list of whole numbers"]),
        ({"noise_at_steps": [-1]}, ["noise_at_steps", "-1", "0 to num_steps=100"]),
        ({"noise_at_steps": [101]}, ["noise_at_steps", "101", "0 to num_steps=100"]),
        ({"runs_per_gpu": 3}, ["runs_per_gpu", "3", "1, 2, 4, 8"]),
        ({"validation_sequences": -1}, ["validation_sequences", "-1", "outside 0 to", "try 0"]),
        ({"noise_samples": 3}, ["noise_samples", "3", "try 16"]),
        ({"noise_samples": 65}, ["noise_samples", "65", "4 to 64"]),
        ({"learing_rate": 1}, ["parameters", "learing_rate", "mean 'learning_rate'?"]),
        ({"num_gpus": 0}, ["num_gpus", "0"]),
        ({"sequence_length": -1}, ["sequence_length", "-1"]),
        ({"micro_batch_size": 0}, ["micro_batch_size", "0"]),
        ({"gradient_accumulation_steps": 0}, ["gradient_accumulation_steps"]),
        ({"num_steps": 0}, ["num_steps"]),
        ({"log_every": 0}, ["log_every"]),
        ({"learning_rate": 0}, ["learning_rate", "try 0.0003"]),
        ({"learning_rate": "nan"}, ["learning_rate", "nan"]),
        ({"learning_rate": float("inf")}, ["learning_rate", "inf"]),
        ({"weight_decay": -0.1}, ["weight_decay", "-0.1"]),
        ({"weight_decay": float("nan")}, ["weight_decay", "nan"]),
        ({"seed": -1}, ["seed", "-1"]),
        ({"seed": 2**32}, ["seed", str(2**32)]),  # NumPy takes no larger one
        ({"lr_warmup_steps": -1}, ["lr_warmup_steps"]),
        ({"num_warmup_steps": -1}, ["num_warmup_steps"]),
        ({"max_grad_norm": 0}, ["max_grad_norm", "none"]),
        ({"adam_beta2": 1}, ["adam_beta2", "0.999"]),
    ],
)
def test_wrong_value_is_refused_in_one_line(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        make_config(values)
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("values", "field", "remedy"),
    [
        ({"num_steps": 10, "num_warmup_steps": 10}, "num_warmup_steps", "lower"),
        ({"strategy": "none", "num_gpus": 2}, "strategy", "num_gpus=1"),
        ({"fp8_all_gather": True}, "fp8_all_gather", "fp8_all_gather=false"),
        ({"precision": "fp8_rowwise", "fp8_all_gather": True}, "fp8_all_gather", "tensorwise"),
        ({"precision": "fp8", "fp8_all_gather": True, "strategy": "ddp"}, "fp8_all_gather", "set"),
        ({"precision": "fp8_rowwise_gw_hp", "strategy": "ddp"}, "precision", "strategy=fsdp2"),
        (IN_BACKWARD | {"max_grad_norm": 1.0}, "optimizer_step", "max_grad_norm=none"),
        (IN_BACKWARD | {"strategy": "ddp"}, "optimizer_step", "after_backward"),
        (IN_BACKWARD | EARLY, "optimizer_step", "use after_backward"),
        (IN_BACKWARD | {"optimizer_state": "bf16"}, "optimizer_step", "optimizer_state=fp32"),
        (IN_BACKWARD | FP16, "optimizer_step", "use after_backward"),
        (EARLY | {"path": "tuned"}, "loss_head", "use plain"),
        (FP16 | {"loss_head": "chunked"}, "loss_head", "use compiled"),
        ({"reshard_after_forward": "third"}, "reshard_after_forward", "half, true, false"),
        ({"reshard_after_forward": False, "strategy": "none"}, "reshard_after_forward", "fsdp2"),
        ({"reshard_after_forward": "half", "strategy": "ddp"}, "reshard_after_forward", "fsdp2"),
        ({"gather_cast": "compiled"}, "gather_cast", "precision=fp8_tensorwise"),
        ({"gather_cast": "compiled", "precision": "fp8_rowwise", "num_gpus": 2}, "gather_cast",
         "precision=fp8_tensorwise"),
        ({"allocator": "expanding"}, "allocator", "did you mean 'expandable'"),
        ({"compile_mode": "reduce-overhead", "compile": False}, "compile_mode", "compile=true"),
        ({"step_launch": "as_graph", "attention_mask": "causal"}, "step_launch",
         "update_kernel=one_pass"),
        (GRAPH | {"gradient_accumulation_steps": 2}, "step_launch", "accumulation_steps=1"),
        (GRAPH | {"precision": "fp8", "precision_schedule": "bf16:5,fp8"}, "step_launch",
         "leave precision_schedule out"),
        (GRAPH | FP16, "step_launch", "overflows; use by_kernel"),
        (GRAPH | {"activation_checkpointing": True}, "step_launch", "checkpointing=false"),
        (GRAPH | {"compile_mode": "reduce-overhead"}, "step_launch", "use default"),
        (GRAPH | {"num_warmup_steps": 4}, "step_launch", "num_warmup_steps=5"),
        (GRAPH | {"attention_mask": "checked"}, "step_launch", "attention_mask=causal"),
        ({"clipping": "in_update"}, "clipping", "max_grad_norm=1"),
        ({"clipping": "in_update", "max_grad_norm": 1.0, "optimizer_state": "fp8"}, "clipping",
         "optimizer_state=fp32"),
        ({"gradient_pool": "shared"}, "gradient_pool", "strategy=fsdp2 on several GPUs"),
        (SHARED | {"strategy": "ddp"}, "gradient_pool", "strategy=fsdp2"),
        (SHARED | IN_BACKWARD, "gradient_pool", "optimizer_step=after_backward"),
        (SHARED | {"untrained": "model.layers.0.*"}, "gradient_pool", "use own"),
        (SHARED | {"master_dtype": "bf16"}, "gradient_pool", "master_dtype=fp32"),
        ({"gradient_copy": "foreach"}, "gradient_copy", "strategy=fsdp2 on several GPUs"),
        ({"noise_at_steps": [0], "num_gpus": 2}, "noise_at_steps", "num_gpus=1"),
        ({"noise_at_steps": [0], "master_dtype": "bf16"}, "noise_at_steps", "master_dtype=fp32"),
        (EARLY | {"noise_at_steps": [0]}, "noise_at_steps", "optimizer_binding=after_conversion"),
        (EARLY | FSDP2 | {"master_dtype": "bf16"}, "master_dtype", "master_dtype=fp32"),
        (FP16 | {"master_dtype": "bf16"}, "precision", "master_dtype=fp32"),
        (FP16 | EARLY, "precision", "after_conversion"),
        (FP16 | {"fp8_all_gather": True}, "fp8_all_gather", "set .*=false"),
        (FP16 | {"precision_schedule": "bf16:5,fp8_tensorwise"}, "precision_schedule",
         "not precision=fp16; use precision=fp8_tensorwise"),
        ({"precision": "bf16", "precision_schedule": "bf16:5,fp8"}, "precision_schedule",
         "needs an FP8 precision .*; use precision=fp8_tensorwise"),
        ({"precision": "fp8", "precision_schedule": "bf16:200,fp8"}, "precision_schedule",
         "outside the run's num_steps=100; give bf16:1,fp8_tensorwise, for"),
        ({"precision": "fp8", "precision_schedule": "bf16:50,fp8:20,bf16"}, "precision_schedule",
         "in turns, each to a later step, the last without one; give bf16:1,fp8_tensorwise"),
        ({"optimizer_state": "bf16", "master_dtype": "bf16"}, "optimizer_state", "leave it out"),
        (EARLY | {"optimizer_state": "fp8"}, "optimizer_state", "use fp32"),
        ({"optimizer_state": "fp8", "checkpoint_every": 5}, "optimizer_state", "use bf16"),
        (KEPT | {"strategy": "fsdp2"}, "weight_cast", "strategy=none"),
        (KEPT | {"precision": "fp8_rowwise"}, "weight_cast", "precision=fp8_tensorwise"),
        (KEPT | {"precision_schedule": "bf16:5,fp8"}, "weight_cast", "use each_pass"),
        (KEPT | EARLY, "weight_cast", "use each_pass"),
        (ONE_PASS | {"strategy": "ddp", "num_gpus": 2}, "update_kernel", "strategy=none or fsdp2"),
        (ONE_PASS | {"optimizer_state": "bf16"}, "update_kernel", "optimizer_state=fp32"),
        (ONE_PASS | EARLY, "update_kernel", "use torch"),
        ({"gradient_dtype": "compute"}, "gradient_dtype", "update_kernel=one_pass"),
        (NARROW | {"gradient_accumulation_steps": 2}, "gradient_dtype", "accumulation_steps=1"),
        (NARROW | {"strategy": "fsdp2", "num_gpus": 2}, "gradient_dtype", "strategy=none"),
        (NARROW | {"master_dtype": "bf16"}, "gradient_dtype", "changes nothing"),
        (NARROW | {"max_grad_norm": 1.0}, "gradient_dtype", "clipping=in_update"),
        (NARROW | {"precision": "fp8"}, "gradient_dtype", "weight_cast=each_update"),
        (NARROW | FP16, "gradient_dtype", "use master"),
        (NARROW | {"compile_mode": "reduce-overhead"}, "gradient_dtype", "never tried"),
        ({"precision": "fp8", "transposes": "separate"}, "transposes", "weight_cast=each_update"),
        ({"precision": "fp8", "cast_kernels": "both_layouts"}, "cast_kernels", "swiglu=kernels"),
        ({"precision": "fp8", "num_gpus": 2, "fp8_all_gather": False, "path": "tuned",
          "transposes": "separate"}, "transposes", "fp8_all_gather=true"),
        ({"precision": "fp8", "swiglu": "kernels"}, "swiglu", "weight_cast=each_update"),
        ({"collectives": "copy_engines"}, "collectives", "several GPUs"),
        ({"num_gpus": 4, "num_nodes": 2, "collectives": "copy_engines"}, "collectives", "use nccl"),
        ({"num_gpus": 2, "collectives": "copy_engines", "gradient_accumulation_steps": 2},
         "collectives", "use nccl, or gradient_reduction=each_pass"),
        (PASSES | {"num_gpus": 1}, "gradient_reduction", "several GPUs"),
        (PASSES | {"gradient_accumulation_steps": 1}, "gradient_reduction", "leave it out"),
        (PASSES | {"master_dtype": "bf16"}, "gradient_reduction", "use last_pass"),
        (PASSES | {"gradient_pool": "shared"}, "gradient_pool", "last_pass"),
        (PASSES | {"collectives": "copy_engines", "gradient_norm": "as_summed"}, "gradient_norm",
         "use separate"),
        ({"num_gpus": 2, "gradient_norm": "as_summed"}, "gradient_norm", "copy_engines"),
        ({"gpu_links": "unused"}, "gpu_links", "on one GPU"),
        (COPIES | {"gpu_links": "unused"}, "gpu_links", "use collectives=nccl"),
        ({"num_gpus": 2, "gradient_copy": "reduce_stream"}, "gradient_copy", "copy_engines"),
        ({"gradient_norm": "by_kernel"}, "gradient_norm", "strategy=none"),
        (NARROW | {"gradient_norm": "by_kernel", "optimizer_step": "in_backward"}, "gradient_norm",
         "after_backward"),
        ({"gradient_norm": "as_summed", "optimizer_step": "in_backward"} | COPIES, "gradient_norm",
         "after_backward"),
        ({"gradient_norm": "as_summed", "max_grad_norm": 1.0} | COPIES, "gradient_norm",
         "clipping=in_update"),
        ({"gradient_norm": "as_summed", "master_dtype": "bf16"} | COPIES, "gradient_norm",
         "rounds"),
        ({"gradient_norm": "as_summed", "untrained": "*.q_proj"} | COPIES, "gradient_norm",
         "separate"),
        ({"num_gpus": 2, "collectives": "copy_engines", "precision": "fp16"}, "collectives",
         "use nccl"),
    ],
)  # fmt: skip
def test_values_that_exclude_each_other_are_refused(
    values: dict[str, Any], field: str, remedy: str
) -> None:
    with pytest.raises(UserError, match=rf"^{field}: .*{remedy}"):
        make_config(values)


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - RETIRED.keys()))
def test_what_other_trainers_offer_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(UserError, match=f"{name}: 2: .*support"):
        make_config({name: 2})
    with pytest.raises(UserError, match=name):
        make_config({name: True})
    # Switched off, it says nothing.
    assert make_config({name: False}) == make_config({name: 1}) == make_config({})


@pytest.mark.parametrize("name", sorted(RETIRED))
def test_a_switch_that_was_taken_out_is_refused_but_as_all_runs_have_it(name: str) -> None:
    for value in (1, 2, True):
        with pytest.raises(UserError, match=f"{name}: {value}: it was taken out: .*docs/log"):
            make_config({name: value})
    assert make_config({name: RETIRED[name].plain}) == make_config({name: None}) == make_config({})
