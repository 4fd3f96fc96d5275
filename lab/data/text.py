"""Text: the standard library of the running Python (always at hand), or files of one's own."""

from __future__ import annotations

import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from lab.core import schema
from lab.core.errors import RequestError
from lab.core.registry import DATA
from lab.core.schema import PerRunSeed
from lab.data import documents, files
from lab.data.corpus import Corpus, once
from lab.data.packed import Notes
from lab.data.tokenizer import BYTES

NOT_LIBRARY = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"})
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".tex", ".py", ".json", ".jsonl", ".csv", ".html", ".xml", ".yaml", ".toml")


@DATA.register("stdlib")
@dataclass(frozen=True)
class StandardLibrary:
    """The `*.py` files of the running Python's standard library, without its tests; every 20th file is held out.

    Another Python version is another text, so the version and the fingerprint are recorded with each run.
    """

    tokenizer: str = schema.one_of("bytes", "bpe", default="bytes")
    vocabulary: int = schema.bounded(BYTES, above=0)
    seed: PerRunSeed = schema.seed(0)

    def open(self) -> Corpus:
        """Read the library, once per process.

        Raises:
            RequestError: this Python keeps no readable sources, or see ``documents.corpus``.
        """
        return _open_library(sysconfig.get_paths()["stdlib"], self.tokenizer, self.vocabulary)


@DATA.register("text")
@dataclass(frozen=True)
class Text:
    """Files of your own: ``path`` is a FILE, a DIR or a GLOB, and may begin with ``~``.

    A DIR gives every file below it that ends in one of ``TEXT_SUFFIXES``, hidden files and folders apart; a FILE or a
    GLOB gives exactly what it names.  Held out are the 20th, 40th, ... file in the order of their paths; of fewer than
    20 files the last; of a single file its last tenth.
    """

    path: str | None = None
    tokenizer: str = schema.one_of("bytes", "bpe", default="bytes")
    vocabulary: int = schema.bounded(BYTES, above=0)
    seed: PerRunSeed = schema.seed(0)

    def open(self) -> Corpus:
        """Read the files, once per process.

        Raises:
            RequestError: no path, nothing there, files that cannot be read, or see ``documents.corpus``.
        """
        return _open_text(files.absolute(self.path, "text"), self.tokenizer, self.vocabulary)


@once
def _open_library(root: str, tokenizer: str, vocabulary: int) -> Corpus:
    sources = sorted((file for file in files.below(root, NOT_LIBRARY) if file.suffix == ".py"), key=Path.as_posix)
    notes: Notes = {"python": platform.python_version()}
    return _corpus(sources, f"the standard library in {root}", notes, tokenizer, vocabulary)


@once
def _open_text(path: str, tokenizer: str, vocabulary: int) -> Corpus:
    return _corpus(files.named(path, TEXT_SUFFIXES), f"data.path={path}", {}, tokenizer, vocabulary)


def _corpus(found: list[Path], origin: str, notes: Notes, tokenizer: str, vocabulary: int) -> Corpus:
    if not found:
        raise RequestError(f"{origin} holds no text file")
    texts = [_read(file) for file in found]
    return documents.corpus(texts, origin, {**notes, "files": len(found)}, tokenizer, vocabulary)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as refusal:
        raise RequestError(f"cannot read {file}: {refusal.strerror}") from None
