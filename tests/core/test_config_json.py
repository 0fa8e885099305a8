"""What is said of a user's own config.json before a model is built of it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from fp8study.core.config import make_config
from fp8study.core.errors import UserError
from fp8study.core.presets import PRESETS, check_model, hf_config

TINY = PRESETS["tiny-llama"]


def refusal(folder: Path, content: dict[str, Any] | bytes) -> str:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / "config.json").write_bytes(raw)
    with pytest.raises(UserError, match=r"^model: ") as caught:
        hf_config(str(folder))
    assert "\n" not in str(caught.value) and "tiny-llama" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "is no JSON (Expecting value: line 1 column 1 (char 0)); mend it"),
        (b'{"rms_norm_eps": NaN}', "is no JSON (NaN is no number); mend it"),
        (b'{"text_config": "llama"}', "has a text_config that holds no names with values; mend it"),
        (b'{\n "a": 1,\n', "line 3 column 1"),
        (b'{"a":\n "caf\xe9"}', "is no text in UTF-8 (line 2 column 6)"),
        (bytes(range(128, 160)), "is no text in UTF-8 (line 1 column 1)"),
        (b'{"a": {"b": 1, "b": 2}}', "config.json' gives b twice; leave one"),
    ],
)
def test_a_file_that_is_no_json_is_told_with_its_place(
    raw: bytes, words: str, tmp_path: Path
) -> None:
    assert words in refusal(tmp_path, raw)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "128"}, 'cannot be: hidden_size: "128" is no whole number; write 128'),
        ({"hidden_size": 128.0}, "hidden_size: 128.0 is no whole number; write 128"),
        ({"rms_norm_eps": 1}, "rms_norm_eps: 1 is no decimal number; write 1.0"),
        ({"hidden_act": 7}, "hidden_act: 7 is no text; mend"),
        ({"hidden_size": None}, "hidden_size: null is no whole number; mend"),
        ({"num_key_value_heads": "2"}, '"2" is no whole number or null; write 2'),
        ({"tie_word_embeddings": "no"}, 'tie_word_embeddings: "no" is no true or false; mend'),
        ({"rope_scaling": "x", "rope_parameters": None}, 'rope_scaling: "x" is no mapping or null'),
        ({"num_attention_heads": 0}, "has no num_attention_heads of 1 or more"),
        ({"num_attention_heads": 3, "head_dim": None}, "attention heads (3); mend its config"),
        ({"hidden_act": "foo"}, "has hidden_act: 'foo' in its config.json, which transformers"),
        ({"hidden_act": "silue"}, "(did you mean 'silu'?); choose one of gelu"),
        ({"rope_scaling": {"type": "nonsense"}}, "has rope_scaling: 'nonsense' in its config.json"),
        ({"rope_parameters": {"a": {"rope_type": "b"}}}, "has rope_parameters: 'b'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "Missing required keys in `rope_par"),
        ({"quantization_config": {"quant_method": "fp8"}}, "has a quantization_config, of weights"),
    ],
)
def test_a_value_that_no_model_is_built_of_is_named(
    changes: dict[str, Any], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(tmp_path, TINY | changes)
    assert capfd.readouterr().err == ""  # nor does transformers warn


@pytest.mark.parametrize(
    ("name", "taken"), [("vocab_size", 32000), ("num_attention_heads", 32), ("hidden_size", 4096)]
)
def test_what_transformers_would_take_for_a_size_is_not_taken(
    name: str, taken: int, tmp_path: Path
) -> None:
    without = {key: value for key, value in TINY.items() if key != name}
    words = f"has no {name} in its config.json; transformers would take {taken} for it: add it"
    assert words in refusal(tmp_path, without)


def test_what_may_be_left_out_is(tmp_path: Path) -> None:
    may = ("num_key_value_heads", "tie_word_embeddings", "max_position_embeddings")
    content = {name: value for name, value in TINY.items() if name not in may}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert hf_config(str(tmp_path)).num_key_value_heads == 4  # as many as heads
    with pytest.raises(UserError, match=r"2048 positions that transformers takes .* add max_pos"):
        check_model(make_config({"model": str(tmp_path), "sequence_length": 4096}))
    part = {"model_type": "gemma3_text", **dict.fromkeys(("hidden_size", "num_hidden_layers"), 16),
            "intermediate_size": 64}  # fmt: skip
    nested = {"model_type": "gemma3", "text_config": part}  # as published
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert hf_config(str(tmp_path)).get_text_config().vocab_size > 200_000


def test_older_names_of_rotary_embeddings_are_known(tmp_path: Path) -> None:
    rope = {"type": "su", "short_factor": [1.0] * 16, "long_factor": [1.0] * 16,
            "original_max_position_embeddings": 4096}  # fmt: skip
    content = TINY | {"model_type": "phi3", "rope_parameters": rope, "pad_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert hf_config(str(tmp_path)).rope_parameters["rope_type"] == "longrope"


@pytest.mark.parametrize("kind", ["weird", "llama"])
def test_no_code_of_a_folder_is_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anybody asked whether it may be: a folder of Llama is built by transformers' own."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\nfrom transformers import LlamaConfig\n"
        "Path(__file__).with_name('ran').touch()\n"
        "class Mine(LlamaConfig):\n    model_type = 'weird'\n"
    )
    own = {"model_type": kind, "auto_map": {"AutoConfig": "mine.Mine"}}
    if kind == "llama":
        (tmp_path / "config.json").write_text(json.dumps(TINY | own))
        assert type(hf_config(str(tmp_path))).__name__ == "LlamaConfig"
    else:
        assert "needs code of its own (auto_map), which is not run" in refusal(tmp_path, TINY | own)
    assert not list(tmp_path.rglob("ran"))


def test_a_hub_id_that_cannot_be_read_leads_to_its_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"give 'llama-3\.1-8b', its preset, or a folder"):
        hf_config("meta-llama/Llama-3.1-8B")
