"""The declarations, and everything that is derived from them."""

from __future__ import annotations

import runpy
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pytest
from papermill.inspection import inspect_notebook

from fp8study.analysis.runs.naming import unusual_switches
from fp8study.core.config import ResolvedConfig, RunConfig, completed, make_config
from fp8study.core.errors import UserError
from fp8study.core.field_types import Comparison, Group, read_yaml
from fp8study.core.fields import FIELDS, PLAIN, TYPES, varying
from fp8study.core.path.switches import RETIRED
from fp8study.core.presets import check_model
from fp8study.core.recipes import RECIPES, Precision
from fp8study.core.studies import load_study
from fp8study.report.field_table import field_table
from fp8study.report.plotstyle import colour
from tests.checkout import ROOT, committed_runs

WRITER = runpy.run_path(str(ROOT / "scripts/write_fields.py"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_every_declaration_is_complete() -> None:
    for name, field in FIELDS.items():
        assert field.group in typing.get_args(Group), name
        assert field.meaning.endswith("."), name
        assert "=" not in field.meaning, f"{name}: papermill shows no help with two '=' in a line"
        assert set(field.differs) <= set(typing.get_args(Comparison)), name
        assert bool(field.words) == (name in PLAIN), name
        if field.words:
            assert field.plain in (*typing.get_args(typing.get_args(TYPES[name])[0]), True, 0), name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_says_what_each_parameter_is(path: Path) -> None:
    (cell,) = [
        cell
        for cell in nbformat.read(path, as_version=4).cells
        if "parameters" in cell.metadata.get("tags", [])
    ]
    values: dict[str, Any] = {}
    exec(cell.source, values)
    assert cell.source == WRITER["parameter_cell"](values), "run `make fields`"
    known = inspect_notebook(path)
    assert set(known) == {*FIELDS, "study", "run_id"}
    for name, parameter in known.items():
        assert parameter["help"] and parameter["inferred_type_name"] != "None", name
    assert known["num_steps"]["help"] == "Optimizer steps. Default: 100."


def test_the_page_of_fields_is_the_declarations() -> None:
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert page == WRITER["configuration_page"](), "run `make fields`"
    assert all(f"`{name}`" in page for name in FIELDS)


def test_the_terminal_shows_every_field_in_80_columns() -> None:
    lines = field_table().splitlines()
    assert [n for n in FIELDS if not any(line.startswith(f"  {n} (") for line in lines)] == []
    assert max(map(len, lines)) <= 110  # only the choices of one type are longer than 80
    assert sum(len(line) > 80 for line in lines) <= 3


def test_comparisons_know_what_may_differ() -> None:
    order = {"checkpoint_every", "keep_checkpoints", "runs_per_gpu"}
    assert set(varying("repeat")) == {"seed", "repeat"} | order
    assert set(varying("folder")) == {"seed", "repeat", "corpus", "tokenizer", "init_from"} | order
    assert set(varying("pair")) == {
        "precision", "fp8_all_gather", "optimizer_binding", "fp8_emulate", "skip", "gather_cast",
        "gradient_copy", "weight_cast", "transposes", "swiglu", "kernel_launch", "cast_kernels",
        "gradient_dtype",
        "cpu_ram_efficient_loading", "repeat", "precision_schedule", "fast_accumulation", *order,
    }  # fmt: skip
    assert set(varying("effect")) == {*varying("pair"), "master_dtype", "untrained", "seed"} - {
        "skip"
    }
    recipe = {"fast_accumulation"}
    assert set(varying("switch")) == {*PLAIN, "path", "seed", "repeat"} | order | recipe
    assert set(varying("resume")) == order | {*PLAIN, "path"} - set(RETIRED) | {
        "num_gpus", "num_nodes", "strategy", "sharding", "micro_batch_size",
        "gradient_accumulation_steps", "compile",
        "activation_checkpointing", "fp8_all_gather", "fp8_emulate", "cpu_ram_efficient_loading",
    }  # fmt: skip


def test_every_precision_has_a_recipe_and_a_colour() -> None:
    assert set(RECIPES) == set(typing.get_args(Precision))
    assert len({colour(name) for name in RECIPES}) == len(RECIPES)
    assert [recipe.fp8_share for recipe in RECIPES.values()] == [0, 0, 1, 1, pytest.approx(2 / 3)]


def test_replacing_what_was_asked_means_what_it_says() -> None:
    sharded = RunConfig(num_gpus=2)
    assert sharded.resolved().fp8_all_gather is False
    fp8 = replace(sharded, precision="fp8_tensorwise")
    assert fp8 == make_config({"num_gpus": 2, "precision": "fp8"})
    assert fp8.resolved().fp8_all_gather is True
    clipped = replace(make_config({"path": "tuned"}), max_grad_norm=1)
    assert clipped.resolved().optimizer_step == "after_backward"
    assert clipped.resolved().clipping == "in_update"


def test_what_runs_has_no_open_field_once_the_machine_is_known() -> None:
    asked = RunConfig(precision="fp8_rowwise")
    planned = asked.resolved()
    assert isinstance(planned, ResolvedConfig)
    open_fields = {name for name, value in planned.to_dict().items() if value is None}
    assert open_fields == {"max_grad_norm", "fp8_emulate", "timed_seconds", "init_from"}
    for on_gpu in (False, True):
        assert planned.resolved(on_gpu).fp8_emulate is not on_gpu
        assert asked.resolved(on_gpu) == planned.resolved(on_gpu)
        assert RunConfig(fp8_emulate=True).resolved(on_gpu).fp8_emulate is True
    assert planned.resolved() is planned
    assert asked.digest() == planned.digest()


def test_what_the_machine_decided_tells_no_two_records_apart() -> None:
    planned = RunConfig(precision="fp8_rowwise").resolved()
    for device in ("cpu", "cuda"):
        run = planned.resolved(on_gpu=device == "cuda").to_dict()
        assert completed(run, device) == completed(planned.to_dict(), device)
    asked = RunConfig(precision="fp8_rowwise", fp8_emulate=True).resolved(on_gpu=True).to_dict()
    assert completed(asked, "cuda") != completed(planned.to_dict(), "cuda")


#: Of committed records: a version that renames one would measure it again.
KNOWN_IDS = {
    "bench-cpu": ["tiny-llama-bf16-1gpu-s0-76786900", "tiny-llama-fp8_tensorwise-1gpu-s0-49549a49"],
    "document-a-grid": ["llama-3.2-1b-bf16-4gpu-s0-304af09c"],
    "new-text": ["llama-3.2-1b-bf16-1gpu-s0-325a894e", "llama-3.2-1b-bf16-1gpu-s1-88e43b9e"],
    "step-trims": [
        "llama-3.1-8b-fp8_tensorwise-4gpu-s0-40060a60",
        "llama-3.2-1b-untied-fp8_tensorwise-1gpu-s0-0756fd43",
    ],
}


@pytest.mark.parametrize("study", KNOWN_IDS)
def test_runs_keep_their_names(study: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    planned = {run.run_id: run.config for run in load_study(study).runs}
    assert set(KNOWN_IDS[study]) <= set(planned)
    for stored in committed_runs():
        record = stored.record
        if record.study == study and record.run_id in KNOWN_IDS[study]:
            asked, device = planned[record.run_id].to_dict(), record.machine["device"]
            assert completed(record.config, device) == completed(asked, device)


def test_a_retired_switch_still_reads_and_cannot_be_asked_for() -> None:
    for value in (None, "default"):
        assert make_config({"recompute": value}) == RunConfig()
    with pytest.raises(UserError, match=r"recompute: 'elementwise': it was taken out: .*; leave"):
        make_config({"recompute": "elementwise"})
    recorded = RunConfig(path="tuned", strategy="fsdp2").resolved().to_dict() | {
        "recompute": "elementwise"
    }
    assert completed(recorded)["recompute"] == "elementwise"
    assert unusual_switches(recorded) == ["elementwise recomputation"]
    without = {k: v for k, v in recorded.items() if k not in RETIRED}
    assert unusual_switches(without) == []
    assert completed(without) == completed(without | {"recompute": "default"})


def test_a_retired_value_still_reads_and_cannot_be_asked_for() -> None:
    one = {"path": "tuned", "strategy": "none", "max_grad_norm": 1.0}
    with pytest.raises(UserError, match="gradient_norm: 'by_one_launch'"):
        make_config(one | {"gradient_norm": "by_one_launch"})
    usual = make_config(one).resolved().to_dict()
    assert usual["gradient_norm"] == "by_kernel"
    recorded = completed(usual | {"gradient_norm": "by_one_launch"})
    assert recorded == completed(usual) | {"gradient_norm": "by_one_launch"}


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("num_gpus", 10**19, "outside 1 to 65536"),
        ("num_steps", 10**19, "outside 1 to 1000000000"),
        ("sequence_length", 1, "outside 2 to 1000000000"),
        ("validation_sequences", 10**19, "outside 0 to 1000000000"),
        ("micro_batch_size", 10**400, "give a whole number"),
        ("learning_rate", 1e308, "outside 1e-12 to 1000; try 0.0003"),
        ("tokenizer", "no such thing", "give auto, bpe, or a Hugging Face id"),
        ("tokenizer", "a/b/c", "give auto"),
        ("skip", "no such thing", "patterns of module names"),
        ("untrained", ["ok.*", "$(x)"], "patterns of module names"),
        ("model", "x" * 5000, "has 5000 letters; give a shorter text"),
        ("corpus", "text:" + "x" * 300, "has 305 letters"),
    ],
)
def test_what_cannot_be_is_refused_at_once_in_one_line(name: str, value: Any, word: str) -> None:
    with pytest.raises(UserError) as caught:
        make_config({name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}: ")
    assert word in message
    assert "\n" not in message
    assert len(message) < 600


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"skip": "lm_haed"}, r"^skip: 'lm_haed' .*mean 'lm_head'"),
        ({"untrained": "model.layers.4.*"}, r"^untrained: 'model.layers.4.\*' matches no linear"),
        ({"sequence_length": 4097}, r"^sequence_length: 4097 is more than the 4096 positions"),
        ({"tokenizer": "./absent"}, r"^tokenizer: there is no folder './absent'"),
    ],
)
def test_what_a_preset_cannot_do_is_refused_before_anything_starts(
    values: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        check_model(make_config({"model": "tiny-llama", "num_steps": 20} | values))
    check_model(make_config({"model": "tiny-llama", "untrained": "model.layers.3.*"}))


@pytest.mark.parametrize("text", ["1:30", "010", "0x10", "0o10", "1_000"])
def test_yaml_makes_no_number_of_what_may_be_a_mistake(text: str) -> None:
    assert read_yaml(text) == text
    with pytest.raises(UserError, match=f"num_steps: '{text}' is not valid; give a whole number"):
        make_config({"num_steps": read_yaml(text)})


def test_a_number_may_be_copied_from_a_page_with_its_minus() -> None:
    assert make_config({"learning_rate": "2e\u20115"}).learning_rate == 2e-5
    with pytest.raises(UserError, match="num_steps: -3 is"):
        make_config({"num_steps": "\u22123"})


def test_yaml_reads_the_numbers_that_people_write() -> None:
    texts = ["0", "-3", "12", "3e-4", "5.0e-05", "1e3", ".5", "true", "null", "[1, 2]"]
    expected = [0, -3, 12, 3e-4, 5e-5, 1000.0, 0.5, True, None, [1, 2]]
    assert [read_yaml(text) for text in texts] == expected
