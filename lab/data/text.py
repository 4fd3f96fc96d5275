"""Text as bytes: the standard library of the running Python (always at hand), or files of one's own."""

from __future__ import annotations

import glob
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab import fields
from lab.data.corpus import HELD_OUT_TARGETS, TRAINING, Corpus, Tokens, count_pairs, draw, fingerprint
from lab.fields import PerRunSeed
from lab.registry import DATA, RequestError

NOT_LIBRARY = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"})
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".tex", ".py", ".json", ".jsonl", ".csv", ".html", ".xml", ".yaml", ".toml")
HELD_OUT_EVERY = 20
BETWEEN_FILES = b"\0"  # a byte that text does not hold, so a model can tell where a file ends


@dataclass(frozen=True, eq=False, kw_only=True)
class TextCorpus(Corpus):
    """Two stretches of bytes: ``training`` and ``reserved``."""

    training: NDArray[np.uint8]
    reserved: NDArray[np.uint8]

    @property
    def longest(self) -> int:
        """The largest ``seq_len`` that both parts allow."""
        return min(self.training.size, self.reserved.size) - 1

    def batch(self, seed: int, step: int, batch_size: int, seq_len: int) -> Tokens:
        """Windows ``[batch_size, seq_len + 1]`` from anywhere in the training part, all places being equally likely."""
        self.check(batch_size, seq_len)
        places = np.uint64(self.training.size - seq_len)
        # The remainder favours early places by less than size / 2**64: nothing one could measure.
        starts = draw(TRAINING, seed, step, batch_size, 1) % places
        return _windows(self.training, starts.astype(np.int64), seq_len)

    def held_out(self, seq_len: int) -> Tokens:
        """Windows ``[n, seq_len + 1]`` at even distances over the held-out part; no target is in two of them."""
        targets = self.reserved.size - 1
        self.check(1, seq_len)
        count = min(-(-HELD_OUT_TARGETS // seq_len), targets // seq_len)
        starts = np.arange(count, dtype=np.int64)[:, None] * targets // count
        return _windows(self.reserved, starts, seq_len)

    def pair_counts(self) -> Tokens:
        """How often a byte follows another in the training part: ``[256, 256]``."""
        return count_pairs(self.training, self.vocabulary)


def _windows(text: NDArray[np.uint8], starts_n1: Tokens, seq_len: int) -> Tokens:
    windows: Tokens = text[starts_n1 + np.arange(seq_len + 1)].astype(np.int64)
    return windows


@DATA.register("stdlib")
@dataclass(frozen=True)
class StandardLibrary:
    """The `*.py` files of the running Python's standard library, without its tests; every 20th file is held out.

    Another Python version is another text, so the version and the fingerprint are recorded with each run.
    """

    seed: PerRunSeed = fields.seed(0)

    def open(self) -> Corpus:
        """Read the library, once per process.

        Raises:
            RequestError: this Python keeps no readable sources.
        """
        return _open_library(sysconfig.get_paths()["stdlib"])


@DATA.register("text")
@dataclass(frozen=True)
class Text:
    """Files of your own, read as bytes: ``path`` is a FILE, a DIR or a GLOB, and may begin with ``~``.

    A DIR gives every file below it that ends in one of ``TEXT_SUFFIXES``, hidden files and folders apart; a FILE or a
    GLOB gives exactly what it names.  Held out are the 20th, 40th, ... file in the order of their paths; of fewer than
    20 files the last; of a single file its last tenth.
    """

    path: str | None = None
    seed: PerRunSeed = fields.seed(0)

    def open(self) -> Corpus:
        """Read the files, once per process.

        Raises:
            RequestError: no path, nothing there, or files that cannot be read or hold too little.
        """
        if not self.path:
            raise RequestError("data=text needs data.path=FILE|DIR|GLOB")
        return _open_text(os.path.abspath(os.path.expanduser(str(self.path))))


@cache
def _open_library(root: str) -> Corpus:
    files = [file for file in _below(root, NOT_LIBRARY) if file.suffix == ".py"]
    return _corpus(files, f"the standard library in {root}", {"python": platform.python_version()})


@cache
def _open_text(path: str) -> Corpus:
    return _corpus(_named(path), f"data.path={path}", {})


def _named(path: str) -> list[Path]:
    if os.path.isdir(path):
        return [file for file in _below(path) if file.suffix.lower() in TEXT_SUFFIXES]
    if os.path.exists(path):
        return [Path(path)]
    if not glob.has_magic(path):
        raise RequestError(f"data.path={path} does not exist")
    return [Path(match) for match in glob.glob(path, recursive=True) if os.path.isfile(match)]


def _below(root: str, without: frozenset[str] = frozenset()) -> Iterator[Path]:
    def refuse(refusal: OSError) -> None:
        raise RequestError(f"cannot read {refusal.filename}: {refusal.strerror}")

    for folder, inner, names in os.walk(root, onerror=refuse):
        # Pruned on the way rather than filtered afterwards: site-packages may be larger than all the rest.
        inner[:] = [name for name in inner if name not in without and not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _corpus(files: list[Path], origin: str, notes: dict[str, str | float]) -> Corpus:
    if not files:
        raise RequestError(f"{origin} holds no text file")
    # Ordered as words: the order of Path objects depends on the system.
    documents = [_read(file) for file in sorted(files, key=Path.as_posix)]
    training, reserved = (np.frombuffer(BETWEEN_FILES.join(part), dtype=np.uint8) for part in _split(documents))
    if min(training.size, reserved.size) < 2:
        raise RequestError(f"{origin} is too short: {training.size} bytes to train on, {reserved.size} held out")
    notes = {**notes, "files": len(files), "training_bytes": training.size, "held_out_bytes": reserved.size}
    return TextCorpus(training=training, reserved=reserved, fingerprint=fingerprint(training, reserved), notes=notes)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as refusal:
        raise RequestError(f"cannot read {file}: {refusal.strerror}") from None


def _split(documents: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    if len(documents) == 1:
        cut = len(documents[0]) * 9 // 10
        return [documents[0][:cut]], [documents[0][cut:]]
    if len(documents) < HELD_OUT_EVERY:
        return documents[:-1], documents[-1:]
    training = [document for place, document in enumerate(documents, 1) if place % HELD_OUT_EVERY]
    return training, documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
