"""Records of the tuned path as it is, and as it was before it updated in one pass."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fp8study.analysis.advice.evidence import Decisions
from fp8study.analysis.decision import decision_table, judged_losses
from fp8study.analysis.laws.cells import cells_of, read_runs
from fp8study.analysis.laws.nearby import as_fp8, changed
from fp8study.analysis.leads import leads_table
from fp8study.analysis.losses import loss_gap_table
from fp8study.analysis.runs.naming import (
    BEFORE,
    COPY_ENGINES,
    GRAPH,
    IN_ONE_PASS,
    NORM_AS_SUMMED,
    NORM_BY_KERNEL,
    SHARED_POOL,
    arm_label,
    has_usual_path,
    num_kernels,
    unusual_switches,
)
from fp8study.analysis.speed import spelled_out, switch_table
from fp8study.core.config import make_config
from tests.factories import make_record, store
from tests.table_factories import frame

ALONE = {"path": "tuned", "strategy": "none"}
FP8 = ALONE | {"precision": "fp8_tensorwise", "skip": "lm_head"}
ON_TWO = {"path": "tuned", "num_gpus": 2, "max_grad_norm": 1.0}
WORDS = "weights cast each update, one pass AdamW, gradients in the compute dtype"
BY_KERNELS = "SwiGLU by kernels"
COPIED_BESIDE = "gradients copied by reduce stream"
TODAYS = "FP8 tensorwise, SwiGLU kernels, both layouts"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (ALONE, [IN_ONE_PASS]),
        (ALONE | {"max_grad_norm": 1.0}, [IN_ONE_PASS, NORM_BY_KERNEL]),
        (ALONE | {"max_grad_norm": 1.0, "gradient_norm": "separate"}, [IN_ONE_PASS]),
        (ON_TWO, [IN_ONE_PASS, COPY_ENGINES, NORM_AS_SUMMED]),
        (ON_TWO | {"gradient_norm": "separate"}, [IN_ONE_PASS, COPY_ENGINES]),
        (FP8, [IN_ONE_PASS]),
        (ALONE | {"precision": "fp8_rowwise"}, [IN_ONE_PASS]),
        (FP8 | BEFORE, []),
        (
            ALONE | {"precision": "fp8_rowwise", "attention": "flash"},
            [IN_ONE_PASS, "flash attention"],
        ),
        (FP8 | {"attention": "flash"}, [IN_ONE_PASS, "flash attention"]),
        (FP8 | {"transposes": "fused"}, [IN_ONE_PASS]),
        (FP8 | {"cast_kernels": "one_layout"}, [IN_ONE_PASS]),
        (
            FP8 | {"transposes": "separate", "cast_kernels": "one_layout"},
            [IN_ONE_PASS, "separate transposes"],
        ),
        (ON_TWO | {"precision": "fp8"}, [IN_ONE_PASS, COPY_ENGINES, NORM_AS_SUMMED]),
        (
            ON_TWO | {"precision": "fp8", "transposes": "fused"},
            [IN_ONE_PASS, COPY_ENGINES, NORM_AS_SUMMED],
        ),
        (
            ON_TWO | {"precision": "fp8", "transposes": "fused", "gradient_copy": "reduce_stream"},
            [IN_ONE_PASS, COPIED_BESIDE, COPY_ENGINES, NORM_AS_SUMMED],
        ),
        (
            ON_TWO | {"gradient_copy": "reduce_stream"},
            [IN_ONE_PASS, COPIED_BESIDE, COPY_ENGINES, NORM_AS_SUMMED],
        ),
        (FP8 | {"gradient_dtype": "master"}, ["weights cast each update", "one pass AdamW"]),
        (FP8 | BEFORE | {"weight_cast": "each_update"}, ["weights cast each update"]),
        (ALONE | {"master_dtype": "bf16"}, []),
        ({"path": "tuned", "strategy": "fsdp2"}, []),
        ({"path": "tuned"}, [IN_ONE_PASS]),
        ({}, []),
    ],
)
def test_a_setting_names_the_form_with_the_fewest_words(
    values: dict[str, Any], words: list[str]
) -> None:
    config = make_config(values).resolved().to_dict()
    assert unusual_switches(config) == words
    forms = {IN_ONE_PASS, COPY_ENGINES, NORM_BY_KERNEL, NORM_AS_SUMMED}
    assert has_usual_path(config) == (set(words) <= forms)


@pytest.mark.parametrize(
    ("own", "other"),
    [
        (ALONE, {"gradient_dtype": "master"}),
        ({"path": "tuned", "num_gpus": 4}, {"num_gpus": 8}),
        ({"path": "tuned", "num_gpus": 4}, {"num_nodes": 2}),
    ],
    ids=str,
)
def test_a_graph_on_one_gpu_or_four_is_a_form_of_the_path(
    own: dict[str, Any], other: dict[str, Any]
) -> None:
    for clips in (None, 1.0):
        values = own | {"max_grad_norm": clips, "step_launch": "as_graph"}
        config = make_config(values).resolved().to_dict()
        assert {*unusual_switches(config)} >= {IN_ONE_PASS, GRAPH} and has_usual_path(config)
    assert not has_usual_path(config | other)


def test_a_graph_that_shares_its_pool_says_so_and_is_of_the_path_either_way() -> None:
    for precision in ("bf16", "fp8_tensorwise"):
        values = ON_TWO | {"precision": precision, "step_launch": "as_graph"}
        own, shared = (
            make_config(values | {"gradient_pool": pool}).resolved().to_dict()
            for pool in ("own", "shared")
        )
        assert has_usual_path(own) and has_usual_path(shared)
        assert {*unusual_switches(shared)} - {*unusual_switches(own)} == {SHARED_POOL}
        usual = make_config(values).resolved().to_dict()
        assert unusual_switches(usual) == unusual_switches(shared)
    assert not has_usual_path(shared | {"step_launch": "by_kernel", "gradient_pool": "own"})


def test_a_norm_by_other_means_than_a_path_has_is_of_no_path() -> None:
    values = ON_TWO | {"collectives": "nccl"}
    config = make_config(values).resolved().to_dict() | {"gradient_norm": "as_summed"}
    assert unusual_switches(config) == [IN_ONE_PASS, NORM_AS_SUMMED]
    assert not has_usual_path(config)


def test_what_one_pass_means_is_spelled_out_by_precision() -> None:
    setting = f"batch 1, tuned, {IN_ONE_PASS}"
    arm = "FP8 tensorwise"
    assert spelled_out(setting, "fp8_tensorwise", arm) == f"batch 1, tuned, {WORDS}"
    kernels = f"batch 1, tuned, {WORDS}, {BY_KERNELS}"
    assert spelled_out(setting, "fp8_tensorwise", f"{arm}, SwiGLU kernels") == kernels
    assert spelled_out(setting, "fp8_rowwise", "FP8 rowwise") == "batch 1, tuned, one pass AdamW"
    apart = "separate transposes, FP8 cast to both layouts"
    both = f"{kernels}, {apart}"
    assert spelled_out(setting, "fp8_tensorwise", TODAYS) == both
    copied = f"{COPY_ENGINES}, {BY_KERNELS}, separate transposes, FP8 cast to both layouts"
    assert spelled_out(f"{COPY_ENGINES}", "fp8_tensorwise", TODAYS) == f"{copied}, {COPIED_BESIDE}"
    sharded = f"FSDP2, {setting}"
    of_shards = "FSDP2, batch 1, tuned, weights cast each update, one pass AdamW"
    assert spelled_out(sharded, "fp8_tensorwise", arm) == of_shards
    assert spelled_out(sharded, "bf16", "BF16") == "FSDP2, batch 1, tuned, one pass AdamW"
    assert spelled_out("batch 1, tuned", "bf16", "BF16") == "batch 1, tuned"


def _store(folder: Path, number: int, rate: float, **values: Any) -> None:
    for precision, own in (("bf16", 10_000.0), (values.pop("precision", "fp8_tensorwise"), rate)):
        record = make_record(
            run_id=f"{precision}-{number}-{len(values)}", repeat=number, precision=precision,
            results={"tokens_per_second_per_gpu": own},
        )  # fmt: skip
        asked = record.config | ALONE | {"master_dtype": "fp32", "micro_batch_size": 8} | values
        record.config.update(make_config(asked).resolved().to_dict())
        store(folder, "reference/box", record)


def test_copy_engines_are_part_of_a_setting_where_a_run_had_them(tmp_path: Path) -> None:
    two = {"strategy": "fsdp2", "num_gpus": 2, "path": "tuned"}
    for warnings in ([], ["collectives: GPU 0 cannot read: the run has collectives=nccl"]):
        for precision in ("bf16", "fp8_tensorwise"):
            record = make_record(run_id=f"{precision}-{len(warnings)}", precision=precision)
            record.config.update(make_config(record.config | two).resolved().to_dict())
            record.warnings.extend(warnings)
            assert record.config["collectives"] == "copy_engines"
            store(tmp_path, "reference/box", record)
    runs = frame(tmp_path).set_index("run_id")
    assert set(runs["path"]) == {"tuned"}
    for name, setting in runs["setting"].items():
        words = ", tuned, " + ", ".join([IN_ONE_PASS, COPY_ENGINES][: 2 - int(name[-1])])
        assert setting.endswith(words)
    assert runs.loc["bf16-0", "pair_key"] != runs.loc["bf16-1", "pair_key"]
    # What the path does not set is named, but of no path.
    four = make_config(two | {"num_gpus": 4, "collectives": "copy_engines"}).resolved().to_dict()
    assert unusual_switches(four) == [IN_ONE_PASS, COPY_ENGINES] and not has_usual_path(four)


@pytest.fixture
def runs(tmp_path: Path) -> pd.DataFrame:
    """Two blocks with a lead of 20 % as the path was, and of 30 % as it is."""
    for number in (0, 1):
        _store(tmp_path, number, 12_000.0 + number, **BEFORE)
        _store(tmp_path, 2 + number, 13_000.0 + number)
    return frame(tmp_path)


def test_an_arm_says_what_made_its_swiglu_and_the_faster_one_decides(tmp_path: Path) -> None:
    for number in (0, 1):
        _store(tmp_path, number, 12_000.0 + number, swiglu="compiled")
        _store(tmp_path, 2 + number, 12_200.0 + number, transposes="fused")
        _store(tmp_path, 4 + number, 12_400.0 + number)
    runs = frame(tmp_path)
    leads = leads_table(runs)
    assert leads["setting"].nunique() == 1
    assert dict(zip(leads["arm"], leads["lead_pct"].round(), strict=True)) == {
        "FP8 tensorwise": 20, "FP8 tensorwise, SwiGLU kernels": 22, TODAYS: 24,
    }  # fmt: skip
    (row,) = decision_table(leads, judged_losses(loss_gap_table(runs), runs)).to_dict("records")
    assert row["arm"] == TODAYS


def test_fast_accumulation_is_an_arm_of_its_own_that_decides_nothing(tmp_path: Path) -> None:
    for number in (0, 1):
        _store(tmp_path, number, 12_000.0 + number)
        _store(tmp_path, number, 13_000.0 + number, fast_accumulation="all")
    runs = frame(tmp_path)
    leads = leads_table(runs)
    usual, fast = TODAYS, f"{TODAYS}, fast accumulation"
    assert leads["setting"].nunique() == 1
    assert dict(zip(leads["arm"], leads["lead_pct"].round(), strict=True)) == {usual: 20, fast: 30}
    (row,) = decision_table(leads, judged_losses(loss_gap_table(runs), runs)).to_dict("records")
    assert row["arm"] == usual
    (gain,) = switch_table(runs).to_dict("records")
    assert gain["setting"].endswith("fast accumulation")
    assert gain["gain_pct"] == pytest.approx(100 / 12, abs=0.1)
    cells = cells_of(read_runs(tmp_path))
    assert {cell.config.fast_accumulation for cell in cells if cell.config.is_fp8} == {"forward"}


def test_an_arm_does_not_name_kernels_that_its_model_could_not_have() -> None:
    values = make_config(FP8).resolved().to_dict()
    record = make_record()
    record.config.update(values)
    assert arm_label(record) == TODAYS
    record.warnings.append("swiglu: compiled, as no MLP of this model is SwiGLU between FP8 layers")
    assert arm_label(record) == "FP8 tensorwise, both layouts"


def test_an_arm_says_that_its_loss_head_is_fp8() -> None:
    record = make_record()
    record.config.update(make_config(FP8 | {"skip": ""}).resolved().to_dict())
    assert arm_label(record) == f"{TODAYS}, FP8 loss head"
    assert num_kernels(arm_label(record)) == 1 + num_kernels(TODAYS)
    assert "loss head in FP8" in spelled_out("tuned", "fp8_tensorwise", arm_label(record))
    record.config.update(make_config(FP8 | {"skip": "", **BEFORE}).resolved().to_dict())
    assert arm_label(record) == "FP8 tensorwise, skips nothing"  # as torchao has it


def test_a_partner_in_fp8_leaves_out_what_was_said_and_else_what_its_path_does() -> None:
    bf16 = make_config(ALONE | {"model": "llama-3.1-8b"}).resolved()
    assert as_fp8(bf16, "fp8_tensorwise").skip == ()
    assert as_fp8(bf16, "fp8_rowwise").skip == ("lm_head",)
    own = dataclasses.replace(bf16, skip=("*.o_proj",))
    assert as_fp8(own, "fp8_tensorwise").skip == ("*.o_proj",)
    assert changed(as_fp8(bf16, "fp8_tensorwise"), {"num_gpus": 4}).skip == ("lm_head",)


def test_each_form_has_its_lead_and_todays_decides(runs: pd.DataFrame) -> None:
    leads = leads_table(runs)
    assert sorted(leads["lead_pct"].round()) == [20, 30]
    assert set(leads["path"]) == {"tuned"}
    (row,) = decision_table(leads, judged_losses(loss_gap_table(runs), runs)).to_dict("records")
    assert row["lead_pct"] == pytest.approx(30, abs=0.1)


def test_switches_are_held_against_the_path_as_it_was(tmp_path: Path) -> None:
    for number, form in enumerate((BEFORE, {})):
        _store(tmp_path, 0, 12_000.0 + 600 * number, **form)
    fp8 = switch_table(frame(tmp_path)).set_index("precision").loc["fp8_tensorwise"]
    apart = "separate transposes, FP8 cast to both layouts"
    assert fp8["setting"] == f"{WORDS}, {BY_KERNELS}, {apart}"
    assert fp8["setting_plain"].endswith(", tuned")
    assert fp8["gain_pct"] == pytest.approx(5)


def test_rowwise_runs_pair_with_bf16_ones_whose_gradients_stay_narrow(tmp_path: Path) -> None:
    for number in (0, 1):
        _store(tmp_path, number, 11_000.0, precision="fp8_rowwise")
    assert leads_table(frame(tmp_path))["lead_pct"].tolist() == [pytest.approx(10)]


def test_advice_tells_of_the_path_as_it_was_until_todays_is_timed(tmp_path: Path) -> None:
    for number in (0, 1):
        _store(tmp_path, number, 12_000.0 + number, **BEFORE)
    asked = _asked(tmp_path)
    timed, ((what, lead),) = _told(tmp_path, asked)
    assert not timed and what == "update_kernel=torch" and lead.value > 19
    for number in (2, 3):
        _store(tmp_path, number, 13_000.0 + number)
    (found,), near = _told(tmp_path, asked)
    assert found.decision["lead_pct"] > 29 and not near


def _asked(results: Path) -> Any:
    (_, record), *_ = read_runs(results)
    left = dict.fromkeys(("update_kernel", "weight_cast", "gradient_dtype"))
    return make_config(record.config | left | {"precision": "bf16"}).resolved()


def _told(results: Path, asked: Any) -> tuple[Any, Any]:
    """Return what was decided for a BF16 run, and what was timed next to it."""
    runs = read_runs(results)
    decisions, gpu = Decisions(runs), runs[0][1].machine["gpu_name"]
    return decisions.of(asked, gpu), decisions.nearest(asked, gpu, as_asked=False)


@pytest.mark.parametrize(
    "changes",
    [{"update_kernel": "torch"}, {"master_dtype": "bf16"}, {"activation_checkpointing": True},
     {"num_gpus": 4}, {"max_grad_norm": None}, {"collectives": "nccl"}],
    ids=str,
)  # fmt: skip
def test_what_a_changed_run_cannot_keep_is_decided_anew(changes: dict[str, Any]) -> None:
    one = ALONE | {"gradient_norm": "by_kernel", "transposes": "separate"}
    two = {"path": "tuned", "num_gpus": 2, "gradient_norm": "as_summed",
           "gradient_copy": "reduce_stream", "transposes": "separate"}  # fmt: skip
    for values in (one, two):
        asked = values | {"precision": "fp8_tensorwise", "max_grad_norm": 1.0}
        if "collectives" not in changes or values is two:
            way = changed(make_config(asked).resolved(), changes)  # is not refused
            assert way.gradient_copy != "reduce_stream" or way.collectives == "copy_engines"
