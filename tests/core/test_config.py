from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8study.core.config import (
    FIELD_NAMES,
    REFUSED,
    RunConfig,
    completed,
    load_config,
    make_config,
    save_config,
)
from fp8study.core.errors import UserError
from fp8study.core.fields import PLAIN
from fp8study.core.switches import RETIRED

#: For each field another valid value than that of ``make_config({"precision": "fp8"})``.
OTHER: dict[str, Any] = {
    "model": "tiny-llama", "init_from": "weights", "precision": "bf16",
    "checkpoint_every": 5, "keep_checkpoints": 3, "num_gpus": 2, "num_nodes": 2,
    "strategy": "ddp", "sharding": "hybrid", "precision_schedule": ("bf16:5", "fp8_tensorwise"),
    "sequence_length": 128, "micro_batch_size": 2, "gradient_accumulation_steps": 2,
    "num_steps": 11, "num_warmup_steps": 0, "timed_seconds": 20.0,
    "learning_rate": 1e-3, "lr_schedule": "cosine", "lr_warmup_steps": 5,
    "weight_decay": 0.1, "adam_beta2": 0.95, "max_grad_norm": 1.0,
    "seed": 1, "compile": False, "activation_checkpointing": True, "master_dtype": "bf16",
    "optimizer_state": "bf16", "optimizer_binding": "before_conversion",
    "fp8_all_gather": True, "fp8_emulate": True, "fast_accumulation": "all",
    "skip": ("lm_head", "*.o_proj"), "corpus": "tinystories", "tokenizer": "bpe",
    "log_every": 5, "untrained": ("model.layers.*",), "repeat": 1,
    "compile_cache": "fresh", "profile": False, "measure_overhead": True,
    "noise_at_steps": (0, 5), "noise_samples": 8, "validation_sequences": 4,
    "validation_points": 2,
    "runs_per_gpu": 2, "path": "tuned", "loss_head": "chunked",
    "optimizer_step": "in_backward", "attention": "cudnn", "reshard_after_forward": False,
    "compile_mode": "reduce-overhead", "gather_cast": "compiled", "allocator": "expandable",
    "clipping": "in_update", "gradient_pool": "shared",
    "gradient_copy": "foreach",
    "attention_mask": "causal", "weight_cast": "each_update", "update_kernel": "one_pass",
    "gradient_dtype": "compute", "transposes": "separate", "swiglu": "kernels",
    "collectives": "copy_engines", "gradient_norm": "as_summed",
    "cpu_ram_efficient_loading": True,
}  # fmt: skip
EARLY = {"optimizer_binding": "before_conversion"}
FP16 = {"precision": "fp16"}
IN_BACKWARD = {"optimizer_step": "in_backward"}
SHARED = {"gradient_pool": "shared", "num_gpus": 2}
KEPT = {"precision": "fp8", "strategy": "none", "weight_cast": "each_update"}
ONE_PASS = {"strategy": "none", "update_kernel": "one_pass"}
COPIES = {"num_gpus": 2, "collectives": "copy_engines"}
NARROW = ONE_PASS | {"gradient_dtype": "compute"}


def test_a_record_from_before_a_field_is_still_the_same_run() -> None:
    retired = {name: PLAIN[name] for name in RETIRED}
    config = make_config({"precision": "fp8", "num_gpus": 2}).resolved()
    older = {k: v for k, v in config.to_dict().items() if k not in ("path", "loss_head")}
    assert completed(older) == config.to_dict() | retired
    assert completed(older | {"loss_head": "chunked"}) != config.to_dict() | retired
    assert completed(older | {"from_the_future": 1})["from_the_future"] == 1
    # A switch that came later was not set, whatever its path would choose today.
    values = {"precision": "fp8", "num_gpus": 2, "path": "tuned", "update_kernel": "torch"}
    tuned = make_config(values).resolved()
    assert tuned.gather_cast == "compiled"
    older = {k: v for k, v in tuned.to_dict().items() if k not in ("gather_cast", "allocator")}
    found = completed(older)
    assert (found["gather_cast"], found["allocator"]) == ("eager", "default")
    impossible = older | {"precision": "fp4"}
    assert completed(impossible) == impossible


def test_every_field_has_another_value_to_test_with() -> None:
    assert set(OTHER) == set(FIELD_NAMES)


@pytest.mark.parametrize("name", FIELD_NAMES)
def test_every_field_survives_the_file_and_changes_the_digest(name: str, tmp_path: Path) -> None:
    usual = {"precision": "fp8"}
    usual |= {"gather_cast": {"num_gpus": 4}, "clipping": {"max_grad_norm": 1.0}}.get(name, {})
    usual |= {"strategy": "none"} if name in ("weight_cast", "update_kernel") else {}
    usual |= {
        "gradient_dtype": KEPT | ONE_PASS,
        "transposes": KEPT,
        "swiglu": KEPT,
        "gradient_norm": COPIES,
    }.get(name, {})
    spread = ("num_nodes", "gradient_pool", "gradient_copy", "collectives")
    usual |= {"num_gpus": 2} if name in spread else {}
    usual |= {"num_gpus": 4, "num_nodes": 2} if name == "sharding" else {}
    usual |= {"validation_sequences": 4} if name == "validation_points" else {}
    config = make_config(usual | {name: OTHER[name]}).resolved()
    assert getattr(config, name) == OTHER[name]
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    assert config.digest() != make_config(usual).digest()


def test_digest_ignores_the_order_and_the_spelling_of_values() -> None:
    one = make_config({"seed": 1, "precision": "fp8", "skip": ["lm_head"]})
    other = make_config({"skip": "lm_head", "precision": "fp8_tensorwise", "seed": 1.0})
    assert one == other
    assert one.digest() == other.digest()
    assert len(one.digest()) == 8


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("learning_rate", "1e-5", 1e-5),  # as YAML reads it
        ("learning_rate", 1, 1.0),
        ("num_steps", 200.0, 200),
        ("max_grad_norm", 1, 1.0),
        ("max_grad_norm", None, None),
        ("max_grad_norm", "none", None),
        ("fp8_emulate", None, None),
        ("skip", "lm_head, *.mlp.*", ("lm_head", "*.mlp.*")),
        ("skip", ["lm_head"], ("lm_head",)),
        ("skip", "", ()),
        ("skip", [], ()),
        ("precision", "fp8", "fp8_tensorwise"),
        ("strategy", "none", "none"),
        ("noise_at_steps", "50, 0", (0, 50)),
        ("noise_at_steps", 50, (50,)),  # as papermill reads -p noise_at_steps 50
        ("noise_at_steps", [50, 0.0, 50], (0, 50)),
        ("noise_at_steps", "", ()),
    ],
)
def test_values_of_text_only_interfaces_are_understood(
    name: str, given: object, expected: object
) -> None:
    value = getattr(make_config({name: given}), name)
    assert value == expected
    assert type(value) is type(expected)


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
        (EARLY | {"master_dtype": "bf16"}, "master_dtype", "master_dtype=fp32"),
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
        (NARROW | {"compile_mode": "reduce-overhead"}, "gradient_dtype", "CUDA graph"),
        ({"precision": "fp8", "transposes": "separate"}, "transposes", "weight_cast=each_update"),
        ({"precision": "fp8", "num_gpus": 2, "fp8_all_gather": False, "path": "tuned",
          "transposes": "separate"}, "transposes", "fp8_all_gather=true"),
        ({"precision": "fp8", "swiglu": "kernels"}, "swiglu", "weight_cast=each_update"),
        ({"collectives": "copy_engines"}, "collectives", "several GPUs"),
        ({"num_gpus": 4, "num_nodes": 2, "collectives": "copy_engines"}, "collectives", "use nccl"),
        ({"num_gpus": 2, "collectives": "copy_engines", "gradient_accumulation_steps": 2},
         "collectives", "use nccl"),
        ({"num_gpus": 2, "gradient_norm": "as_summed"}, "gradient_norm", "copy_engines"),
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


def test_the_tuned_path_has_what_narrow_states_and_scaled_losses_need() -> None:
    usual = make_config({"path": "tuned"}).resolved()
    narrow = make_config({"path": "tuned", "optimizer_state": "fp8"}).resolved()
    assert (usual.optimizer_step, narrow.optimizer_step) == ("in_backward", "after_backward")
    fp16 = make_config({"path": "tuned", "precision": "fp16"}).resolved()
    assert (fp16.optimizer_step, fp16.loss_head) == ("after_backward", "compiled")
    clips = {"path": "tuned", "max_grad_norm": 1.0}
    usual, narrow = (make_config(clips | {"optimizer_state": state}).resolved()
                     for state in ("fp32", "bf16"))  # fmt: skip
    assert (usual.clipping, narrow.clipping) == ("in_update", "separate")


@pytest.mark.parametrize(
    ("precision", "strategy", "num_gpus", "expected"),
    [
        ("fp8", "fsdp2", 2, True),
        ("fp8", "fsdp2", 1, False),
        ("fp8", "ddp", 2, False),
        ("fp8_rowwise", "fsdp2", 2, False),
        ("bf16", "fsdp2", 2, False),
    ],
)
def test_fp8_all_gather_is_on_where_it_helps(
    precision: str, strategy: str, num_gpus: int, expected: bool
) -> None:
    config = make_config(
        {"precision": precision, "strategy": strategy, "num_gpus": num_gpus}
    ).resolved()
    assert config.fp8_all_gather is expected


def test_effective_batch_is_the_product_of_its_parts() -> None:
    config = RunConfig(
        num_gpus=2, micro_batch_size=3, gradient_accumulation_steps=5, sequence_length=128
    )
    assert config.sequences_per_step == 30
    assert config.tokens_per_step == 3840


@pytest.mark.parametrize("content", ["", "[1, 2]", "seed: [", "\tseed: 1"])
def test_file_that_is_no_configuration_is_refused_in_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.yaml: cannot read"):
        load_config(tmp_path / "absent.yaml")


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - RETIRED.keys()))
def test_what_other_trainers_offer_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(UserError, match=f"{name}: 2: .*support"):
        make_config({name: 2})
    with pytest.raises(UserError, match=name):
        make_config({name: True})
    # Switched off, it says nothing.
    assert make_config({name: False}) == make_config({name: 1}) == make_config({})


def test_nodes_share_the_gpus_evenly_and_hybrid_shards_within_one() -> None:
    with pytest.raises(UserError, match=r"num_nodes: 2 does not divide num_gpus=3"):
        RunConfig(num_gpus=3, num_nodes=2)
    for values in ({"num_gpus": 4}, {"num_gpus": 2, "num_nodes": 2}):
        with pytest.raises(UserError, match="sharding: 'hybrid' needs strategy=fsdp2 on several"):
            RunConfig(sharding="hybrid", **values)
    full = RunConfig(num_gpus=8, num_nodes=2, path="tuned", max_grad_norm=1)
    hybrid = replace(full, sharding="hybrid")
    assert (full.num_shards, hybrid.num_shards, hybrid.gpus_per_node) == (8, 4, 4)
    assert replace(full, strategy="ddp").num_shards == 1
    pools = [config.resolved().gradient_pool for config in (full, hybrid)]
    assert pools == ["shared", "own"]
