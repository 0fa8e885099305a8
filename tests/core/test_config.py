from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8study.core.config import (
    FIELD_NAMES,
    RunConfig,
    completed,
    load_config,
    make_config,
    save_config,
)
from fp8study.core.errors import UserError
from fp8study.core.fields import PLAIN
from fp8study.core.path.switches import RETIRED
from tests.checkout import tiny_folder
from tests.core.test_refused_values import COPIES, KEPT, ONE_PASS

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
    "compile_mode": "reduce-overhead", "step_launch": "as_graph",
    "gather_cast": "compiled", "allocator": "expandable",
    "clipping": "in_update", "gradient_reduction": "each_pass", "gradient_pool": "shared",
    "gradient_copy": "foreach",
    "attention_mask": "causal", "weight_cast": "each_update", "update_kernel": "one_pass",
    "gradient_dtype": "compute", "transposes": "separate", "swiglu": "kernels",
    "cast_kernels": "both_layouts", "collectives": "copy_engines", "gpu_links": "unused",
    "gradient_norm": "as_summed",
    "cpu_ram_efficient_loading": True,
}  # fmt: skip


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
    usual |= {
        "gradient_dtype": KEPT | ONE_PASS,
        "transposes": KEPT,
        "swiglu": KEPT,
        "cast_kernels": KEPT,
        "gradient_norm": COPIES,
        "gradient_reduction": {"gradient_accumulation_steps": 2},
        "step_launch": ONE_PASS | {"attention_mask": "causal"},
    }.get(name, {})
    spread = ("num_nodes", "gradient_reduction", "gradient_pool", "gradient_copy", "collectives",
              "gpu_links")  # fmt: skip
    usual |= {"num_gpus": 2} if name in spread else {}
    sharded = ("cpu_ram_efficient_loading", "reshard_after_forward")
    usual |= {"strategy": "fsdp2"} if name in sharded else {}
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


def test_a_folder_or_a_file_has_one_name_however_it_is_written(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "mine")
    (tmp_path / "my.txt").write_text("once upon a time " * 500)
    plain = {"model": folder, "corpus": f"text:{tmp_path}/my.txt"}
    other = {"model": f"{tmp_path}/./mine/", "corpus": f"text:{tmp_path}//my.txt"}
    assert make_config(plain) == make_config(other)
    for name in ("owner/name", "./owner/name", "~/mine", "../mine"):
        assert make_config({"model": name}).model == name


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


def test_nodes_share_the_gpus_evenly_and_hybrid_shards_within_one() -> None:
    with pytest.raises(UserError, match=r"num_nodes: 2 does not divide num_gpus=3"):
        RunConfig(num_gpus=3, num_nodes=2)
    for values in ({"num_gpus": 4}, {"num_gpus": 2, "num_nodes": 2}):
        with pytest.raises(UserError, match="sharding: 'hybrid' needs strategy=fsdp2 on several"):
            RunConfig(sharding="hybrid", **values)
    full = RunConfig(num_gpus=8, num_nodes=2, path="tuned", max_grad_norm=1)
    hybrid, replicated = replace(full, sharding="hybrid"), replace(full, strategy="ddp")
    assert [c.resolved().num_shards for c in (full, hybrid, replicated)] == [8, 4, 1]
    assert hybrid.gpus_per_node == 4
    pools = [config.resolved().gradient_pool for config in (full, hybrid)]
    assert pools == ["shared", "own"]
