"""A run that starts with the weights of another, or of Hugging Face."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fp8study.core.checkpoints import place_of, weights_sha256
from fp8study.core.errors import UserError
from fp8study.core.presets import PRESETS
from tests.checkout import tiny_folder
from tests.train.tiny_runs import Train, tensors


@pytest.mark.long
@pytest.mark.slow
def test_a_run_starts_from_the_weights_of_another(train: Train, tmp_path: Path) -> None:
    """In the other precision, sharded otherwise and with a new optimizer, of the same tokens."""
    (tmp_path / "other.txt").write_text("Some other text to train on. " * 500)
    before = train(tmp_path / "bf16", strategy="none", validation_sequences=4)
    values = {"num_gpus": 2, "precision": "fp8", "lr_warmup_steps": 4, "learning_rate": 1e-9}
    values |= {"validation_sequences": 4, "checkpoint_every": 0}
    start = tmp_path / "bf16"
    for source in (start, place_of(start, 8)):
        record = train(tmp_path / source.name / "fp8", init_from=str(source), **values)
        assert record.status == "completed", record.status_detail
        # Scored alike in BF16: the weights are the same, but for steps of next to nothing.
        losses = [r.results["validation_loss"] for r in (before, record)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
        assert (record.model["init_step"], record.model["init_precision"]) == (8, "bf16")
        assert record.model["init_sha256"] == weights_sha256(place_of(start, 8))
        assert record.audit["num_linear_fp8"] == 28
    values["corpus"] = f"text:{tmp_path}/other.txt"  # on which another bpe is trained
    with pytest.raises(UserError, match="another tokenizer's tokens; use the tokenizer of that"):
        train(tmp_path / "on", init_from=str(start), **values)


@pytest.mark.parametrize("tied", [True, False])
def test_a_run_starts_from_hugging_face_safetensors(
    tied: bool, train: Train, tmp_path: Path
) -> None:
    torch.manual_seed(7)
    settings = PRESETS["tiny-llama"] | {"tie_word_embeddings": tied}
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    theirs.save_pretrained(tmp_path / "model", max_shard_size="1MB")
    values = {"init_from": str(tmp_path / "model"), "num_steps": 3, "num_warmup_steps": 0}
    values |= {"model": str(tmp_path / "model"), "tokenizer": "bpe"}
    record = train(tmp_path / "run", precision="fp8", num_gpus=2, learning_rate=1e-12,
                   weight_decay=0, **values)  # fmt: skip
    assert record.status == "completed", record.status_detail
    assert record.model["init_sha256"] == weights_sha256(tmp_path / "model")
    assert "init_step" not in record.model
    weights = tensors(tmp_path / "run", 3)
    for name, weight in theirs.named_parameters():
        torch.testing.assert_close(weights[f"/model/{name}"], weight.detach(), rtol=0, atol=1e-9)


@pytest.fixture(scope="module")
def sources(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights of ours (``run``), Hugging Face's (``hf``), and two other models."""
    folder = tmp_path_factory.mktemp("sources")
    train(folder / "run", strategy="none", num_steps=3)
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(**PRESETS["tiny-llama"]))
    hf.save_pretrained(folder / "hf")
    tiny_folder(folder / "model", intermediate_size=400)
    tiny_folder(folder / "deeper", num_hidden_layers=5)
    return folder


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"init_from": "{folder}/none"}, "init_from: '.*/none' holds no weights; give a folder"),
        ({"init_from": "{folder}"}, "init_from: '.*' holds no weights; give a folder"),
        ({"init_from": "{folder}/run", "model": "{folder}/model"}, "does not fit the model"),
        ({"init_from": "{folder}/hf", "model": "{folder}/model"}, "does not fit the model"),
        ({"init_from": "{folder}/hf", "model": "{folder}/deeper"}, "9 weights differ, as model"),
    ],
)
def test_weights_that_do_not_fit_are_one_line(
    values: dict[str, Any], words: str, sources: Path, train: Train, tmp_path: Path
) -> None:
    values = {name: value.format(folder=sources) for name, value in values.items()}
    try:
        said = str(train(tmp_path / "next", strategy="none", **values).status_detail)
    except UserError as error:
        said = str(error)
    assert re.search(words, said), said
    assert "\n" not in said
    assert said.startswith("init_from: ")
