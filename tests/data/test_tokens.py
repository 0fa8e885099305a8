import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8study.core.config import RunConfig, make_config
from fp8study.core.errors import UserError
from fp8study.data.corpus import SEPARATOR, check_corpus, load_corpus
from fp8study.data.stories import stories
from fp8study.data.tokens import (
    PIECE_CHARS,
    PreparedData,
    cache_dir,
    cut,
    prepare,
    unigram_loss,
)

VOCAB_SIZE = 512
SYNTHETIC_SHA256 = "53865c1fce4dd79d982cf7ab8c3108441f05ff5158fbb10e252091dee0ccda86"


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small corpus, and a cache of its own."""
    monkeypatch.setenv("FP8STUDY_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "stories.txt"
    path.write_text(SEPARATOR.join(stories(seed=3, count=40)), encoding="utf-8")
    return path


def config_for_text(path: Path, **changes: object) -> RunConfig:
    values = {"model": "tiny-llama", "sequence_length": 64, "corpus": f"text:{path}"}
    return make_config(values | changes)


def decode(data: PreparedData, tokens: np.ndarray) -> str:
    import tokenizers

    own = tokenizers.Tokenizer.from_file(str(Path(data.folder) / "tokenizer.json"))
    return own.decode(tokens.tolist(), skip_special_tokens=False)


def test_same_seed_tells_the_same_stories() -> None:
    assert list(stories(1, 20)) == list(stories(1, 20))
    assert list(stories(1, 20)) != list(stories(2, 20))
    assert list(stories(1, 5)) == list(stories(1, 20))[:5]


def test_stories_are_whole_and_varied() -> None:
    told = list(stories(0, 200))
    assert len(set(told)) == 200
    for story in told:
        assert not set("{}|\n") & set(story)
        assert story[-1] in '."'
        assert 20 < len(story.split()) < 200


def test_synthetic_corpus_is_the_same_text_everywhere() -> None:
    corpus = load_corpus("synthetic")
    assert (corpus.name, len(corpus.documents)) == ("synthetic", 8000)
    assert corpus.sha256 == SYNTHETIC_SHA256


def test_text_is_split_at_the_separator_and_named_without_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text(f"One äß.\n{SEPARATOR}\n  {SEPARATOR}Two.\n", encoding="utf-8")
    corpus = load_corpus(f"text:{path}")
    assert corpus.documents == ["One äß.", "Two."]
    assert corpus.name == "text:own.txt"


def test_hash_of_a_corpus_depends_on_where_documents_end(tmp_path: Path) -> None:
    path, hashes = tmp_path / "own.txt", set()
    for content in (f"ab{SEPARATOR}c", f"a{SEPARATOR}bc", "abc"):
        path.write_text(content)
        hashes.add(load_corpus(f"text:{path}").sha256)
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tinystory", "did you mean 'tinystories'"),
        ("wikipedia", "give one of tinystories, text:PATH, synthetic"),
        (__file__, f"did you mean 'text:{__file__}'"),
        ("text:absent.txt", "absent.txt"),
        ("text:.", "'.' is no file"),
        ("text:/dev/null", "'/dev/null' is no file; set corpus=text:PATH"),
    ],
)
def test_unknown_corpus_is_refused_before_it_is_read(name: str, words: str) -> None:
    with pytest.raises(UserError, match=r"^corpus: ") as caught:
        check_corpus(name)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"caf\xe9 " * 9, "as UTF-8 ('utf-8' codec can't decode"),
        (b"seven..", "has 7 bytes, so fewer tokens than the 8 of a step; give a longer text"),
        ("ä".encode() * 2**20, None),  # the first bytes may end within a letter
    ],
)
def test_text_that_no_step_could_read_is_refused(
    tmp_path: Path, content: bytes, words: str | None
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"." * (words is None) + content)
    if words is None:
        return check_corpus(f"text:{path}", 8)
    with pytest.raises(UserError, match=f"^corpus: .*{re.escape(words)}"):
        check_corpus(f"text:{path}", 8)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "is empty"), (SEPARATOR.encode() * 3, "no text"), (bytes(9000), "no text"),
     (b"caf\xe9", "; save it as UTF-8")],
)  # fmt: skip
def test_file_without_usable_text_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^corpus: .*{words}"):
        load_corpus(f"text:{path}")


def test_tokens_are_the_documents_each_followed_by_the_separator(text: Path) -> None:
    data = prepare(config_for_text(text), VOCAB_SIZE)
    tokens = data.tokens()
    assert (tokens.dtype, len(tokens)) == (np.uint32, data.num_train_tokens)
    assert tokens.max() < VOCAB_SIZE
    assert data.tokenizer == f"bpe-{data.vocab_size}" == f"bpe-{VOCAB_SIZE}"
    documents = load_corpus(f"text:{text}").documents
    assert decode(data, tokens) == "".join(document + SEPARATOR for document in documents)


def test_cache_is_used_again_but_not_for_other_data(text: Path) -> None:
    first = prepare(config_for_text(text), VOCAB_SIZE)
    written = (Path(first.folder) / "data.json").stat().st_mtime_ns
    assert prepare(config_for_text(text, seed=1, num_steps=11), VOCAB_SIZE) == first
    assert (Path(first.folder) / "data.json").stat().st_mtime_ns == written
    same = text.rename(text.with_name("renamed.txt"))
    assert prepare(config_for_text(same), VOCAB_SIZE) == replace(first, corpus="text:renamed.txt")
    same.rename(text)
    smaller = prepare(config_for_text(text), 300)
    assert (smaller.vocab_size, smaller.folder == first.folder) == (300, False)
    text.write_text(text.read_text() + SEPARATOR + "One more.")
    assert prepare(config_for_text(text), VOCAB_SIZE).corpus_sha256 != first.corpus_sha256


def test_same_text_gives_the_same_tokenizer(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(config_for_text(text), VOCAB_SIZE)
    monkeypatch.setenv("FP8STUDY_CACHE", str(text.parent / "another"))
    second = prepare(config_for_text(text), VOCAB_SIZE)
    assert replace(second, folder=first.folder) == first
    assert np.array_equal(first.tokens(), second.tokens())


def test_unfinished_cache_is_built_again(text: Path) -> None:
    first = prepare(config_for_text(text), VOCAB_SIZE)
    (Path(first.folder) / "data.json").unlink()
    (Path(first.folder) / "tokens.npy").write_bytes(b"half")
    again = prepare(config_for_text(text), VOCAB_SIZE)
    assert again == first
    assert len(again.tokens()) == first.num_train_tokens


def test_cache_may_be_moved(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(config_for_text(text), VOCAB_SIZE)
    moved = cache_dir().rename(text.parent / "moved")
    monkeypatch.setenv("FP8STUDY_CACHE", str(moved))
    assert len(prepare(config_for_text(text), VOCAB_SIZE).tokens()) == first.num_train_tokens


def test_corpus_too_short_for_one_step_is_refused(text: Path) -> None:
    with pytest.raises(UserError, match=r"^sequence_length: 100000 × 1 .*longer than the corpus"):
        prepare(config_for_text(text, sequence_length=100_000), VOCAB_SIZE)
    with pytest.raises(UserError, match=r"^sequence_length: 64 × 1000 .*longer than the corpus"):
        prepare(config_for_text(text, gradient_accumulation_steps=1000), VOCAB_SIZE)


def test_unwritable_cache_is_named(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8STUDY_CACHE", str(text / "below-a-file"))
    with pytest.raises(UserError, match=r"^FP8STUDY_CACHE: "):
        prepare(config_for_text(text), VOCAB_SIZE)


def saved_tokenizer(folder: Path, num_fillers: int = 300, end: str | None = "[END]") -> Path:
    """Save a tokenizer that knows two words of the text, numbered far apart."""
    import tokenizers
    import transformers

    words = {"[UNK]": 0, "the": 1, "[END]": 2, "was": 900}
    words |= {f"filler{number}": number for number in range(3, 3 + num_fillers)}
    model = tokenizers.models.WordLevel(words, unk_token="[UNK]")
    own = tokenizers.Tokenizer(model)
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, unk_token="[UNK]", eos_token=end
    )
    fast.save_pretrained(folder)
    return folder


def test_tokenizer_may_be_a_folder(text: Path, tmp_path: Path) -> None:
    folder = saved_tokenizer(tmp_path / "tokenizer")
    data = prepare(config_for_text(text, tokenizer=str(folder)), 2048)
    assert data.tokenizer == str(folder)
    assert set(np.unique(data.tokens())) == {0, 1, 2, 900}
    assert data.tokens()[-1] == 2  # its own end token closes every document


def test_a_folder_that_holds_another_tokenizer_is_read_again(text: Path, tmp_path: Path) -> None:
    config = config_for_text(text, tokenizer=str(tmp_path / "tokenizer"))
    saved_tokenizer(tmp_path / "tokenizer")
    first = prepare(config, 2048)
    saved_tokenizer(tmp_path / "tokenizer", num_fillers=301)
    second = prepare(config, 2048)
    assert second.vocab_size == first.vocab_size + 1
    assert second.tokenizer_sha256 != first.tokenizer_sha256


@pytest.mark.parametrize(
    ("values", "message"),
    [({"num_fillers": 3}, "holds no vocabulary"), ({"end": None}, "has no end-of-text token")],
)
def test_a_tokenizer_that_cannot_write_text_is_refused(
    values: dict[str, Any], message: str, text: Path, tmp_path: Path
) -> None:
    folder = saved_tokenizer(tmp_path / "tokenizer", **values)
    with pytest.raises(UserError, match=f"^tokenizer: .*{message}; use tokenizer=bpe"):
        prepare(config_for_text(text, tokenizer=str(folder)), 2048)


def test_tokenizer_larger_than_the_model_is_refused(text: Path, tmp_path: Path) -> None:
    folder = saved_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(UserError, match=r"^tokenizer: .*token 900.* of 512; use tokenizer=bpe"):
        prepare(config_for_text(text, tokenizer=str(folder)), VOCAB_SIZE)


def test_tokenizer_that_cannot_be_had_is_refused(text: Path) -> None:
    with pytest.raises(UserError, match=r"^tokenizer: './absent' .*use tokenizer=bpe"):
        prepare(config_for_text(text, tokenizer="./absent"), VOCAB_SIZE)


def test_own_tokenizer_that_cannot_be_had_is_replaced_and_noted(text: Path, tmp_path: Path) -> None:
    data = prepare(config_for_text(text, model=str(tmp_path)), VOCAB_SIZE)
    assert data.tokenizer == f"bpe-{VOCAB_SIZE}"
    assert len(data.warnings) == 1
    assert "stands in" in data.warnings[0]
    assert prepare(config_for_text(text), VOCAB_SIZE).warnings == []
    made_up = replace(config_for_text(text, model=str(tmp_path)), corpus="synthetic")
    assert prepare(made_up, VOCAB_SIZE).warnings == []


def test_a_stand_in_is_left_as_soon_as_the_models_own_tokenizer_is_back(
    text: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = config_for_text(text, model=str(model))
    stand_in = prepare(config, 2048)
    assert (stand_in.tokenizer[:4], len(stand_in.warnings)) == ("bpe-", 1)
    assert len(prepare(config, 2048).warnings) == 1  # found in the cache, and still said
    saved_tokenizer(model)
    own = prepare(config, 2048)
    assert (own.tokenizer, own.warnings) == (str(model), [])
    assert prepare(replace(config, tokenizer="bpe"), 2048) == replace(stand_in, warnings=[])


def test_an_id_of_which_nothing_is_downloaded_is_not_looked_for(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda name: 1 / 0)
    with pytest.raises(
        UserError, match=r"'who/knows' cannot be loaded \(the hub cannot be reached"
    ):
        prepare(config_for_text(text, tokenizer="who/knows"), VOCAB_SIZE)


def test_one_long_line_is_tokenised_in_pieces_to_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tokenizers

    path, said = tmp_path / "line.txt", list[str]()
    line = " ".join(stories(seed=3, count=700))
    path.write_text(line + SEPARATOR + "Short.")
    sizes = []
    encode_batch = tokenizers.Tokenizer.encode_batch

    def watched(self: Any, texts: list[str], **options: Any) -> Any:
        sizes.extend(map(len, texts))
        return encode_batch(self, texts, **options)

    monkeypatch.setattr(tokenizers.Tokenizer, "encode_batch", watched)
    data = prepare(config_for_text(path), VOCAB_SIZE, said.append)
    assert len(line) > 2 * PIECE_CHARS >= 2 * max(sizes)
    assert decode(data, data.tokens()) == line + SEPARATOR + "Short." + SEPARATOR
    own = tokenizers.Tokenizer.from_file(str(Path(data.folder) / "tokenizer.json"))
    assert data.tokens()[: len(own.encode(line).ids)].tolist() == own.encode(line).ids
    assert [word.split()[0] for word in said] == ["training", "tokenising"]
    said.clear()
    assert prepare(config_for_text(path), VOCAB_SIZE, said.append) == data
    assert said == []  # nothing takes long the second time


def test_a_text_without_white_space_is_cut_too() -> None:
    text = "x" * (2 * PIECE_CHARS + 5)
    assert [len(piece) for piece in cut(text)] == [PIECE_CHARS, PIECE_CHARS, 5]
    assert cut("a b") == ["a b"]


def test_the_loss_of_who_knows_frequencies_alone_is_the_tokens_entropy() -> None:
    assert unigram_loss(np.array([3, 1, 3, 1], np.uint32)) == pytest.approx(np.log(2))
    assert unigram_loss(np.zeros(9, np.uint32)) == 0


def test_a_cache_made_before_frequencies_were_counted_has_them_counted(text: Path) -> None:
    made = prepare(config_for_text(text), VOCAB_SIZE)
    file = Path(made.folder) / "data.json"
    content = json.loads(file.read_text())
    for older in ({k: v for k, v in content.items() if k != "unigram_loss"},
                  content | {"unigram_loss": None}):  # fmt: skip
        file.write_text(json.dumps(older))
        assert prepare(config_for_text(text), VOCAB_SIZE) == made
