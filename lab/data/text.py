"""Text: the standard library of the running Python (always at hand), or files of one's own."""

from __future__ import annotations

import glob
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lab import fields
from lab.data import documents
from lab.data.corpus import Corpus
from lab.data.packed import Notes
from lab.data.tokenizer import BYTES
from lab.fields import PerRunSeed
from lab.registry import DATA, RequestError

NOT_LIBRARY = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"})
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".tex", ".py", ".json", ".jsonl", ".csv", ".html", ".xml", ".yaml", ".toml")


@DATA.register("stdlib")
@dataclass(frozen=True)
class StandardLibrary:
    """The `*.py` files of the running Python's standard library, without its tests; every 20th file is held out.

    Another Python version is another text, so the version and the fingerprint are recorded with each run.
    """

    tokenizer: str = fields.one_of("bytes", "bpe", default="bytes")
    vocabulary: int = fields.bounded(BYTES, above=0)
    seed: PerRunSeed = fields.seed(0)

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
    tokenizer: str = fields.one_of("bytes", "bpe", default="bytes")
    vocabulary: int = fields.bounded(BYTES, above=0)
    seed: PerRunSeed = fields.seed(0)

    def open(self) -> Corpus:
        """Read the files, once per process.

        Raises:
            RequestError: no path, nothing there, files that cannot be read, or see ``documents.corpus``.
        """
        if not self.path:
            raise RequestError("data=text needs data.path=FILE|DIR|GLOB")
        return _open_text(os.path.abspath(os.path.expanduser(str(self.path))), self.tokenizer, self.vocabulary)


@cache
def _open_library(root: str, tokenizer: str, vocabulary: int) -> Corpus:
    files = [file for file in _below(root, NOT_LIBRARY) if file.suffix == ".py"]
    notes: Notes = {"python": platform.python_version()}
    return _corpus(files, f"the standard library in {root}", notes, tokenizer, vocabulary)


@cache
def _open_text(path: str, tokenizer: str, vocabulary: int) -> Corpus:
    return _corpus(_named(path), f"data.path={path}", {}, tokenizer, vocabulary)


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


def _corpus(files: list[Path], origin: str, notes: Notes, tokenizer: str, vocabulary: int) -> Corpus:
    if not files:
        raise RequestError(f"{origin} holds no text file")
    # Ordered as words: the order of Path objects depends on the system.
    texts = [_read(file) for file in sorted(files, key=Path.as_posix)]
    return documents.corpus(texts, origin, {**notes, "files": len(files)}, tokenizer, vocabulary)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as refusal:
        raise RequestError(f"cannot read {file}: {refusal.strerror}") from None
