"""Packing: documents are split, tokenized, concatenated and cached."""

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
import scipy  # its parts are loaded when they are used
from numpy.typing import NDArray

from lab.core import files, machine
from lab.core.errors import RequestError
from lab.data.corpus import HELD_OUT_TARGETS, TRAINING, Corpus, Tokens, below, count_pairs, draw, fingerprint
from lab.data.tokenizer import Bytes, Pieces, check, learned, require

COUNTED_TOKENS = 2**28  # that the bigram model learns from at most; they take half a minute
PARTS = ("training", "reserved")
Notes = dict[str, str | float]
# Writes both parts to files, as tokens of the given type, and returns notes for the record.
Write = Callable[[BinaryIO, BinaryIO, "np.dtype[Any]"], Notes]


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedCorpus(Corpus):
    """Two arrays of tokens of any integer type: ``training``, and ``reserved`` for validation."""

    training: NDArray[np.integer]
    reserved: NDArray[np.integer]

    @property
    def longest(self) -> int:
        """The largest ``seq_len`` that both parts allow."""
        return min(self.training.size, self.reserved.size) - 1

    def batch(self, seed: int, step: int, batch_size: int, seq_len: int) -> Tokens:
        """Windows ``[batch_size, seq_len + 1]`` that start anywhere in the training part with equal probability."""
        return _windows(self.training, self.starts(seed, step, batch_size, seq_len), seq_len)

    def starts(self, seed: int, step: int, batch_size: int, seq_len: int) -> Tokens:
        """Start positions ``[batch_size, 1]`` of a batch's windows in the training part."""
        self.check(batch_size, seq_len)
        return below(self.training.size - seq_len, draw(TRAINING, seed, step, batch_size, 1))

    def held_out(self, seq_len: int) -> Tokens:
        """Windows ``[n, seq_len + 1]`` evenly spaced over the held-out part; no target is in two of them."""
        targets = self.reserved.size - 1
        self.check(1, seq_len)
        count = min(-(-HELD_OUT_TARGETS // seq_len), targets // seq_len)
        starts = np.arange(count, dtype=np.int64)[:, None] * targets // count
        return _windows(self.reserved, starts, seq_len)

    def pair_counts(self) -> scipy.sparse.csr_array:
        """Count how often a token follows another in the first 268 million training tokens: sparse ``[v, v]``."""
        return count_pairs(self.training[:COUNTED_TOKENS], self.vocabulary)


def _windows(tokens: NDArray[np.integer], starts_n1: Tokens, seq_len: int) -> Tokens:
    windows: Tokens = tokens[starts_n1 + np.arange(seq_len + 1)].astype(np.int64)
    return windows


def packed(request: Mapping[str, Any], vocabulary: int, write: Callable[[BinaryIO, BinaryIO, Any], Notes]) -> Corpus:
    """The corpus of this request, from the cache if it is intact there, else made by ``write``.

    Raises:
        RequestError: it has to be made, and the cache cannot be written.
    """
    folder = _cache_folder(request)
    with suppress(OSError, ValueError, KeyError, TypeError):
        return _read(folder, vocabulary)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        try:
            _make(temporary, np.min_scalar_type(vocabulary - 1).newbyteorder("<"), write)
            _move(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return _read(folder, vocabulary)
    except OSError as fault:
        reason = fault.strerror or fault
        raise RequestError(
            f"cannot keep tokens in {folder.parent}: {reason}; LAB_CACHE=DIR names another folder"
        ) from None


def _cache_folder(request: Mapping[str, Any]) -> Path:
    try:
        return machine.cache_folder() / "tokens" / files.digest(request)
    except RuntimeError:
        raise RequestError("no home folder to keep tokens in; LAB_CACHE=DIR names one") from None


def _make(folder: Path, kind: np.dtype[Any], write: Write) -> None:
    with open(folder / PARTS[0], "wb") as training, open(folder / PARTS[1], "wb") as reserved:
        notes = write(training, reserved, kind)
    parts = [_map(folder / name, kind) for name in PARTS]
    header = {"type": kind.str, "fingerprint": fingerprint(*parts), "notes": notes}
    (folder / "about.json").write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")


def _move(temporary: Path, folder: Path) -> None:
    """Move a folder to its name, unless another process has put an intact one there."""
    os.chmod(temporary, 0o755)
    try:
        os.replace(temporary, folder)
    except OSError:  # the folder exists and is not empty
        with suppress(OSError, ValueError, KeyError, TypeError):
            _read(folder, 0)
            return
        shutil.rmtree(folder)
        os.replace(temporary, folder)


def _read(folder: Path, vocabulary: int) -> Corpus:
    """Read a packed corpus and verify its fingerprint."""
    header = files.read_json(folder / "about.json", dict)
    training, reserved = (_map(folder / name, np.dtype(header["type"])) for name in PARTS)
    if fingerprint(training, reserved) != header["fingerprint"]:
        raise ValueError("damaged")
    return PackedCorpus(
        training=training,
        reserved=reserved,
        fingerprint=header["fingerprint"],
        notes=dict(header["notes"]),
        vocabulary=vocabulary,
    )


def _map(file: Path, kind: np.dtype[Any]) -> NDArray[np.integer]:
    return np.asarray(np.memmap(file, dtype=kind, mode="r"))


HELD_OUT_EVERY = 20
LEARNED_FROM = 4_000_000  # bytes of evenly spaced documents, roughly, so that learning takes a second or two

Parts = tuple[Sequence[bytes], Sequence[bytes]]


def corpus(documents: Sequence[bytes], origin: str, notes: Notes, tokenizer: str, vocabulary: int) -> Corpus:
    """A corpus of documents in memory; see ``split`` and ``pack``.

    Raises:
        RequestError: too little text, a vocabulary the tokenizer cannot have, or a cache that cannot be written.
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
    """Split documents for training and validation.

    Held out are the 20th, 40th, ... document; of fewer than 20 the last one; of a single one its last tenth.
    """
    if len(documents) == 1:
        cut = len(documents[0]) * 9 // 10
        return [documents[0][:cut]], [documents[0][cut:]]
    if len(documents) < HELD_OUT_EVERY:
        return documents[:-1], documents[-1:]
    training = [document for number, document in enumerate(documents, 1) if number % HELD_OUT_EVERY]
    return training, documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]


def pack(
    source: Mapping[str, Any], read: Callable[[], Parts], origin: str, notes: Notes, tokenizer: str, vocabulary: int
) -> Corpus:
    """The packed corpus of a source, from the cache if possible, else of the documents that ``read`` returns.

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

    corpus = packed(request, vocabulary, write)
    tokens: Notes = {"vocabulary": vocabulary, "tokenizer": f"{tokenizer} {release}".strip()}
    return replace(corpus, notes={**corpus.notes, **notes, **tokens})


def fill(
    files: Iterable[BinaryIO],
    parts: Iterable[Iterable[bytes]],
    pieces: Bytes | Pieces,
    kind: np.dtype[Any],
    origin: str,
    most: Iterable[float] = (math.inf, math.inf),
) -> Notes:
    """Write the training part and the held-out part as tokens, ``most`` of each; returns their sizes as notes.

    Raises:
        RequestError: a part is too short for a window.
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
    """Write documents and the separators between them; returns the number of tokens, and of bytes of text."""
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
