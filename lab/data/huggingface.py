"""Data sets of the Hugging Face Hub, or folders of the same layout, streamed once and packed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

import lab.data.text as text
from lab.core import schema
from lab.core.errors import RequestError, nearest
from lab.core.registry import DATA
from lab.core.schema import PerRunSeed
from lab.data.corpus import Corpus, once
from lab.data.packing import HELD_OUT_EVERY, LEARNED_FROM, Notes, fill, packed
from lab.data.text import text_of
from lab.data.tokenizer import BYTES, Bytes, Pieces, check, is_local, learned, pretrained, require

PATIENCE = 5.0  # seconds to wait for the Hub to answer
VALIDATION = "validation"


@DATA.register("huggingface")
@dataclass(frozen=True)
class HuggingFace:
    """A data set of the Hugging Face Hub, or a folder of parquet or JSON lines, streamed until ``tokens`` are packed.

    ``subset``, ``split`` and ``revision`` are the data set's own names; ``field`` holds the text.  The tokenizer is
    ``bytes``, ``bpe``, or one of the Hub, or a folder with a ``tokenizer.json``; ``vocabulary`` is at least its size.
    Held out are documents of the split ``validation``, where there is none the 20th, 40th, ... of ``split``: a
    twentieth of the tokens at most.  Once packed it needs no network; without a ``revision`` it stays what it was then.
    """

    path: str | None = None
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    field: str = "text"
    tokens: int = schema.bounded(100_000_000, above=0)
    tokenizer: str = "bytes"
    vocabulary: int = schema.bounded(BYTES, above=0)
    seed: PerRunSeed = schema.seed(0)

    def open(self) -> Corpus:
        """Stream and pack, once for all processes.

        Raises:
            RequestError: no path, a missing extra, no network, nothing there under these names, a vocabulary that the
                tokenizer cannot have, or a cache that cannot be written.
        """
        if not self.path:
            raise RequestError("data=huggingface needs data.path=NAME|DIR, as in data.path=allenai/c4")
        check(self.tokenizer, self.vocabulary)
        return _open(replace(self, seed=0))


@once
def _open(source: HuggingFace) -> Corpus:
    releases = {package: require(package, "data=huggingface") for package in ("datasets", "tokenizers")}
    folder = Path(str(source.path)).expanduser().absolute()
    named = {key: value for key, value in vars(source).items() if key != "seed"}
    request = {**named, **releases, "files": _files(folder) if folder.is_dir() else []}

    def write(training: BinaryIO, reserved: BinaryIO, kind: np.dtype[Any]) -> Notes:
        if not folder.is_dir() or not is_local(source.tokenizer):
            _reach_hub()
        splits = _splits(source, folder)
        pieces = _pieces(source, splits)
        parts = [_documents(source, splits, held_out=held_out) for held_out in (False, True)]
        most = (source.tokens, source.tokens // HELD_OUT_EVERY)
        return fill((training, reserved), parts, pieces, kind, f"data.path={source.path}", most)

    corpus = packed(request, source.vocabulary, write)
    tokens: Notes = {"vocabulary": source.vocabulary, "tokenizer": source.tokenizer, **releases}
    return replace(corpus, notes={**corpus.notes, **tokens})


def _files(folder: Path) -> list[tuple[str, int, int]]:
    """Path, size and time of change of every file; the content may be too large to read every time."""
    paths = sorted(text.below(str(folder)), key=Path.as_posix)
    return [(file.as_posix(), file.stat().st_size, file.stat().st_mtime_ns) for file in paths]


def _splits(source: HuggingFace, folder: Path) -> Mapping[str, Any]:
    from datasets import load_dataset

    path = str(folder) if folder.is_dir() else source.path
    try:
        splits: Mapping[str, Any] = load_dataset(path, source.subset, revision=source.revision, streaming=True)
    except Exception as fault:  # the library raises exceptions of any type
        raise _refusal(source, fault) from None
    if source.split not in splits:
        raise RequestError(f"data.path={source.path} has no split {source.split!r}; {nearest(source.split, splits)}")
    return splits


def _reach_hub() -> None:
    """Check that the Hub answers, since the libraries retry for minutes."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception as fault:  # the HTTP client depends on the library's version
        failure = f"cannot reach {constants.ENDPOINT}: {_one_line(fault)}"
        raise RequestError(f"{failure}; data=huggingface needs it until its tokens are packed") from None


def _documents(source: HuggingFace, splits: Mapping[str, Any], *, held_out: bool) -> Iterator[bytes]:
    """The documents of one part, in order."""
    apart = VALIDATION in splits and source.split != VALIDATION
    rows = enumerate(splits[VALIDATION if apart and held_out else source.split], 1)
    while True:
        try:
            number, row = next(rows)
        except StopIteration:
            return
        except Exception as fault:  # the library raises exceptions of any type
            raise _refusal(source, fault) from None
        if apart or (number % HELD_OUT_EVERY == 0) == held_out:
            yield text_of(row, source.field, f"data.path={source.path}, row {number}").encode("utf-8", errors="replace")


def _pieces(source: HuggingFace, splits: Mapping[str, Any]) -> Bytes | Pieces:
    if source.tokenizer == "bytes":
        return Bytes()
    if source.tokenizer != "bpe":
        return pretrained(source.tokenizer, source.vocabulary)
    return learned(_first(_documents(source, splits, held_out=False)), source.vocabulary)


def _first(documents: Iterator[bytes]) -> Iterator[bytes]:
    size = 0
    for document in documents:
        yield document
        size += len(document)
        if size >= LEARNED_FROM:
            return


def _refusal(source: HuggingFace, fault: Exception) -> RequestError:
    return RequestError(f"cannot read data.path={source.path}: {_one_line(fault)}")


def _one_line(fault: Exception) -> str:
    return " ".join(str(fault).split()) or type(fault).__name__
