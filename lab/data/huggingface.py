"""Data sets of the Hugging Face Hub, or folders laid out like them: streamed once, and packed."""

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

PATIENCE = 5.0  # seconds until a host that does not answer is given up
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
def _open(asked: HuggingFace) -> Corpus:
    releases = {package: require(package, "data=huggingface") for package in ("datasets", "tokenizers")}
    folder = Path(str(asked.path)).expanduser().absolute()
    named = {key: value for key, value in vars(asked).items() if key != "seed"}
    request = {**named, **releases, "files": _files(folder) if folder.is_dir() else []}

    def write(training: BinaryIO, reserved: BinaryIO, kind: np.dtype[Any]) -> Notes:
        if not folder.is_dir() or not is_local(asked.tokenizer):
            _reach_hub()
        splits = _splits(asked, folder)
        pieces = _pieces(asked, splits)
        parts = [_documents(asked, splits, held_out=held_out) for held_out in (False, True)]
        most = (asked.tokens, asked.tokens // HELD_OUT_EVERY)
        return fill((training, reserved), parts, pieces, kind, f"data.path={asked.path}", most)

    made = packed(request, asked.vocabulary, write)
    said: Notes = {"vocabulary": asked.vocabulary, "tokenizer": asked.tokenizer, **releases}
    return replace(made, notes={**made.notes, **said})


def _files(folder: Path) -> list[tuple[str, int, int]]:
    """What tells a folder from a changed one; its content may be too large to be read every time."""
    found = sorted(text.below(str(folder)), key=Path.as_posix)
    return [(file.as_posix(), file.stat().st_size, file.stat().st_mtime_ns) for file in found]


def _splits(asked: HuggingFace, folder: Path) -> Mapping[str, Any]:
    from datasets import load_dataset

    path = str(folder) if folder.is_dir() else asked.path
    try:
        splits: Mapping[str, Any] = load_dataset(path, asked.subset, revision=asked.revision, streaming=True)
    except Exception as refusal:  # whatever the library says
        raise _refusal(asked, refusal) from None
    if asked.split not in splits:
        raise RequestError(f"data.path={asked.path} has no split {asked.split!r}; {nearest(asked.split, splits)}")
    return splits


def _reach_hub() -> None:
    """Ask the Hub for a sign, since the libraries try for minutes.

    Raises:
        RequestError: none came.
    """
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception as refusal:  # of the client that the libraries use, whichever that is
        why = f"cannot reach {constants.ENDPOINT}: {_one_line(refusal)}"
        raise RequestError(f"{why}; data=huggingface needs it until its tokens are packed") from None


def _documents(asked: HuggingFace, splits: Mapping[str, Any], *, held_out: bool) -> Iterator[bytes]:
    """The documents of one part, in order."""
    apart = VALIDATION in splits and asked.split != VALIDATION
    rows = enumerate(splits[VALIDATION if apart and held_out else asked.split], 1)
    while True:
        try:
            place, row = next(rows)
        except StopIteration:
            return
        except Exception as refusal:  # whatever the library says
            raise _refusal(asked, refusal) from None
        if apart or (place % HELD_OUT_EVERY == 0) == held_out:
            yield text_of(row, asked.field, f"data.path={asked.path}, row {place}").encode("utf-8", errors="replace")


def _pieces(asked: HuggingFace, splits: Mapping[str, Any]) -> Bytes | Pieces:
    if asked.tokenizer == "bytes":
        return Bytes()
    if asked.tokenizer != "bpe":
        return pretrained(asked.tokenizer, asked.vocabulary)
    return learned(_first(_documents(asked, splits, held_out=False)), asked.vocabulary)


def _first(documents: Iterator[bytes]) -> Iterator[bytes]:
    size = 0
    for document in documents:
        yield document
        size += len(document)
        if size >= LEARNED_FROM:
            return


def _refusal(asked: HuggingFace, refusal: Exception) -> RequestError:
    return RequestError(f"cannot read data.path={asked.path}: {_one_line(refusal)}")


def _one_line(refusal: Exception) -> str:
    return " ".join(str(refusal).split()) or type(refusal).__name__
