"""Tokenizers: bytes, byte-level BPE learned from the text, and pretrained ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lab.core.errors import RequestError

BYTES = 256
AT_ONCE = 256  # documents encoded together
ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>")  # names of the end-of-document token


def require(package: str, setting: str) -> str:
    """The version of a package that a setting needs.

    Raises:
        RequestError: it is not installed.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        raise RequestError(f"{setting} needs an extra: pip install 'instability-lab[data]'") from None


def check(tokenizer: str, vocabulary: int) -> None:
    """Refuse a vocabulary size that the tokenizer cannot have.

    Raises:
        RequestError: bytes have 256 tokens, and a learned vocabulary has more.
    """
    if tokenizer == "bytes" and vocabulary != BYTES:
        raise RequestError(
            f"data.tokenizer=bytes has {BYTES} tokens, not {vocabulary}; give data.tokenizer=bpe with data.vocabulary"
        )
    if tokenizer == "bpe" and vocabulary <= BYTES:
        raise RequestError("data.tokenizer=bpe needs data.vocabulary above 256, as in data.vocabulary=2048")


class Bytes:
    """The tokenizer of UTF-8 bytes."""

    BETWEEN = b"\0"  # a byte that no text contains, so that a model can tell where a document ends
    between: Sequence[int] = tuple(BETWEEN)

    def encode(self, documents: Iterable[bytes]) -> Iterator[tuple[int, Any]]:
        """Yield the size in bytes and the tokens of every document."""
        return ((len(document), np.frombuffer(document, dtype=np.uint8)) for document in documents)


class Pieces:
    """A tokenizer of the library ``tokenizers``; invalid UTF-8 is read as U+FFFD."""

    def __init__(self, model: Any, between: Sequence[int]) -> None:
        self.model, self.between = model, between

    def encode(self, documents: Iterable[bytes]) -> Iterator[tuple[int, Any]]:
        """Yield the size in bytes and the tokens of every document, without special tokens."""
        rest = iter(documents)
        while batch := list(islice(rest, AT_ONCE)):
            encoded = self.model.encode_batch_fast([_text(document) for document in batch], add_special_tokens=False)
            yield from ((len(document), piece.ids) for document, piece in zip(batch, encoded, strict=True))


def _text(document: bytes) -> str:
    return document.decode("utf-8", errors="replace")


def learned(documents: Iterable[bytes], vocabulary: int) -> Pieces:
    """Learn byte-level BPE from documents: 256 bytes, and merges up to the size of the vocabulary.

    Raises:
        RequestError: the documents have too few merges.

    References:
        Sennrich et al. 2016, arXiv:1508.07909; on bytes as in GPT-2.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=letters, show_progress=False)
    model.train_from_iterator((_text(document) for document in documents), trainer)
    if (size := model.get_vocab_size()) < vocabulary:
        raise RequestError(f"the text gives {size} tokens, fewer than data.vocabulary={vocabulary}")
    return Pieces(model, model.encode(_text(Bytes.BETWEEN)).ids)


def is_local(name: str) -> bool:
    """Whether a tokenizer needs no network: built in, or a folder of this machine."""
    return name in ("bytes", "bpe") or _file(name).is_file()


def _file(name: str) -> Path:
    return Path(name).expanduser() / "tokenizer.json"


def pretrained(name: str, vocabulary: int) -> Pieces:
    """Load a tokenizer from the Hugging Face Hub or a folder; its end-of-text token separates documents.

    Raises:
        RequestError: it cannot be loaded, or has more tokens than the vocabulary.
    """
    from tokenizers import Tokenizer

    try:
        model = Tokenizer.from_file(str(_file(name))) if is_local(name) else Tokenizer.from_pretrained(name)
    except Exception as fault:  # the library raises exceptions of any type
        raise RequestError(f"cannot read data.tokenizer={name}: {' '.join(str(fault).split())}") from None
    if (size := model.get_vocab_size()) > vocabulary:
        raise RequestError(f"data.tokenizer={name} has {size} tokens; give data.vocabulary={size} or more")
    model.no_truncation()
    model.no_padding()
    ends = [model.token_to_id(end) for end in ENDS]
    return Pieces(model, [end for end in ends if end is not None][:1])
