"""Documents into a corpus: which are held out, what stands between them, as which tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

import numpy as np

from lab.core.errors import RequestError
from lab.data.corpus import Corpus, fingerprint
from lab.data.packed import Notes, PackedCorpus, packed
from lab.data.tokenizer import Bytes, Pieces, check, learned, require

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
