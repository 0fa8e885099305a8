"""From a corpus to packed token blocks, once per corpus and tokenizer.

Tokens are cached as one flat array on disk and read through a memory map, so a run of eight
processes tokenises nothing and holds nothing in memory. No torch here: the launcher prepares
the data and reports any mistake before a GPU is touched.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fp8study.core.config import RunConfig
from fp8study.core.errors import UserError, first_line
from fp8study.core.files import cache_dir, locked, write_whole, writing
from fp8study.core.presets import HUB_IDS, PRESETS, is_reachable
from fp8study.data.corpus import SEPARATOR, Corpus, load_corpus

if TYPE_CHECKING:
    import tokenizers

Show = Callable[[str], object]

#: Size of the vocabulary that `bpe` learns, unless the model's own is smaller.
BPE_VOCAB_SIZE = 8192

#: Every byte: with fewer tokens no tokenizer can write all texts.
_SMALLEST_VOCABULARY = 256

#: Characters of a document that are tokenised in one go, and pieces in one batch.
PIECE_CHARS = 100_000
_BATCH = 2048
_SECONDS_BETWEEN_LINES = 5.0


#: By their suffixes, the files of a folder that may be part of a tokenizer.
_TOKENIZER_FILES = (".json", ".txt", ".model")


class _NoTokenizer(UserError):
    """The tokenizer itself cannot be had; the text may be fine."""


@dataclass(frozen=True)
class PreparedData:
    corpus: str
    corpus_sha256: str
    tokenizer: str
    """``bpe-8192`` for one trained on this corpus, else its id or folder."""
    tokenizer_sha256: str
    vocab_size: int
    num_train_tokens: int
    warnings: list[str]
    """Fallbacks taken on the way; they go into the run record."""
    folder: str
    unigram_loss: float | None = None
    """Of who knows the frequency of each token alone, nats per token; None: not counted."""

    def tokens(self) -> npt.NDArray[np.uint32]:
        """Return all tokens, documents separated by the end token: uint32[num_train_tokens]."""
        return np.load(Path(self.folder) / "tokens.npy", mmap_mode="r")


def prepare(
    config: RunConfig, model_vocab_size: int, show: Show = lambda line: None
) -> PreparedData:
    """Tokenise the configured corpus, or find it in the cache.

    Args:
        config: Its corpus, tokenizer, sequence length and batch are used.
        model_vocab_size: No token id may reach it.
        show: Told what takes long.

    Raises:
        UserError: The corpus or tokenizer cannot be had, or is too short for one step or for the
            unseen sequences of a noise measurement.
    """
    corpus = load_corpus(config.corpus)
    name, model = config.tokenizer, config.model
    if name == "auto":  # the tiny presets have none of their own
        name = HUB_IDS.get(model, "bpe" if model in PRESETS else model)
    try:
        data = _cached(corpus, name, model_vocab_size, show)
    except _NoTokenizer as error:
        if config.tokenizer != "auto":
            raise
        # Of this attempt, not of the data: next time the model's own may be there.
        notes = [f"{error}; a BPE trained on the corpus stands in"]
        if config.corpus == "synthetic":  # no loss on made-up text is compared with another's
            notes = []
        data = replace(_cached(corpus, "bpe", model_vocab_size, show), warnings=notes)
    num_sequences = data.num_train_tokens // config.sequence_length
    if num_sequences < config.sequences_per_step:
        raise UserError(
            f"sequence_length: {config.sequence_length} × {config.sequences_per_step} sequences "
            f"a step is longer than the corpus ({data.num_train_tokens} tokens); "
            "lower it or give a larger corpus"
        )
    if num_sequences - config.validation_sequences < config.sequences_per_step:
        raise UserError(
            f"validation_sequences: {config.validation_sequences} of the corpus's {num_sequences} "
            f"leave fewer to train on than the {config.sequences_per_step} of a step; lower it to "
            f"{num_sequences - config.sequences_per_step} or less"
        )
    if config.noise_at_steps:
        BlockOrder(config, data.num_train_tokens).unseen(config.noise_samples)
    return data


def _cached(corpus: Corpus, name: str, model_vocab_size: int, show: Show) -> PreparedData:
    """Return a corpus in the tokens of one tokenizer, which is part of the cache's key."""
    key = json.dumps([corpus.sha256, *_identity(name), model_vocab_size])
    folder = cache_dir() / "tokens" / hashlib.sha256(key.encode()).hexdigest()[:16]
    with locked(folder / "lock", "FP8STUDY_CACHE"):  # others wait for the one that builds
        if not (folder / "data.json").exists():
            with writing("FP8STUDY_CACHE", folder, "free some space or set it to another folder"):
                _build(corpus, name, model_vocab_size, folder, show)
    content = json.loads((folder / "data.json").read_text(encoding="utf-8"))
    # The cache may have been moved, and the same text had another name.
    data = PreparedData(**content | {"folder": str(folder), "corpus": corpus.name})
    if data.unigram_loss is None:  # made before it was counted
        data = replace(data, unigram_loss=unigram_loss(data.tokens()))
    return data


def _identity(tokenizer: str) -> list[str]:
    """Return what a tokenizer is known by: its name, and of a folder what its small files hold."""
    files = sorted(Path(tokenizer).glob("*")) if tokenizer != "bpe" else []
    ours = [f for f in files if f.suffix in _TOKENIZER_FILES and f.is_file()]
    readable = (file.read_bytes() for file in ours if os.access(file, os.R_OK))
    return [tokenizer, *(hashlib.sha256(content).hexdigest() for content in readable)]


def _build(corpus: Corpus, wanted: str, model_vocab_size: int, folder: Path, show: Show) -> None:
    pieces = [cut(document) for document in corpus.documents]
    size = sum(map(len, corpus.documents)) / 1e6
    if wanted == "bpe":
        show(f"training a tokenizer on {corpus.name}, {size:.1f} million characters; once …")
        tokenizer, end, name = _trained(itertools.chain(*pieces), model_vocab_size)
    else:
        (tokenizer, end), name = _pretrained(wanted), wanted
    show(f"tokenising {corpus.name}, {size:.1f} million characters; once per tokenizer …")
    tokens = _encoded(tokenizer, end, pieces, show)
    if int(tokens.max()) >= model_vocab_size:
        remedy = "give a model with a larger one" if wanted == "bpe" else "use tokenizer=bpe"
        raise UserError(
            f"tokenizer: '{name}' makes token {int(tokens.max())}, outside the model's "
            f"vocabulary of {model_vocab_size}; {remedy}"
        )
    serialised = tokenizer.to_str()
    try:
        np.save(folder / "tokens.npy", tokens)
        (folder / "tokenizer.json").write_text(serialised, encoding="utf-8")
        data = PreparedData(
            corpus=corpus.name,
            corpus_sha256=corpus.sha256,
            tokenizer=name,
            tokenizer_sha256=hashlib.sha256(serialised.encode()).hexdigest(),
            vocab_size=tokenizer.get_vocab_size(),
            num_train_tokens=len(tokens),
            warnings=[],
            folder=str(folder),
            unigram_loss=unigram_loss(tokens),
        )
        # Written last: its presence says that the tokens beside it are whole.
        write_whole(folder / "data.json", json.dumps(asdict(data)))
    except OSError:
        (folder / "tokens.npy").unlink(missing_ok=True)  # give the space back
        raise


def unigram_loss(tokens: npt.NDArray[np.uint32]) -> float:
    """Return the entropy of tokens that are drawn one by one, in nats."""
    counts = np.bincount(tokens)
    share = counts[counts > 0] / len(tokens)
    return float(-(share * np.log(share)).sum())


def cut(document: str) -> list[str]:
    """Cut a long document into pieces of `PIECE_CHARS` at most, before white space if there is any.

    A tokenizer works on one document with one core, and some take the square of its length.
    """
    pieces, start = [], 0
    while len(document) - start > PIECE_CHARS:
        end = max(document.rfind(space, start + 1, start + PIECE_CHARS) for space in " \n")
        end = end if end > start else start + PIECE_CHARS
        pieces.append(document[start:end])
        start = end
    return [*pieces, document[start:]]


def _encoded(
    tokenizer: tokenizers.Tokenizer, end: int, documents: list[list[str]], show: Show
) -> npt.NDArray[np.uint32]:
    """Return all documents' tokens, each document followed by the end token."""
    flat = [(piece, n == len(pieces)) for pieces in documents for n, piece in enumerate(pieces, 1)]
    found, spoken = [], time.monotonic()
    for start in range(0, len(flat), _BATCH):
        batch = flat[start : start + _BATCH]
        encodings = tokenizer.encode_batch([text for text, _ in batch], add_special_tokens=False)
        for encoding, (_, is_last) in zip(encodings, batch, strict=True):
            found.append(np.array(encoding.ids + [end] * is_last, dtype=np.uint32))
        if time.monotonic() - spoken > _SECONDS_BETWEEN_LINES:
            spoken = time.monotonic()
            show(f"tokenising: {100 * (start + len(batch)) // len(flat)} % done …")
    return np.concatenate(found)


def _pretrained(name: str) -> tuple[tokenizers.Tokenizer, int]:
    def missing(reason: str) -> _NoTokenizer:
        return _NoTokenizer(f"tokenizer: '{name}' {reason}; use tokenizer=bpe")

    if not is_reachable() and not Path(name).exists() and not _is_downloaded(name):
        raise missing(
            "cannot be loaded (the hub cannot be reached, and nothing of it is in the cache)"
        )
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # the hub client raises a dozen unrelated kinds
        raise missing(f"cannot be loaded ({first_line(error).rstrip('.')})") from error
    # From a folder without tokenizer files transformers makes an empty one instead of failing.
    if loaded.backend_tokenizer.get_vocab_size() < _SMALLEST_VOCABULARY:
        raise missing("holds no vocabulary")
    if loaded.eos_token_id is None:
        raise missing("has no end-of-text token")
    return loaded.backend_tokenizer, int(loaded.eos_token_id)


def _is_downloaded(hub_id: str) -> bool:
    """Return whether the hub's cache holds anything under an id; much faster than to load it."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE, "--".join(["models", *hub_id.split("/")])).is_dir()


def _trained(texts: Iterable[str], model_vocab_size: int) -> tuple[tokenizers.Tokenizer, int, str]:
    """Train a byte-level BPE; the same texts give the same tokenizer, its end token and name."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    vocab_size = min(BPE_VOCAB_SIZE, model_vocab_size)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = tokenizer.token_to_id(SEPARATOR)
    assert end is not None  # it was given to the trainer
    return tokenizer, end, f"bpe-{tokenizer.get_vocab_size()}"


class BlockOrder:
    """Which token block each rank sees in each forward pass.

    Blocks are shuffled anew for every epoch from the seed alone. A step takes the next
    ``num_gpus × accumulation × micro-batch`` blocks, so two precisions with one seed see the
    same tokens in the same order, ranks never share a block within an epoch, and equal
    effective batches hold equal tokens however they are split. The corpus's last
    ``validation_sequences`` blocks are never among them.
    """

    def __init__(self, config: RunConfig, num_tokens: int) -> None:
        self.num_blocks = num_tokens // config.sequence_length - config.validation_sequences
        self._config = config
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def block_ids(self, step: int, micro_step: int, rank: int) -> list[int]:
        """Return the `micro_batch_size` block numbers of one forward pass, counted from 0."""
        size = self._config.micro_batch_size
        first = step * self._config.sequences_per_step
        first += (micro_step * self._config.num_gpus + rank) * size
        return [self._block(first + offset) for offset in range(size)]

    def epochs(self, num_steps: int) -> float:
        return num_steps * self._config.sequences_per_step / self.num_blocks

    def held_out(self) -> list[int]:
        """Return the blocks kept for validation, the same ones whatever the seed."""
        return [self.num_blocks + i for i in range(self._config.validation_sequences)]

    def unseen(self, count: int) -> list[int]:
        """Return `count` blocks that the run never trains on: the next ones of its first epoch.

        Raises:
            UserError: Training leaves fewer.
        """
        used = self._config.num_steps * self._config.sequences_per_step
        if used + count > self.num_blocks:
            raise UserError(
                f"noise_samples: {count} sequences that training does not see are more than the "
                f"{max(0, self.num_blocks - used)} that num_steps={self._config.num_steps} leaves "
                f"of {self.num_blocks}; lower num_steps or give a larger corpus"
            )
        return [self._block(used + offset) for offset in range(count)]

    def _block(self, position: int) -> int:
        epoch, index = divmod(position, self.num_blocks)
        if epoch != self._epoch:
            draw = np.random.default_rng([self._config.seed, epoch])
            self._order, self._epoch = draw.permutation(self.num_blocks), epoch
        return int(self._order[index])


def batch(
    tokens: npt.NDArray[np.uint32], block_ids: list[int], sequence_length: int
) -> npt.NDArray[np.int64]:
    """Cut the given blocks out of the token array: int64[len(block_ids), sequence_length]."""
    rows = [tokens[b * sequence_length : (b + 1) * sequence_length] for b in block_ids]
    return np.stack(rows).astype(np.int64)
