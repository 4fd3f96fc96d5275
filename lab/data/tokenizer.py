"""Tokenizers: text as its bytes, or as pieces learned from the training part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import islice

from lab.registry import RequestError

BYTES = 256
LEARNED_FROM = 4_000_000  # bytes, about: of evenly spaced documents, so that learning takes a second or two
AT_ONCE = 256  # documents that are encoded together


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


class BytePairs:
    """Byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909; on bytes as in GPT-2), learned from documents.

    Tokens 0 to 255 are the bytes, those above are merges.  What is no UTF-8 is read as U+FFFD.
    """

    def __init__(self, documents: Sequence[bytes], vocabulary: int) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        self.model = Tokenizer(models.BPE())
        self.model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=letters, show_progress=False)
        every = -(-sum(map(len, documents)) // LEARNED_FROM) or 1
        self.model.train_from_iterator(_read(documents[::every]), trainer)
        if (found := self.model.get_vocab_size()) < vocabulary:
            raise RequestError(f"the text gives {found} tokens, fewer than data.vocabulary={vocabulary}")
        (self.between,) = self.model.encode("\0").ids  # a byte that text does not hold, as between bytes

    def encode(self, documents: Iterable[bytes]) -> Iterator[list[int]]:
        """Tokens of every document."""
        texts = _read(documents)
        while some := list(islice(texts, AT_ONCE)):
            yield from (piece.ids for piece in self.model.encode_batch_fast(some, add_special_tokens=False))


def _read(documents: Iterable[bytes]) -> Iterator[str]:
    return (document.decode("utf-8", errors="replace") for document in documents)
