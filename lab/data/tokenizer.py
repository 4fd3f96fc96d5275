"""Tokenizers: text as its bytes, as pieces learned from it, or as pieces that others have learned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lab.core.errors import RequestError

BYTES = 256
AT_ONCE = 256  # documents that are encoded together
ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>")  # what tokenizers call the end of a document


def require(package: str, asked: str) -> str:
    """Version of a package that what is asked for needs.

    Raises:
        RequestError: it is not installed.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        raise RequestError(f"{asked} needs an extra: pip install 'instability-lab[data]'") from None


def check(tokenizer: str, vocabulary: int) -> None:
    """Refuse a size that the tokenizer cannot have.

    Raises:
        RequestError: bytes are 256 tokens, and a learned vocabulary holds them and more.
    """
    if tokenizer == "bytes" and vocabulary != BYTES:
        raise RequestError(
            f"data.tokenizer=bytes has {BYTES} tokens, not {vocabulary}; give data.tokenizer=bpe with data.vocabulary"
        )
    if tokenizer == "bpe" and vocabulary <= BYTES:
        raise RequestError("data.tokenizer=bpe needs data.vocabulary above 256, as in data.vocabulary=2048")


class Bytes:
    """A token is a byte of UTF-8."""

    BETWEEN = b"\0"  # a byte that text does not hold, so a model can tell where a document ends
    between: Sequence[int] = tuple(BETWEEN)

    def encode(self, documents: Iterable[bytes]) -> Iterator[tuple[int, Any]]:
        """Size in bytes and tokens of every document."""
        return ((len(document), np.frombuffer(document, dtype=np.uint8)) for document in documents)


class Pieces:
    """A tokenizer of the library ``tokenizers``; what is no UTF-8 is read as U+FFFD."""

    def __init__(self, model: Any, between: Sequence[int]) -> None:
        self.model, self.between = model, between

    def encode(self, documents: Iterable[bytes]) -> Iterator[tuple[int, Any]]:
        """Size in bytes and tokens of every document, without special tokens."""
        rest = iter(documents)
        while some := list(islice(rest, AT_ONCE)):
            encoded = self.model.encode_batch_fast([_text(document) for document in some], add_special_tokens=False)
            yield from ((len(document), piece.ids) for document, piece in zip(some, encoded, strict=True))


def _text(document: bytes) -> str:
    return document.decode("utf-8", errors="replace")


def learned(documents: Iterable[bytes], vocabulary: int) -> Pieces:
    """Byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909; on bytes as in GPT-2): 256 bytes, the rest merges.

    Raises:
        RequestError: the documents hold fewer merges.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=letters, show_progress=False)
    model.train_from_iterator((_text(document) for document in documents), trainer)
    if (found := model.get_vocab_size()) < vocabulary:
        raise RequestError(f"the text gives {found} tokens, fewer than data.vocabulary={vocabulary}")
    return Pieces(model, model.encode(_text(Bytes.BETWEEN)).ids)


def is_local(name: str) -> bool:
    """Whether a tokenizer is ours, or in a folder of this machine."""
    return name in ("bytes", "bpe") or _file(name).is_file()


def _file(name: str) -> Path:
    return Path(name).expanduser() / "tokenizer.json"


def pretrained(name: str, vocabulary: int) -> Pieces:
    """A tokenizer of the Hugging Face Hub, or of a folder with a ``tokenizer.json``; its end of text between documents.

    Raises:
        RequestError: it cannot be had, or has more tokens than the vocabulary.
    """
    from tokenizers import Tokenizer

    try:
        model = Tokenizer.from_file(str(_file(name))) if is_local(name) else Tokenizer.from_pretrained(name)
    except Exception as refusal:  # whatever the library says
        raise RequestError(f"cannot read data.tokenizer={name}: {' '.join(str(refusal).split())}") from None
    if (size := model.get_vocab_size()) > vocabulary:
        raise RequestError(f"data.tokenizer={name} has {size} tokens; give data.vocabulary={size} or more")
    model.no_truncation()
    model.no_padding()
    ends = [model.token_to_id(end) for end in ENDS]
    return Pieces(model, [end for end in ends if end is not None][:1])
