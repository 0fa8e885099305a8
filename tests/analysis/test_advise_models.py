"""Advice for models of every kind: presets, large ones, folders with a config.json."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from transformers import AutoConfig

from fp8study.analysis.advice import question
from fp8study.analysis.advice.figures import MODELLED
from fp8study.analysis.advice.question import answer, question_for
from fp8study.analysis.laws.shape import shape_of
from fp8study.core.presets import PRESETS
from fp8study.core.studies import load_study
from fp8study.report.advice_text import advice_text
from tests.analysis.test_advise import advice

#: A folder of a preset's shape says so.
pytestmark = pytest.mark.filterwarnings("ignore:--model:UserWarning")


def as_folder(preset: str, folder: Path, **changes: object) -> str:
    """Write a preset's configuration as a user's own."""
    (folder / "config.json").write_text(json.dumps(PRESETS[preset] | changes))
    return str(folder)


@pytest.fixture(scope="module")
def of_70b(tmp_path_factory):
    folder = tmp_path_factory.mktemp("70b")
    return as_folder("llama-3.1-70b", folder)


def test_a_large_model_is_answered_for_with_what_makes_it_fit(of_70b):
    found = advice(of_70b, 64, batch=None, gpu="h100-80gb")
    assert found.fits and found.building_gib > found.capacity_gib and not found.commands
    assert found.settings == ("reshard_after_forward=true", "activation_checkpointing=true")
    text = advice_text(found)
    assert "Chosen for it: reshard_after_forward=true" in text
    assert (
        "8 nodes, joined by 400 Gb/s for each GPU and 14 µs a hop: assumed" in text
        and "never timed" in text
    )
    asked = advice(of_70b, 64, gpu="h100-80gb")  # a batch that was asked for stays
    assert not asked.fits and not asked.settings
    assert "fp8study cannot: its runs first build the whole model" in text
    first = "fp8study cannot build a model of this size on such a GPU: check a smaller one first"
    assert f"{first}, as llama-3.1-8b" in " ".join(text.split())
    both = "--set reshard_after_forward=true --set activation_checkpointing=true"
    assert f"--micro-batch-size 1 {both}" in [remedy.what for remedy in asked.remedies]
    (alone,) = advice(of_70b, 1, gpu="rtx-4090").remedies
    assert alone.what.startswith(f"--micro-batch-size 1 {both}") and "--num-gpus" in alone.what
    assert alone.then.kind == MODELLED


def test_several_nodes_are_checked_by_a_study_on_a_cluster(tmp_path, monkeypatch):
    found = advice("llama-3.1-8b", 16, gpu="h200")
    assert found.commands == ("make reproduce STUDY=advised PROFILE=slurm",)
    (tmp_path / "pipelines" / "studies").mkdir(parents=True)
    (tmp_path / "pipelines" / "studies" / "advised.yaml").write_text(found.study)
    monkeypatch.chdir(tmp_path)
    study = load_study("advised")
    names = ("model", "num_gpus", "num_nodes", "path", "sequence_length", "micro_batch_size")
    asked = {name: found.config[name] for name in names}
    assert {run.config.precision for run in study.runs} == {"bf16", "fp8_tensorwise"}
    for run in study.runs:
        assert {name: getattr(run.config, name) for name in asked} == asked
    text = " ".join(advice_text(found).split())
    assert "with this as pipelines/studies/advised.yaml" in text and "fp8study run" not in text
    assert "your cluster in pipelines/profiles/slurm/config.yaml (max_nodes: 2)" in text


def test_such_a_job_has_time_for_its_steps(tmp_path, monkeypatch):
    """Of 16 passes at 8,192 tokens one takes 13 s by the law: a hundred took longer than a job."""
    clipped = {"max_grad_norm": 1.0}
    asked = question_for([], "llama-3.1-8b", 64, 8192, 1, "h100-80gb", clipped, None, 1024)
    for each in (asked, question_for([], "llama-3.1-8b", 16, 4096, 1, "h200")):
        found = answer(each)
        content = yaml.safe_load(found.study)
        base, rate = content["base"], min(
            option.tokens_per_second_per_gpu.value for option in (found.options[0], found.chosen)
        )  # fmt: skip
        minutes = base["num_steps"] * each.config.tokens_per_step / rate / base["num_gpus"] / 60
        assert minutes + 3 < content["minutes_per_run"] < 3 * minutes + 7
        assert base["num_steps"] >= base["num_warmup_steps"] + 10


def test_what_is_no_part_of_an_answer_on_blackwell_is_told():
    told = [advice("qwen3-14b", 2, gpu=gpu).left_out for gpu in ("b200", "h200")]
    assert [any(each.startswith("MXFP8") for each in left_out) for left_out in told] == [
        True,
        False,
    ]


@pytest.mark.parametrize("model", PRESETS)
def test_answers_for_every_preset_within_eighty_columns(model):
    text = advice_text(advice(model, 1))
    assert model in text
    table = [line for line in text.splitlines() if re.search(r" \d+ [mpx]!?$", line)]
    assert len(table) >= 3 and all(len(line) <= 80 for line in table)


def test_answers_for_a_folder_and_says_what_a_mixture_leaves_out(tmp_path: Path):
    shape = {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 32000, "num_experts": 16,
        "num_experts_per_tok": 4, "max_position_embeddings": 8192,
    }  # fmt: skip
    folder = tmp_path / "of mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape))
    found = advice(str(folder), 2)
    assert found.commands
    assert all(f"model={folder}" in shlex.split(command) for command in found.commands)
    ways = [option for option in found.options[1:] if not option.gathers_fp8]
    assert len(ways) == 3
    assert all(abs(option.lead_pct.value) < 10 for option in ways)  # FP8 is attention's alone
    assert found.left_out and "a mixture of experts: none was measured" in found.beyond
    assert "  its experts stay in BF16, as fp8study converts none" in advice_text(found)
    # Nor does FP8 spare the experts' copies in BF16 and activations.
    bf16, *fp8 = (option.memory_gib.value for option in advice(str(folder), 1).options)
    copies = 2 * 4 * 2 * 2048 * (4096 + 512) / 2**30  # bytes, layers, two of each size
    assert all(bf16 - each < 1.5 * copies for each in fp8)
    idle = 4 * 12 * 3 * 2048 * 768  # layers, experts that no token goes to, and their weights
    assert found.tokens == 20 * (shape_of(str(folder)).num_parameters - idle)


@pytest.mark.parametrize("size", [2048, 1_000_000])
def test_a_vocabulary_that_was_not_measured_is_beyond(of_70b, size, tmp_path):
    content = json.loads(Path(of_70b, "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"vocab_size": size}))
    own, other = (advice(model, 64, gpu="h200").beyond for model in (of_70b, str(tmp_path)))
    assert not any("vocabulary" in line for line in own)
    assert f"{size:,} tokens in the vocabulary; measured on H200: 128,256 to 151,936" in other


def test_names_what_a_model_has_that_the_laws_leave_out(tmp_path: Path):
    AutoConfig.for_model("gemma2").save_pretrained(tmp_path)  # its 9B
    found = advice(str(tmp_path), 8)
    short, long = (advice(str(tmp_path), 8, length).left_out for length in (4096, 8192))
    assert any("left out below" in line for line in found.beyond)
    # Its logits are capped, and by the law the host decides.
    assert found.settings == ("loss_head=plain", "update_kernel=torch")
    assert all("--set loss_head=plain" in command for command in found.commands)
    assert found.commands
    assert any("soft caps" in line for line in short) and any("norms" in line for line in short)
    assert [line for line in long if line not in short] == [
        "attention's window of 4,096 tokens: it is counted over them all"
    ]


def test_sizes_that_fp8_gemms_cannot_take_are_named(of_70b, tmp_path):
    content = json.loads(Path(of_70b, "config.json").read_text()) | {"num_hidden_layers": 8}
    odd = content | {"intermediate_size": 28_670, "vocab_size": 50_257}
    (tmp_path / "config.json").write_text(json.dumps(odd))
    text = " ".join(advice_text(advice(str(tmp_path), 8, gpu="h200")).split())
    assert (
        "in BF16 for 28,670, which FP8 GEMMs cannot take: mlp.gate_proj, mlp.up_proj, "
        "mlp.down_proj; a multiple of 16 would do, as 28,672" in text
    )
    assert "in BF16 for 50,257, which FP8 GEMMs cannot take: lm_head;" in text
    assert "cannot take" not in advice_text(advice(of_70b, 8, gpu="h200"))


def test_rows_that_do_not_divide_by_the_gpus_are_told_where_fp8_is_not_gathered() -> None:
    told = "no FP8 all-gather: the layers' rows do not divide by 6"
    for num_gpus, is_told in ((6, True), (8, False), (1, False)):
        found = answer(question_for([], "llama-3.1-8b", num_gpus, 4096, 1, "h100-80gb"))
        assert (told in advice_text(found)) == is_told


def test_a_model_like_a_preset_is_answered_as_that_unless_it_ran_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    folder = as_folder("llama-3.1-8b", tmp_path / "mine")
    with pytest.warns(UserWarning, match=f"'{folder}' has the shape of llama-3.1-8b"):
        asked = question_for([], folder, 1, 4096, 1, "h200")
    assert asked == question_for([], "llama-3.1-8b", 1, 4096, 1, "h200")
    own = tmp_path / "results/local/study/mine-bf16-1gpu-s0-12345678"
    own.mkdir(parents=True)
    (own / "run.json").touch()
    monkeypatch.setattr(question, "own_results", lambda: tmp_path / "results/local")
    assert question_for([], folder, 1, 4096, 1, "h200").config.model == folder
    as_folder("llama-3.1-8b", tmp_path / "mine", num_hidden_layers=31)
    monkeypatch.undo()
    assert question_for([], folder, 1, 4096, 1, "h200").config.model == folder


@pytest.mark.parametrize("sequences", [64, 128])
def test_a_step_that_a_larger_batch_makes_of_one_pass_is_answered(sequences: int) -> None:
    asked = question_for([], "llama-3.1-8b", sequences // 4, 4096, None, "h100-80gb",
                         {"max_grad_norm": 1.0}, None, sequences)  # fmt: skip
    assert asked.config.gradient_reduction == "each_pass"
    assert answer(asked).verdict.action
