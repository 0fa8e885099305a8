"""What the tuned path sets, and what it leaves to the user."""

from pathlib import Path
from typing import Any

import pytest

from fp8study.core.config import make_config
from fp8study.core.path.choices import HEAD
from tests.checkout import tiny_folder

AS_DOCUMENTED = {
    "loss_head": "plain", "optimizer_step": "after_backward", "attention": "default",
    "reshard_after_forward": True, "compile_mode": "default",
    "step_launch": "by_kernel", "gather_cast": "eager",
    "allocator": "default", "clipping": "separate", "gradient_reduction": "last_pass",
    "gradient_pool": "own",
    "gradient_copy": "chunk_cat", "attention_mask": "checked", "weight_cast": "each_pass",
    "update_kernel": "torch", "gradient_dtype": "master", "transposes": "fused",
    "swiglu": "compiled", "cast_kernels": "one_layout",
    "collectives": "nccl", "gradient_norm": "separate", "skip": ("lm_head",),
}  # fmt: skip
ON_ONE_GPU = AS_DOCUMENTED | {
    "loss_head": "chunked", "optimizer_step": "in_backward", "attention": "cudnn",
    "allocator": "expandable", "attention_mask": "causal",
}  # fmt: skip
IN_ONE_PASS = ON_ONE_GPU | {"update_kernel": "one_pass", "gradient_dtype": "compute"}
ON_SEVERAL = ON_ONE_GPU | {"reshard_after_forward": "half", "gradient_copy": "foreach"}
SHARDS = ON_SEVERAL | {"update_kernel": "one_pass", "collectives": "copy_engines"}
CAST_ONCE = {"weight_cast": "each_update", "swiglu": "kernels"}
KEPT = CAST_ONCE | {"gather_cast": "compiled"}
APART = {"transposes": "separate", "cast_kernels": "both_layouts"}
COPIED = APART | {"gradient_copy": "reduce_stream"}
WIDE = {"gradient_dtype": "master"}
PASSES, REDUCED = {"gradient_accumulation_steps": 2}, {"gradient_reduction": "each_pass"}
LATER = {"optimizer_step": "after_backward"}
CLIPPED = LATER | {"clipping": "in_update"}
BY_KERNEL, AS_SUMMED = {"gradient_norm": "by_kernel"}, {"gradient_norm": "as_summed"}
CHOSEN = {"loss_head": "plain", "reshard_after_forward": "half"}
ON_TWO = {"path": "tuned", "num_gpus": 2}
ALONE = {"path": "tuned", "strategy": "none"}
IN_FP8 = {"precision": "fp8", "model": "llama-3.1-8b"}  # its loss head has a weight of its own
HEAD_TOO = {"skip": ()}
UNTIED = {"hidden_size": 64, "vocab_size": 2048, "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, AS_DOCUMENTED),
        ({"strategy": "none"}, AS_DOCUMENTED),
        ({"max_grad_norm": 1.0}, AS_DOCUMENTED),
        ({"loss_head": "compiled"}, AS_DOCUMENTED | {"loss_head": "compiled"}),
        (ALONE, IN_ONE_PASS),
        (ALONE | {"precision": "fp8"}, IN_ONE_PASS | CAST_ONCE | APART | HEAD_TOO),
        (
            ALONE | {"precision": "fp8", "transposes": "fused"},
            IN_ONE_PASS | CAST_ONCE | HEAD_TOO,
        ),
        (
            ALONE | {"precision": "fp8", "swiglu": "compiled"},
            IN_ONE_PASS | {"weight_cast": "each_update"} | HEAD_TOO,
        ),
        (
            ALONE | {"precision": "fp8", "cast_kernels": "one_layout"},
            IN_ONE_PASS | CAST_ONCE | HEAD_TOO,
        ),
        (ON_TWO | {"precision": "fp8", "gradient_copy": "foreach"}, SHARDS | KEPT),
        (
            ALONE | {"precision": "fp8", "update_kernel": "torch", "weight_cast": "each_update"},
            ON_ONE_GPU | {"weight_cast": "each_update"},
        ),
        (ALONE | IN_FP8, IN_ONE_PASS | CAST_ONCE | APART | HEAD_TOO),
        (ALONE | IN_FP8 | {"skip": "lm_head"}, IN_ONE_PASS | CAST_ONCE | APART),
        (ALONE | IN_FP8 | {"model": "./mine"}, IN_ONE_PASS | CAST_ONCE | APART),
        (ON_TWO | IN_FP8 | {"model": "meta-llama/Llama-3.1-8B"}, SHARDS | KEPT | COPIED | HEAD_TOO),
        (ON_TWO | IN_FP8 | {"model": "meta-llama/Llama-3.2-1B"}, SHARDS | KEPT | COPIED),
        (ON_TWO | IN_FP8 | {"model": "someone/else"}, SHARDS | KEPT | COPIED),
        (
            ALONE | {"precision": "fp8", "step_launch": "as_graph"},
            IN_ONE_PASS | CAST_ONCE | APART | HEAD_TOO | {"step_launch": "as_graph"},
        ),
        (
            ALONE | IN_FP8 | {"step_launch": "as_graph"},
            IN_ONE_PASS | CAST_ONCE | APART | HEAD_TOO | {"step_launch": "as_graph"},
        ),
        (
            ALONE | IN_FP8 | {"loss_head": "compiled"},
            IN_ONE_PASS | CAST_ONCE | APART | {"loss_head": "compiled"},
        ),
        (ALONE | IN_FP8 | {"precision": "bf16"}, IN_ONE_PASS),
        (ALONE | IN_FP8 | {"precision": "fp8_rowwise"}, IN_ONE_PASS | WIDE),
        (ON_TWO | IN_FP8, SHARDS | KEPT | COPIED | HEAD_TOO),
        (ON_TWO | IN_FP8 | {"num_gpus": 4}, SHARDS | KEPT | {"collectives": "nccl"} | HEAD_TOO),
        (ON_TWO | IN_FP8 | {"num_gpus": 8}, SHARDS | KEPT | {"collectives": "nccl"}),
        (
            ON_TWO | IN_FP8 | {"num_gpus": 4, "num_nodes": 2},
            SHARDS | KEPT | {"collectives": "nccl"},
        ),
        (IN_FP8, AS_DOCUMENTED),
        (ALONE | {"precision": "fp8_rowwise"}, IN_ONE_PASS | WIDE),
        (ALONE | {"precision": "fp8", "precision_schedule": "bf16:9,fp8"}, IN_ONE_PASS | WIDE),
        (ALONE | {"precision": "fp8", "update_kernel": "torch"}, ON_ONE_GPU),
        (ALONE | {"precision": "fp8", "weight_cast": "each_pass"}, IN_ONE_PASS | WIDE),
        (ALONE | {"precision": "fp8", "fp8_all_gather": True}, IN_ONE_PASS | WIDE),
        (ALONE | PASSES | {"max_grad_norm": 1.0}, IN_ONE_PASS | WIDE | CLIPPED),
        (ALONE | PASSES | IN_FP8, IN_ONE_PASS | WIDE | CAST_ONCE | APART | HEAD_TOO),
        (ALONE | PASSES | {"activation_checkpointing": True}, ON_ONE_GPU),
        (ALONE | {"activation_checkpointing": True}, ON_ONE_GPU),
        (ALONE | {"master_dtype": "bf16"}, ON_ONE_GPU),
        (ALONE | {"max_grad_norm": 1.0}, IN_ONE_PASS | CLIPPED | BY_KERNEL),
        (
            ALONE | {"max_grad_norm": 1.0, "clipping": "separate"},
            IN_ONE_PASS | WIDE | LATER | BY_KERNEL,
        ),
        (ALONE | {"max_grad_norm": 1.0, "update_kernel": "torch"}, ON_ONE_GPU | CLIPPED),
        ({"path": "tuned"}, IN_ONE_PASS),
        (ALONE | {"strategy": "fsdp2"}, ON_ONE_GPU | {"reshard_after_forward": False}),
        (ALONE | {"strategy": "fsdp2"} | CHOSEN, ON_ONE_GPU | CHOSEN),
        (ON_TWO, SHARDS),
        (ON_TWO | {"precision": "fp8"}, SHARDS | KEPT | COPIED),
        (
            ON_TWO | {"precision": "fp8", "collectives": "nccl"},
            SHARDS | KEPT | {"collectives": "nccl"},
        ),
        (
            ON_TWO | {"precision": "fp8", "num_gpus": 4},
            SHARDS | KEPT | {"collectives": "nccl"},
        ),
        (
            ON_TWO | {"precision": "fp8", "compile_mode": "reduce-overhead"},
            SHARDS | KEPT | {"compile_mode": "reduce-overhead"},
        ),
        (ON_TWO | {"precision": "fp8", "fp8_all_gather": False}, SHARDS),
        (ON_TWO | {"precision": "fp8", "compile": False}, SHARDS),
        (ON_TWO | {"precision": "fp8_rowwise"}, SHARDS),
        (
            ON_TWO | {"precision": "fp8", "update_kernel": "torch"},
            ON_SEVERAL | {"gather_cast": "compiled"},
        ),
        (ON_TWO | {"strategy": "ddp"}, ON_ONE_GPU | LATER),
        (ON_TWO | LATER, SHARDS | LATER | {"gradient_pool": "shared"}),
        (
            ON_TWO | {"max_grad_norm": 1.0},
            SHARDS | CLIPPED | {"gradient_pool": "shared"} | AS_SUMMED,
        ),
        (
            ON_TWO | {"max_grad_norm": 1.0, "collectives": "nccl"},
            SHARDS | CLIPPED | {"gradient_pool": "shared", "collectives": "nccl"},
        ),
        (
            ON_TWO | {"max_grad_norm": 1.0, "clipping": "separate"},
            SHARDS | LATER | {"gradient_pool": "shared"},
        ),
        (ON_TWO | PASSES, SHARDS | REDUCED),
        (ON_TWO | PASSES | {"max_grad_norm": 1.0}, SHARDS | REDUCED | CLIPPED),
        (ON_TWO | PASSES | IN_FP8, SHARDS | REDUCED | KEPT | COPIED | HEAD_TOO),
        (
            ON_TWO | PASSES | {"gradient_reduction": "last_pass"},
            SHARDS | {"collectives": "nccl"},
        ),
        (ON_TWO | PASSES | {"collectives": "nccl"}, SHARDS | {"collectives": "nccl"}),
        (
            ON_TWO | PASSES | LATER | {"gradient_pool": "shared"},
            SHARDS | LATER | {"gradient_pool": "shared", "collectives": "nccl"},
        ),
        (ON_TWO | PASSES | {"num_gpus": 4}, SHARDS | {"collectives": "nccl"}),
        (ON_TWO | PASSES | {"master_dtype": "bf16"}, ON_SEVERAL),
        (ON_TWO | {"num_gpus": 4}, SHARDS | {"collectives": "nccl"}),
        (ON_TWO | {"num_nodes": 2}, SHARDS | {"collectives": "nccl"}),
        (ON_TWO | {"num_gpus": 16, "num_nodes": 2, "sharding": "hybrid"}, ON_SEVERAL),
        (ON_TWO | {"max_grad_norm": 1.0, "master_dtype": "bf16"}, ON_SEVERAL | CLIPPED),
        (ON_TWO | {"max_grad_norm": 1.0, "untrained": "*.q_proj"}, SHARDS | CLIPPED),
    ],
)
def test_the_path_sets_only_what_was_left_to_it(
    values: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = make_config(values).resolved()
    assert {name: getattr(config, name) for name in AS_DOCUMENTED} == expected
    assert make_config(config.to_dict()).resolved() == config  # resolved once and for all


@pytest.mark.parametrize(
    ("settings", "num_gpus", "has_head"),
    [
        ({"tie_word_embeddings": False}, 2, True),
        ({"tie_word_embeddings": True}, 1, True),
        ({"tie_word_embeddings": True}, 2, False),  # cannot be gathered in FP8
        ({"tie_word_embeddings": None}, 1, False),  # transformers' default, not known here
        ({"tie_word_embeddings": False, "vocab_size": 50257}, 1, False),  # no FP8 GEMM takes it
        ({"tie_word_embeddings": False, "vocab_size": "many"}, 1, False),
        ({"tie_word_embeddings": False, "vocab_size": 32000}, 3, False),  # uneven shards
        ({"text_config": UNTIED, "tie_word_embeddings": False}, 2, True),
        ({"text_config": UNTIED, "tie_word_embeddings": True}, 2, False),  # they disagree
        ({"text_config": UNTIED, "tie_word_embeddings": None}, 2, False),
    ],
)
def test_of_a_folder_its_configuration_tells_whether_the_loss_head_is_fp8(
    settings: dict[str, Any], num_gpus: int, has_head: bool, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path / "mine", **settings)
    mine = {"model": folder, "num_gpus": num_gpus, "path": "tuned"}
    assert make_config(mine | {"precision": "fp8"}).resolved().skip == (() if has_head else HEAD)
    assert make_config(mine | {"precision": "bf16"}).resolved().skip == HEAD


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "[]"])
def test_of_a_broken_configuration_nothing_is_said_before_the_model_is_built(
    text: str, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path / "mine")
    Path(folder, "config.json").write_text(text, encoding="utf-8")
    asked = {"model": folder, "strategy": "none", "path": "tuned", "precision": "fp8"}
    assert make_config(asked).resolved().skip == HEAD


def test_a_folder_is_itself_though_a_preset_has_its_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meta-llama").mkdir()
    monkeypatch.chdir(tmp_path)
    name = "meta-llama/Llama-3.2-1B"
    asked = ON_TWO | {"model": name, "precision": "fp8", "strategy": "fsdp2"}
    assert make_config(asked).resolved().skip == HEAD  # tied, as on the hub
    tiny_folder(tmp_path / name, tie_word_embeddings=False)
    assert make_config(asked).resolved().skip == ()
