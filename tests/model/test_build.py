from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fp8study.core.errors import UserError
from fp8study.core.presets import PRESETS, check_model_name, hf_config, model_vocab_size
from fp8study.measure.flops import num_matmul_parameters
from fp8study.model.build import build_model, decoder_layers

META, CPU = torch.device("meta"), torch.device("cpu")

#: As published; matmul parameters are all but the norms and an embedding that is only looked up.
PUBLISHED = {
    "llama-3.2-1b": (1_235_814_400, 1_235_746_816, 16),
    # Not published: with a loss head of its own, 128,256 × 2,048 weights more.
    "llama-3.2-1b-untied": (1_498_482_688, 1_235_746_816, 16),
    "llama-3.2-3b": (3_212_749_824, 3_212_574_720, 28),
    "llama-3.1-8b": (8_030_261_248, 7_504_658_432, 32),
    "llama-3.1-70b": (70_553_706_496, 69_501_714_432, 80),
    "llama-3.1-405b": (405_853_388_800, 403_747_897_344, 126),
    "qwen3-0.6b": (596_049_920, 595_984_384, 28),
    "qwen3-1.7b": (1_720_574_976, 1_720_451_072, 28),
    "qwen3-4b": (4_022_468_096, 4_022_272_000, 36),
    "qwen3-8b": (8_190_735_360, 7_568_097_280, 36),
    "qwen3-14b": (14_768_307_200, 13_989_969_920, 40),
    "qwen3-32b": (32_762_123_264, 31_983_534_080, 64),
}
#: Not published either: the 1B's 14.5 squares of its width a layer, its embedding and its norms.
PUBLISHED |= {
    f"llama-1b-width-{w}": (*(128_256 * w + 16 * 14.5 * w**2 + norms for norms in (33 * w, 0)), 16)
    for w in (512, 1024, 3072, 4096)
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_published_size(name: str) -> None:
    model = build_model(name, torch.bfloat16, META, seed=0)
    num_parameters, num_matmul, num_layers = PUBLISHED[name]
    assert sum(p.numel() for p in model.parameters()) == num_parameters
    assert num_matmul_parameters(model) == num_matmul
    assert len(decoder_layers(model)) == num_layers
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_every_large_preset_is_checked_against_its_published_size() -> None:
    assert set(PRESETS) - set(PUBLISHED) == {"tiny-llama", "tiny-qwen3"}


@pytest.mark.parametrize(("name", "tied"), [("llama-3.2-1b", True), ("llama-3.1-8b", False)])
def test_head_shares_the_embedding_where_published(name: str, tied: bool) -> None:
    model = build_model(name, torch.bfloat16, META, seed=0)
    shared = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert shared is tied


@pytest.mark.parametrize(
    ("name", "block"), [("tiny-llama", "LlamaDecoderLayer"), ("tiny-qwen3", "Qwen3DecoderLayer")]
)
def test_decoder_layers_are_found_in_order(name: str, block: str) -> None:
    layers = decoder_layers(build_model(name, torch.float32, META, seed=0))
    assert [type(layer).__name__ for layer in layers] == [block] * 4
    assert [layer.self_attn.layer_idx for layer in layers] == [0, 1, 2, 3]


def test_decoder_layers_are_found_in_another_architecture() -> None:
    config = AutoConfig.for_model(
        "gpt2", n_layer=3, n_embd=64, n_head=2, vocab_size=512, bos_token_id=0, eos_token_id=0
    )
    with META:
        model = AutoModelForCausalLM.from_config(config)
    assert [type(layer).__name__ for layer in decoder_layers(model)] == ["GPT2Block"] * 3


def test_decoder_layers_are_not_mistaken_for_a_longer_list_of_small_modules() -> None:
    model = torch.nn.Module()
    model.norms = torch.nn.ModuleList(torch.nn.LayerNorm(4) for _ in range(9))
    model.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))
    assert decoder_layers(model) == list(model.blocks)


def test_model_without_equal_blocks_is_refused() -> None:
    mixed = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.ReLU()])
    with pytest.raises(UserError, match=r"^model: ModuleList has no list of equal decoder layers"):
        decoder_layers(mixed)


def test_weights_depend_on_the_seed_alone() -> None:
    first, same, other = (build_model("tiny-llama", torch.float32, CPU, s) for s in (1, 1, 2))
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, same.state_dict()[name])
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_model_is_built_for_training() -> None:
    model = build_model("tiny-llama", torch.float32, CPU, seed=0)
    assert model.training
    assert model.config.use_cache is False
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_folder_with_a_configuration_is_a_model(tmp_path: Path) -> None:
    hf_config("tiny-qwen3").save_pretrained(tmp_path)
    assert model_vocab_size(str(tmp_path)) == model_vocab_size("tiny-qwen3") == 2048
    model = build_model(str(tmp_path), torch.float32, META, seed=0)
    assert type(decoder_layers(model)[0]).__name__ == "Qwen3DecoderLayer"


@pytest.mark.parametrize(
    ("name", "words"), [("llama-3.2-1", "did you mean 'llama-3.2-1b'"), ("a/b/c", "owner/name")]
)
def test_unknown_model_is_refused_with_the_choices(name: str, words: str) -> None:
    with pytest.raises(UserError, match=r"^model: ") as caught:
        check_model_name(name)
    assert words in str(caught.value)
    assert "llama-3.1-8b" in str(caught.value)


@pytest.mark.parametrize("name", [*PRESETS, "meta-llama/Llama-3.1-8B"])
def test_presets_and_ids_may_name_a_model(name: str) -> None:
    check_model_name(name)


@pytest.mark.parametrize(
    ("folder", "content", "told"),
    [
        ("there", None, "holds no config.json; give a folder that does"),
        ("there", "{}", "no configuration for .*; give a folder with the config.json"),
        ("there", "[1]", "config.json' holds no names with values; give the config.json"),
        ("gone", None, "there is no folder .*; give one with a config.json"),
    ],
)
def test_folder_without_a_model_is_refused_in_one_line(
    folder: str, content: str | None, told: str, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    if content is not None:
        (tmp_path / "there" / "config.json").write_text(content)
    with pytest.raises(UserError, match=rf"^model: .*{told}") as caught:
        hf_config(str(tmp_path / folder))
    assert "\n" not in str(caught.value)


def test_a_configuration_that_gives_no_model_is_refused_in_one_line(tmp_path: Path) -> None:
    config = hf_config("tiny-llama")
    config.num_key_value_heads = 0
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"^model: .* cannot be built \(.*; mend its") as caught:
        build_model(str(tmp_path), torch.float32, CPU, seed=0)
    assert "\n" not in str(caught.value)
