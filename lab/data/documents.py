"""Documents into a corpus: which are held out, what stands between them, as bytes or as learned tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

import numpy as np

from lab.data.corpus import Corpus, fingerprint
from lab.data.packed import Notes, PackedCorpus, packed
from lab.data.tokenizer import BytePairs, check, require
from lab.registry import RequestError

HELD_OUT_EVERY = 20
BETWEEN = b"\0"  # a byte that text does not hold, so a model can tell where a document ends


def corpus(documents: Sequence[bytes], origin: str, notes: Notes, tokenizer: str, vocabulary: int) -> Corpus:
    """A corpus of documents; the 20th, 40th, ... are held out, of fewer than 20 the last, of one its last tenth.

    Raises:
        RequestError: they hold too little, a vocabulary the tokenizer cannot have, or a cache that cannot be written.
    """
    check(tokenizer, vocabulary)
    parts = split(documents)
    training, reserved = (np.frombuffer(BETWEEN.join(part), dtype=np.uint8) for part in parts)
    if min(training.size, reserved.size) < 2:
        raise RequestError(f"{origin} is too short: {training.size} bytes to train on, {reserved.size} held out")
    notes = {**notes, "training_bytes": training.size, "held_out_bytes": reserved.size}
    as_bytes = PackedCorpus(
        training=training, reserved=reserved, fingerprint=fingerprint(training, reserved), notes=notes
    )
    return as_bytes if tokenizer == "bytes" else _learned(as_bytes, parts, vocabulary)


def split(documents: Sequence[bytes]) -> tuple[Sequence[bytes], Sequence[bytes]]:
    """Those to train on, and those held out."""
    if len(documents) == 1:
        cut = len(documents[0]) * 9 // 10
        return [documents[0][:cut]], [documents[0][cut:]]
    if len(documents) < HELD_OUT_EVERY:
        return documents[:-1], documents[-1:]
    training = [document for place, document in enumerate(documents, 1) if place % HELD_OUT_EVERY]
    return training, documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]


def _learned(text: PackedCorpus, parts: Iterable[Sequence[bytes]], vocabulary: int) -> Corpus:
    release = require("tokenizers", "data.tokenizer=bpe")
    request = {"bytes": text.fingerprint, "tokenizer": "bpe", "vocabulary": vocabulary, "tokenizers": release}

    def write(training: BinaryIO, reserved: BinaryIO, kind: np.dtype[Any]) -> Notes:
        learned, tokens = BytePairs(next(iter(parts)), vocabulary), []
        for file, documents in zip((training, reserved), parts, strict=True):
            tokens.append(append(file, learned.encode(documents), learned.between, kind))
        return {"training_tokens": tokens[0], "held_out_tokens": tokens[1]}

    made = packed(request, vocabulary, write)
    return replace(made, notes={**text.notes, "vocabulary": vocabulary, **made.notes, "tokenizers": release})


def append(file: BinaryIO, documents: Iterable[Sequence[int]], between: int, kind: np.dtype[Any]) -> int:
    """Write documents and what stands between them; returns how many tokens that is."""
    written = 0
    for document in documents:
        tokens = [between, *document] if written else document
        file.write(np.asarray(tokens, dtype=kind).tobytes())
        written += len(tokens)
    return written
