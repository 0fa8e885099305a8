"""The tuned path against the plain one: the same weights, the same records, less alive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fp8study.core.audit_rules import cautions, problems
from fp8study.core.records import read_metrics
from fp8study.run.launch import RunFailed
from tests.checkout import ROOT, tiny_folder
from tests.train.exchange_comparisons import PASSES
from tests.train.tiny_runs import Run, Train, launch_tiny
from tests.train.updates_worker import ONE_PASS

WORKER = ("-m", "tests.train.updates_worker")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
#: Strategy and processes → how the worker is started.
STARTS: dict[tuple[str, int], tuple[str, ...]] = {
    ("none", 1): (),
    ("fsdp2", 1): (*TORCHRUN, "--nproc-per-node=1"),
    ("fsdp2", 2): (*TORCHRUN, "--nproc-per-node=2"),
}


def assert_alike(found: dict[str, Any]) -> None:
    """Two ways to update give the same weights, but for rounding."""
    plain, own = found["norms"]
    assert own[0] == pytest.approx(plain[0], rel=1e-6)
    # Rounding turns some of Adam's steps around, where there is next to nothing to divide.
    assert own == pytest.approx(plain, rel=0.05)
    assert found["mean_difference"] < 5e-5  # of weights that moved by 1e-2 and more


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Return what the worker found; it is started once for each way."""

    @cache
    def results(strategy: str, num_processes: int) -> dict[str, Any]:
        out = tmp_path_factory.mktemp("updates") / "found.json"
        command = [sys.executable, *STARTS[strategy, num_processes], *WORKER, str(out)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    return results


@pytest.mark.parametrize(("strategy", "num_processes"), STARTS)
def test_updates_in_the_backward_pass_give_the_same_weights(
    compared: Callable[..., dict[str, Any]], strategy: str, num_processes: int
) -> None:
    found = compared(strategy, num_processes)
    cases = {"", "tied", "bf16 masters", "checkpointed", "fp8", "chunked", "planted"}
    cases |= {"fp8 head", "chunked fp8 head", "tensorwise head", "chunked tensorwise head"}
    cases |= {"resident", "half"} if strategy == "fsdp2" else set()
    found = {case: result for case, result in found.items() if case[0] in "12"}
    assert set(found) == {f"{accumulation}-{case}" for accumulation in (1, 2) for case in cases}
    for case, result in found.items():
        # Fused AdamW treats each number by itself, so nothing at all may differ.
        assert result["difference"] == 0, case
        assert result["moved"] == (1 if "planted" not in case else pytest.approx(18 / 21)), case
        plain, own = result["norms"]
        # BF16 masters have BF16 gradients, whose norm the plain path rounds to BF16.
        assert own == pytest.approx(plain, rel=4e-3 if "bf16" in case else 1e-5), case


@pytest.mark.parametrize(("strategy", "num_processes"), STARTS)
@pytest.mark.parametrize(
    ("plain", "chunked"),
    [("", "chunked"), ("fp8 head", "chunked fp8 head"),
     ("tensorwise head", "chunked tensorwise head")],
)  # fmt: skip
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_chunked_head_trains_as_the_plain_one(
    compared: Callable[..., dict[str, Any]], strategy: str, num_processes: int,
    plain: str, chunked: str, accumulation: int,
) -> None:  # fmt: skip
    found = compared(strategy, num_processes)
    expected, own = (found[f"{accumulation}-{case}"]["norms"][0] for case in (plain, chunked))
    # With tensorwise scales a label's gradient is rounded against its bound, here 1/256 above it.
    assert own[0] == pytest.approx(expected[0], rel=1 / 128 if "tensorwise" in plain else 2e-3)
    # Another rounding of small gradients turns some of Adam's steps around, in FP8 more of them.
    near = {"": 0.01, "fp8 head": 0.05, "tensorwise head": 0.1}[plain]
    assert own == pytest.approx(expected, rel=near)


@pytest.mark.parametrize(("strategy", "num_processes"), STARTS)
def test_only_one_layers_gradients_are_ever_alive(
    compared: Callable[..., dict[str, Any]], strategy: str, num_processes: int
) -> None:
    found = compared(strategy, num_processes)
    for case in ("1-", "1-checkpointed", "1-chunked"):
        assert found[case]["most_alive"] < 0.4, case  # two layers, an embedding and a head
    # Accumulating, one process keeps all of them; FSDP2 keeps them unsharded, elsewhere.
    assert found["2-"]["most_alive"] == (1 if strategy == "none" else found["1-"]["most_alive"])


@pytest.mark.parametrize(("strategy", "num_processes"), STARTS)
@pytest.mark.parametrize("case", ["1-", "2-", "1-fp8", "2-fp8", "1-bf16 masters", "2-bf16 masters"])
def test_the_update_clips_sharded_gradients_as_a_pass_before_it_would(
    compared: Callable[..., dict[str, Any]], strategy: str, num_processes: int, case: str
) -> None:
    found = compared(strategy, num_processes)[f"clipping-{case}"]
    assert min(found["norms"][0]) > 0.1  # so that every step clips
    assert_alike(found)


@pytest.mark.parametrize("case", ONE_PASS)
def test_shards_updated_in_one_pass_are_those_of_torchs_own(
    compared: Callable[..., dict[str, Any]], case: str
) -> None:
    found = compared("fsdp2", 2)[f"one pass-{case}"]
    assert_alike(found)
    assert found["scales_agree"] == [True] * 3 * ("fp8" in case)


@pytest.mark.parametrize("case", PASSES)
def test_gradients_reduced_after_each_pass_add_up_to_those_of_the_last(
    compared: Callable[..., dict[str, Any]], case: str
) -> None:
    found = compared("fsdp2", 2)[f"passes-{case}"]
    assert_alike(found)
    assert found["between_passes"] == [0, 1]  # each share, from the first pass on


def test_gathering_can_be_tuned_without_changing_weights(
    compared: Callable[..., dict[str, Any]],
) -> None:
    found = compared("fsdp2", 2)["gathering"]
    # 14 weights; in both steps after the first two layers forward, and one of them again backward.
    # None where they are cast after each update.
    assert found["num_casts"] == [2 * (14 + 7), 0]
    assert found["num_gated"] == 3 * 2  # a step and layer
    assert found["difference"] == 0
    assert found["kept"] == {"True": [False, False], "half": [False, True], "False": [True, True]}


def test_gradients_reduced_in_our_ways_are_the_same(
    compared: Callable[..., dict[str, Any]],
) -> None:
    norms = compared("fsdp2", 2)["norming"]
    assert norms["num_taken"] == 3 and norms["difference"] < 1e-5
    assert norms["norms"][1] == pytest.approx(norms["norms"][0], rel=1e-6)
    found = compared("fsdp2", 2)["reducing"]
    plain, shared = "DefaultReduceScatter", "PooledReduceScatter"
    sent = "all to all, bfloat16"
    assert found["used"] == [
        [plain], [shared], [sent], [shared, sent], [plain, "foreach", "together"],
        [sent, "together"], [sent, "put off", "together"],
    ]  # fmt: skip
    assert found["difference"] == found["tied_difference"] == 0


TUNED = [
    {"strategy": "none"},
    {"strategy": "none", "precision": "fp8", "gradient_accumulation_steps": 2,
     "untrained": "*.q_proj", "lr_schedule": "linear", "skip": "lm_head"},
    {"strategy": "fsdp2", "num_gpus": 2, "precision": "fp8"},
    {"strategy": "ddp", "num_gpus": 2},
]  # fmt: skip


@pytest.mark.parametrize("values", TUNED, ids=lambda v: f"{v['strategy']}-{v.get('precision')}")
def test_a_tuned_run_is_the_plain_one_with_less_alive(run: Run, values: dict[str, Any]) -> None:
    (plain, plain_dir), (tuned, tuned_dir) = run(**values), run(**values, path="tuned")
    rows, own_rows = read_metrics(plain_dir), read_metrics(tuned_dir)
    assert [row["loss"] for row in own_rows] == pytest.approx(
        [row["loss"] for row in rows], abs=5e-3
    )
    assert own_rows[0]["gradient_norm"] == pytest.approx(rows[0]["gradient_norm"], rel=1e-3)
    assert own_rows[1]["gradient_norm"] is None
    assert problems(tuned.audit) == cautions(tuned.audit) == []
    names = ["num_trainable", "num_planted", "master_dtypes", "optimizer_state_dtypes", "skipped"]
    is_narrow = tuned.config["gradient_dtype"] == "compute"
    narrow = ["bfloat16"] * is_narrow  # those of linear layers
    assert tuned.audit["gradient_dtypes"] == narrow + plain.audit["gradient_dtypes"]
    assert is_narrow == (values == {"strategy": "none"})
    for name in names:
        assert tuned.audit[name] == plain.audit[name], name
    assert tuned.model == plain.model  # the FLOPs too
    memory, plain_memory = (r.instruments["memory"] for r in (tuned, plain))
    assert memory["optimizer_gib"] == plain_memory["optimizer_gib"]
    saves = values["strategy"] != "ddp" and "gradient_accumulation_steps" not in values
    assert (memory["gradients_gib"] < 0.3 * plain_memory["gradients_gib"]) == saves


CASTS: list[dict[str, Any]] = [
    {"path": "tuned"},
    {"path": "tuned", "max_grad_norm": 0.1, "skip": "", "gradient_accumulation_steps": 2,
     "validation_sequences": 4},
    {"path": "tuned", "max_grad_norm": 0.1, "skip": "", "activation_checkpointing": True},
    {"path": "tuned", "strategy": "fsdp2", "num_gpus": 2, "gather_cast": "compiled"},
]  # fmt: skip


@pytest.mark.parametrize(
    "values", [*CASTS[:2], *(pytest.param(way, marks=pytest.mark.long) for way in CASTS[2:])],
    ids=lambda v: "-".join(map(str, v)),
)  # fmt: skip
def test_weights_cast_once_an_update_train_to_the_bit_as_cast_in_each_pass(
    run: Run, values: dict[str, Any]
) -> None:
    values = {"strategy": "none", "precision": "fp8"} | values
    plain = {"update_kernel": "torch", "gradient_dtype": "master"}
    (each, each_dir), (record, run_dir) = (
        run(**values, **plain, weight_cast=cast) for cast in ("each_pass", "each_update")
    )
    rows, own_rows = (
        [(row["loss"], row["gradient_norm"]) for row in read_metrics(d)]
        for d in (each_dir, run_dir)
    )
    assert own_rows == rows
    assert problems(record.audit) == []
    assert record.audit["num_stale_casts"] == 0
    assert "num_stale_casts" not in each.audit
    assert record.results.get("validation_loss") == each.results.get("validation_loss")
    one_pass, one_dir = run(**values, weight_cast="each_update", update_kernel="one_pass")
    losses = [row["loss"] for row in read_metrics(one_dir)]
    assert losses == pytest.approx([loss for loss, _ in rows], abs=0.02)
    assert problems(one_pass.audit) == []


@pytest.mark.parametrize("cast", [{"gradient_accumulation_steps": 2}, {"path": "tuned"}])
def test_swiglu_by_kernels_trains_to_the_bit_as_torchs(run: Run, cast: dict[str, Any]) -> None:
    # Emulated GEMMs add up in another order where a factor is a transposed view.
    values = {"strategy": "none", "precision": "fp8", "weight_cast": "each_update",
              "transposes": "separate", "skip": "lm_head"} | cast  # fmt: skip
    (_, plain_dir), (record, run_dir) = (run(**values, swiglu=by) for by in ("compiled", "kernels"))
    losses = [[row["loss"] for row in read_metrics(d)] for d in (plain_dir, run_dir)]
    assert losses[0] == losses[1]
    assert problems(record.audit) == []


NARROW: list[dict[str, Any]] = [
    {"precision": "bf16"},
    {"precision": "bf16", "max_grad_norm": 0.1, "activation_checkpointing": True},
    {"precision": "fp8", "weight_cast": "each_update", "transposes": "separate",
     "max_grad_norm": 0.1, "skip": "*.o_proj"},
    {"precision": "fp8", "weight_cast": "each_update"},
]  # fmt: skip


@pytest.mark.parametrize(
    "values", [*NARROW[1::2], *(pytest.param(way, marks=pytest.mark.long) for way in NARROW[::2])],
    ids=lambda v: "-".join(map(str, v.values())),
)  # fmt: skip
def test_gradients_that_stay_narrow_train_to_the_bit_as_wide_ones(
    run: Run, values: dict[str, Any]
) -> None:
    values = values | {"strategy": "none", "path": "tuned", "update_kernel": "one_pass"}
    (wide, wide_dir), (record, run_dir) = (
        run(**values, gradient_dtype=dtype) for dtype in ("master", "compute")
    )
    losses = [[row["loss"] for row in read_metrics(d)] for d in (wide_dir, run_dir)]
    # Clipped, they follow the norm, which adds up in another order.
    near = pytest.approx(losses[0], rel=1e-3)
    assert losses[1] == (near if "max_grad_norm" in values else losses[0])
    norms = [[row["gradient_norm"] or 0.0 for row in read_metrics(d)] for d in (wide_dir, run_dir)]
    assert norms[1][0] == pytest.approx(norms[0][0], rel=1e-5)
    # Later a step whose norm jumps makes much of a last bit, on some CPUs; clipped FP8's third.
    held = 2 if values["precision"] == "fp8" and "max_grad_norm" in values else 4
    assert norms[1][:held] == pytest.approx(norms[0][:held], rel=5e-3)
    assert norms[0][0] > 0
    assert problems(record.audit) == []
    assert wide.audit["gradient_dtypes"] == ["float32"]
    assert record.audit["gradient_dtypes"] == ["bfloat16", "float32"]
    assert record.audit["num_stale_casts"] == 0
    assert record.model == wide.model


def test_a_run_whose_fp8_weights_stay_behind_says_so(train: Train, tmp_path: Path) -> None:
    values = {"strategy": "none", "precision": "fp8", "weight_cast": "each_update"}
    record = train(tmp_path, "stale:4", path="tuned", **values)
    assert record.status == "completed", record.status_detail
    (problem,) = problems(record.audit)
    assert problem.startswith("29 layers multiply with a kept weight that is not their weight's")


@pytest.mark.parametrize("swiglu", ["compiled", pytest.param("kernels", marks=pytest.mark.long)])
def test_gathered_weights_train_to_the_bit_however_they_are_transposed(
    run: Run, swiglu: str
) -> None:
    values = {"path": "tuned", "strategy": "fsdp2", "num_gpus": 2, "precision": "fp8",
              "swiglu": swiglu, "max_grad_norm": 1.0, "gather_cast": "compiled",
              "skip": "lm_head"}  # fmt: skip
    rows = {}
    for how in ("fused", "separate"):
        record, folder = run(**values, transposes=how)
        assert problems(record.audit) == []
        rows[how] = [(row["loss"], row["gradient_norm"]) for row in read_metrics(folder)]
    assert rows["separate"] == rows["fused"]


def test_the_head_that_is_asked_for_is_refused_where_it_cannot_be(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "model", model_type="granite", logits_scaling=8.0)
    with pytest.raises(RunFailed, match="loss_head: 'chunked' does not suit Granite"):
        launch_tiny(tmp_path / "run", model=model, strategy="none", loss_head="chunked")


def test_a_tuned_model_that_needs_its_masks_keeps_them_and_says_so(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "model", model_type="mistral", sliding_window=8)
    losses = []
    for path in ("plain", "tuned"):
        record = launch_tiny(tmp_path / path, model=model, strategy="none", path=path)
        said = [w for w in record.warnings if w.startswith("attention_mask")]
        assert len(said) == (path == "tuned")
        losses.append([row["loss"] for row in read_metrics(tmp_path / path)])
    assert "window of 8 tokens" in said[0]
    assert losses[1] == pytest.approx(losses[0], abs=5e-3)
