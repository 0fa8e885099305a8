"""Where the text comes from: a list of documents with a name and a hash."""

from __future__ import annotations

import codecs
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

from fp8study.core.errors import UserError, first_line, nearest, one_line
from fp8study.core.presets import is_reachable
from fp8study.data.stories import stories

SEPARATOR = "<|endoftext|>"

# Pinned, so that the same configuration reads the same text next year.
TINYSTORIES_ID = "roneneldan/TinyStories"
TINYSTORIES_REVISION = "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"
#: Document A trains on the first tenth; far more than any study here consumes.
TINYSTORIES_SPLIT = "train[:10%]"

#: About 3.9 MB, 0.9 million tokens of a small vocabulary.
SYNTHETIC_STORIES = 8000
SYNTHETIC_SEED = 20251226

#: Passes over a text above which it is told that it is seen again, and what follows from that.
SEEN_AGAIN = 1.2
REMEMBERS = "from the second time on a training loss also shows what the model remembers"
#: Tokens of the corpora that are no file, by the smallest vocabulary that we tokenise them with.
_NUM_TOKENS = {"tinystories": 45_000_000, "synthetic": 900_000}
#: Of a text: no tokenizer here makes longer tokens on average.
_BYTES_PER_TOKEN = 5
#: Of a text, read before anything starts: enough to see that it is no UTF-8.
_FIRST_BYTES = 2**20

KINDS = ("tinystories", "text:PATH", "synthetic")


@dataclass(frozen=True)
class Corpus:
    name: str
    """As the configuration names it, without the reader's folders."""
    documents: list[str]
    sha256: str
    """Over the documents' UTF-8, each followed by the separator."""


def check_corpus(corpus: str, num_tokens: int = 1) -> None:
    """Refuse a corpus that cannot be read, before anything expensive starts.

    Args:
        corpus: As the configuration names it.
        num_tokens: What one step takes of it.

    Raises:
        UserError: The kind is unknown; the file is missing, not readable, no UTF-8 at its start,
            or has fewer bytes than a step has tokens.
    """
    if corpus in ("tinystories", "synthetic"):
        return
    if not corpus.startswith("text:"):
        hint = nearest(corpus, ("tinystories", "synthetic"))
        hint = f" (did you mean 'text:{corpus}'?)" if Path(corpus).is_file() else hint
        raise UserError(f"corpus: '{corpus}' is unknown{hint}; give one of {', '.join(KINDS)}")
    path = Path(corpus.removeprefix("text:"))
    if not path.is_file():
        named = corpus.removeprefix("text:").strip()  # an empty path is the folder that we are in
        wrong = f"'{path if named else corpus}' is no file"
        where = "" if path.is_absolute() else f" in '{Path.cwd()}'"
        wrong = wrong if path.exists() else f"there is no file '{path}'{where}"
        raise UserError(f"corpus: {wrong}; set corpus=text:PATH of a UTF-8 file of yours")
    if (size := path.stat().st_size) == 0:
        raise UserError(f"corpus: '{path}' is empty; it needs stories separated by {SEPARATOR}")
    try:
        with path.open("rb") as file:
            codecs.getincrementaldecoder("utf-8")().decode(file.read(_FIRST_BYTES))
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    if size < num_tokens:  # a token is a byte at least
        raise UserError(
            f"corpus: '{path}' has {size:,} bytes, so fewer tokens than the {num_tokens:,} of a "
            "step; give a longer text, or lower sequence_length, micro_batch_size or "
            "gradient_accumulation_steps"
        )


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(
        f"corpus: cannot read '{path}' as UTF-8 ({one_line(error)}); save it as UTF-8, and "
        "give yourself access"
    )


def fewest_tokens(corpus: str) -> int:
    """Return roughly how many tokens a corpus has at least, without tokenising it.

    Raises:
        UserError: As `check_corpus`.
    """
    check_corpus(corpus)
    path = Path(corpus.removeprefix("text:"))
    return _NUM_TOKENS.get(corpus) or math.ceil(path.stat().st_size / _BYTES_PER_TOKEN)


def load_corpus(corpus: str) -> Corpus:
    """Read a corpus: ``tinystories`` of a pinned revision, ``text:PATH`` or ``synthetic``.

    Raises:
        UserError: It is unknown, missing, empty, not UTF-8, or the hub cannot be reached.
    """
    check_corpus(corpus)
    if corpus == "synthetic":
        name, documents = corpus, list(stories(SYNTHETIC_SEED, SYNTHETIC_STORIES))
    elif corpus == "tinystories":
        name, documents = corpus, _tinystories()
    else:
        path = Path(corpus.removeprefix("text:"))
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(path, error) from error
        parts = map(str.strip, text.split(SEPARATOR))
        name, documents = f"text:{path.name}", list(filter(_is_text, parts))
        if not documents:
            raise UserError(
                f"corpus: '{path}' holds no text; it needs stories separated by {SEPARATOR}"
            )
    digest = hashlib.sha256()
    for document in documents:
        digest.update((document + SEPARATOR).encode())
    return Corpus(name, documents, digest.hexdigest())


def _is_text(document: str) -> bool:
    """Whether anything in it can be seen; white space and NUL bytes cannot."""
    return any(letter.isprintable() and not letter.isspace() for letter in document)


def _tinystories() -> list[str]:
    is_reachable()
    import datasets

    try:
        table = datasets.load_dataset(
            TINYSTORIES_ID, split=TINYSTORIES_SPLIT, revision=TINYSTORIES_REVISION
        )
    except Exception as error:  # the hub client raises a dozen unrelated kinds
        raise UserError(
            f"corpus: 'tinystories' cannot be loaded from the hub ({first_line(error)}); connect, "
            "fill the datasets cache, or use corpus=text:PATH or corpus=synthetic"
        ) from error
    return [story for story in table["text"] if story.strip()]
