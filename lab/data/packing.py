"""Packing: documents split, tokenized, laid end to end and kept in a cache."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from lab.core import files, machine
from lab.core.errors import RequestError
from lab.data.corpus import HELD_OUT_TARGETS, TRAINING, Corpus, Tokens, count_pairs, draw, fingerprint
from lab.data.tokenizer import Bytes, Pieces, check, learned, require

COUNTED_TOKENS = 2**28  # of a longer training part the bigram model learns no more; they take half a minute
PARTS = ("training", "reserved")
Notes = dict[str, str | float]
# Writes both stretches to files, as tokens of the type it is told, and returns what a record should hold of them.
Write = Callable[[BinaryIO, BinaryIO, "np.dtype[Any]"], Notes]


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedCorpus(Corpus):
    """Two stretches of tokens of any integer type: ``training`` and ``reserved``."""

    training: NDArray[np.integer]
    reserved: NDArray[np.integer]

    @property
    def longest(self) -> int:
        """The largest ``seq_len`` that both parts allow."""
        return min(self.training.size, self.reserved.size) - 1

    def batch(self, seed: int, step: int, batch_size: int, seq_len: int) -> Tokens:
        """Windows ``[batch_size, seq_len + 1]`` from anywhere in the training part, all places being equally likely."""
        return _windows(self.training, self.starts(seed, step, batch_size, seq_len), seq_len)

    def starts(self, seed: int, step: int, batch_size: int, seq_len: int) -> Tokens:
        """Where the windows of a batch begin in the training part ``[batch_size, 1]``."""
        self.check(batch_size, seq_len)
        places = np.uint64(self.training.size - seq_len)
        # The remainder favours early places by less than size / 2**64: nothing one could measure.
        return (draw(TRAINING, seed, step, batch_size, 1) % places).astype(np.int64)

    def held_out(self, seq_len: int) -> Tokens:
        """Windows ``[n, seq_len + 1]`` at even distances over the held-out part; no target is in two of them."""
        targets = self.reserved.size - 1
        self.check(1, seq_len)
        count = min(-(-HELD_OUT_TARGETS // seq_len), targets // seq_len)
        starts = np.arange(count, dtype=np.int64)[:, None] * targets // count
        return _windows(self.reserved, starts, seq_len)

    def pair_counts(self) -> csr_array:
        """How often a token follows another in the training part (its first 268 million tokens), sparse ``[v, v]``."""
        return count_pairs(self.training[:COUNTED_TOKENS], self.vocabulary)


def _windows(tokens: NDArray[np.integer], starts_n1: Tokens, seq_len: int) -> Tokens:
    windows: Tokens = tokens[starts_n1 + np.arange(seq_len + 1)].astype(np.int64)
    return windows


def packed(request: Mapping[str, Any], vocabulary: int, write: Callable[[BinaryIO, BinaryIO, Any], Notes]) -> Corpus:
    """The corpus that ``write`` makes for this request; made when it is not in the cache, or damaged there.

    Raises:
        RequestError: it has to be made, and the cache cannot be written.
    """
    place = _place(request)
    with suppress(OSError, ValueError, KeyError, TypeError):
        return _read(place, vocabulary)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}."))
        try:
            _make(beside, np.min_scalar_type(vocabulary - 1).newbyteorder("<"), write)
            _move(beside, place)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        return _read(place, vocabulary)
    except OSError as refusal:
        why = refusal.strerror or refusal
        raise RequestError(f"cannot keep tokens in {place.parent}: {why}; LAB_CACHE=DIR names another folder") from None


def _place(request: Mapping[str, Any]) -> Path:
    try:
        return machine.cache_folder() / "tokens" / files.digest(request)
    except RuntimeError:
        raise RequestError("no home folder to keep tokens in; LAB_CACHE=DIR names one") from None


def _make(folder: Path, kind: np.dtype[Any], write: Write) -> None:
    with open(folder / PARTS[0], "wb") as training, open(folder / PARTS[1], "wb") as reserved:
        notes = write(training, reserved, kind)
    parts = [_map(folder / name, kind) for name in PARTS]
    about = {"type": kind.str, "fingerprint": fingerprint(*parts), "notes": notes}
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def _move(beside: Path, place: Path) -> None:
    """Let the folder stand under its name, unless another process was faster; what is damaged there goes."""
    os.chmod(beside, 0o755)
    try:
        os.replace(beside, place)
    except OSError:  # a folder that is not empty
        with suppress(OSError, ValueError, KeyError, TypeError):
            _read(place, 0)
            return
        shutil.rmtree(place)
        os.replace(beside, place)


def _read(place: Path, vocabulary: int) -> Corpus:
    """What lies there, if it is what was written there.

    Raises:
        OSError, ValueError, KeyError, TypeError: it is not.
    """
    about = json.loads((place / "about.json").read_text(encoding="utf-8"))
    training, reserved = (_map(place / name, np.dtype(about["type"])) for name in PARTS)
    if fingerprint(training, reserved) != about["fingerprint"]:
        raise ValueError("damaged")
    return PackedCorpus(
        training=training,
        reserved=reserved,
        fingerprint=about["fingerprint"],
        notes=dict(about["notes"]),
        vocabulary=vocabulary,
    )


def _map(file: Path, kind: np.dtype[Any]) -> NDArray[np.integer]:
    return np.asarray(np.memmap(file, dtype=kind, mode="r"))


HELD_OUT_EVERY = 20
LEARNED_FROM = 4_000_000  # bytes, about: of evenly spaced documents, so that learning takes a second or two

Parts = tuple[Sequence[bytes], Sequence[bytes]]


def corpus(documents: Sequence[bytes], origin: str, notes: Notes, tokenizer: str, vocabulary: int) -> Corpus:
    """A corpus of documents that are at hand; see ``split`` and ``pack``.

    Raises:
        RequestError: they hold too little, a vocabulary the tokenizer cannot have, or a cache that cannot be written.
    """
    check(tokenizer, vocabulary)
    parts = split(documents)
    training, reserved = (np.frombuffer(Bytes.BETWEEN.join(part), dtype=np.uint8) for part in parts)
    if min(training.size, reserved.size) < 2:
        raise RequestError(f"{origin} is too short: {training.size} bytes to train on, {reserved.size} held out")
    notes = {**notes, "training_bytes": training.size, "held_out_bytes": reserved.size}
    text = fingerprint(training, reserved)
    if tokenizer == "bytes":
        return PackedCorpus(training=training, reserved=reserved, fingerprint=text, notes=notes)
    return pack({"bytes": text}, lambda: parts, origin, notes, tokenizer, vocabulary)


def split(documents: Sequence[bytes]) -> Parts:
    """Those to train on, and the 20th, 40th, ..., of fewer than 20 the last, of one its last tenth, held out."""
    if len(documents) == 1:
        cut = len(documents[0]) * 9 // 10
        return [documents[0][:cut]], [documents[0][cut:]]
    if len(documents) < HELD_OUT_EVERY:
        return documents[:-1], documents[-1:]
    training = [document for place, document in enumerate(documents, 1) if place % HELD_OUT_EVERY]
    return training, documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]


def pack(
    source: Mapping[str, Any], read: Callable[[], Parts], origin: str, notes: Notes, tokenizer: str, vocabulary: int
) -> Corpus:
    """The packed corpus of what ``source`` stands for; only when it has to be made are the documents ``read``.

    Raises:
        RequestError: as ``corpus``.
    """
    check(tokenizer, vocabulary)
    release = require("tokenizers", "data.tokenizer=bpe") if tokenizer == "bpe" else ""
    request = {**source, "tokenizer": tokenizer, "vocabulary": vocabulary, "tokenizers": release}

    def write(training: BinaryIO, reserved: BinaryIO, kind: np.dtype[Any]) -> Notes:
        parts = read()
        every = -(-sum(map(len, parts[0])) // LEARNED_FROM) or 1
        pieces = Bytes() if tokenizer == "bytes" else learned(parts[0][::every], vocabulary)
        return fill((training, reserved), parts, pieces, kind, origin)

    made = packed(request, vocabulary, write)
    said: Notes = {"vocabulary": vocabulary, "tokenizer": f"{tokenizer} {release}".strip()}
    return replace(made, notes={**made.notes, **notes, **said})


def fill(
    files: Iterable[BinaryIO],
    parts: Iterable[Iterable[bytes]],
    pieces: Bytes | Pieces,
    kind: np.dtype[Any],
    origin: str,
    most: Iterable[float] = (math.inf, math.inf),
) -> Notes:
    """Write the training part and the held-out part as tokens, so many at ``most``; returns how much that was.

    Raises:
        RequestError: it is too little to draw a window from.
    """
    notes: Notes = {}
    for name, file, documents, limit in zip(("training", "held_out"), files, parts, most, strict=True):
        tokens, size = _append(file, pieces.encode(documents), pieces.between, kind, limit)
        if tokens < 2:
            raise RequestError(f"{origin} is too short: {name.replace('_', ' ')} part of {tokens} tokens")
        notes |= {f"{name}_tokens": tokens, f"{name}_bytes": size}
    return notes


def _append(
    file: BinaryIO, encoded: Iterable[tuple[int, Any]], between: Sequence[int], kind: np.dtype[Any], most: float
) -> tuple[int, int]:
    """Write documents and what stands between them; how many tokens that is, and bytes of text."""
    tokens = size = 0
    for length, document in encoded:
        for row in (np.asarray(between if tokens else (), dtype=kind), np.asarray(document, dtype=kind)):
            row = row[: int(min(most - tokens, row.size))]
            file.write(row.tobytes())
            tokens += row.size
        size += length
        if tokens >= most:
            break
    return tokens, size
