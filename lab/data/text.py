"""Corpora from the standard library, text files, JSON lines and Parquet tables."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import lab.data.packing as packing
from lab.core import files, schema
from lab.core.errors import RequestError, nearest
from lab.core.registry import DATA
from lab.core.schema import PerRunSeed
from lab.data.corpus import Corpus, once
from lab.data.packing import Notes
from lab.data.tokenizer import BYTES


def named(path: str, suffixes: Sequence[str]) -> list[Path]:
    """A FILE or a GLOB gives exactly what it names, a DIR every file below it with one of the suffixes, in order.

    Raises:
        RequestError: nothing is there, or a folder cannot be read.
    """
    if os.path.isdir(path):
        paths = [file for file in below(path) if file.suffix.lower() in suffixes]
    elif os.path.exists(path):
        paths = [Path(path)]
    elif not glob.has_magic(path):
        raise RequestError(f"data.path={path} does not exist")
    else:
        paths = [Path(match) for match in glob.glob(path, recursive=True) if os.path.isfile(match)]
    # Ordered as words: the order of Path objects depends on the system.
    return sorted(paths, key=Path.as_posix)


def below(root: str, without: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Every file in a folder and its folders, hidden ones and those named ``without`` apart.

    Raises:
        RequestError: a folder cannot be read.
    """

    def refuse(fault: OSError) -> None:
        raise RequestError(f"cannot read {fault.filename}: {fault.strerror}")

    for folder, inner, names in os.walk(root, onerror=refuse):
        # Pruned on the way rather than filtered afterwards: site-packages may be larger than all the rest.
        inner[:] = [name for name in inner if name not in without and not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def absolute(path: str | None, source: str) -> str:
    """The absolute path of ``data.path``, which may begin with ``~``.

    Raises:
        RequestError: no path is given.
    """
    if not path:
        raise RequestError(f"data={source} needs data.path=FILE|DIR|GLOB")
    return os.path.abspath(os.path.expanduser(path))


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
            RequestError: this Python keeps no readable sources, or see ``packing.corpus``.
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
            RequestError: no path, nothing there, files that cannot be read or are binary, or see ``packing.corpus``.
        """
        return _open_text(absolute(self.path, "text"), self.tokenizer, self.vocabulary)


@once
def _open_library(root: str, tokenizer: str, vocabulary: int) -> Corpus:
    sources = sorted((file for file in below(root, NOT_LIBRARY) if file.suffix == ".py"), key=Path.as_posix)
    notes: Notes = {"python": platform.python_version()}
    return _corpus(sources, f"the standard library in {root}", notes, tokenizer, vocabulary)


@once
def _open_text(path: str, tokenizer: str, vocabulary: int) -> Corpus:
    return _corpus(named(path, TEXT_SUFFIXES), f"data.path={path}", {}, tokenizer, vocabulary)


def _corpus(paths: list[Path], origin: str, notes: Notes, tokenizer: str, vocabulary: int) -> Corpus:
    if not paths:
        raise RequestError(f"{origin} holds no text file")
    texts = [_read(file) for file in paths]
    return packing.corpus(texts, origin, {**notes, "files": len(paths)}, tokenizer, vocabulary)


def _read(file: Path) -> bytes:
    """The bytes of a text file; as for git, a file with a NUL byte is none."""
    try:
        with files.open_file(file) as opened:
            content = opened.read()
    except OSError as fault:
        raise RequestError(f"cannot read {file}: {fault.strerror}") from None
    if (position := content.find(0)) >= 0:
        raise RequestError(f"{file} is not text: its byte {position} is NUL; data.path must name text files")
    return content


# All documents of a file, in order, given the field that holds their text.
Read = Callable[[Path, str], Iterator[str]]


@dataclass(frozen=True)
class _Documents:
    """Keys of a source that reads documents from files: which files, where the text is, how it becomes tokens."""

    path: str | None = None
    field: str = "text"
    tokenizer: str = schema.one_of("bytes", "bpe", default="bytes")
    vocabulary: int = schema.bounded(BYTES, above=0)
    seed: PerRunSeed = schema.seed(0)


@DATA.register("jsonl")
@dataclass(frozen=True)
class JsonLines(_Documents):
    """JSON lines of your own, a document each: ``path`` is a FILE, a DIR or a GLOB; ``field`` holds the text.

    A DIR gives every ``*.jsonl`` below it.  Held out are the 20th, 40th, ... document in the order of paths and lines.
    """

    def open(self) -> Corpus:
        """Read the files, once for all processes.

        Raises:
            RequestError: no path, nothing there, a line that is no document, or see ``packing.corpus``.
        """
        return _open("jsonl", absolute(self.path, "jsonl"), self.field, self.tokenizer, self.vocabulary)


@DATA.register("parquet")
@dataclass(frozen=True)
class Parquet(_Documents):
    """Parquet files of your own, a document per row: ``path`` is a FILE, a DIR or a GLOB; column ``field`` is the text.

    A DIR gives every ``*.parquet`` below it.  Held out are the 20th, 40th, ... document in the order of paths and rows.
    """

    def open(self) -> Corpus:
        """Read the files, once for all processes.

        Raises:
            RequestError: no path, nothing there, files that are no parquet or lack the column, or see
                ``packing.corpus``.
        """
        return _open("parquet", absolute(self.path, "parquet"), self.field, self.tokenizer, self.vocabulary)


@once
def _open(kind: str, path: str, field: str, tokenizer: str, vocabulary: int) -> Corpus:
    paths, origin = named(path, [f".{kind}"]), f"data.path={path}"
    if not paths:
        raise RequestError(f"{origin} holds no {kind} file")
    source = {"kind": kind, "field": field, "files": [_digest(file) for file in paths]}

    def read() -> packing.Parts:
        rows = [row.encode("utf-8", errors="replace") for file in paths for row in READERS[kind](file, field)]
        if not rows:
            raise RequestError(f"{origin} holds no documents")
        return packing.split(rows)

    return packing.pack(source, read, origin, {"files": len(paths)}, tokenizer, vocabulary)


def _digest(file: Path) -> str:
    try:
        with files.open_file(file) as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as fault:
        raise RequestError(f"cannot read {file}: {fault.strerror}") from None


def _lines(file: Path, field: str) -> Iterator[str]:
    with files.open_file(file) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as fault:
                raise RequestError(f"{file}, line {number}: no JSON ({fault})") from None
            if not isinstance(row, dict):
                raise RequestError(f"{file}, line {number}: no object with fields")
            yield text_of(row, field, f"{file}, line {number}")


def text_of(row: dict[str, object], field: str, where: str) -> str:
    """The text of a row.

    Raises:
        RequestError: it has no such field, or no text there.
    """
    if field not in row:
        raise RequestError(f"{where}: no field {field!r}; {nearest(field, row)}")
    if not isinstance(text := row[field], str):
        raise RequestError(f"{where}: field {field!r} holds {type(text).__name__}, not text")
    return text


def _rows(file: Path, field: str) -> Iterator[str]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with files.open_file(file) as opened, parquet.ParquetFile(opened) as table:
            if field not in table.schema_arrow.names:
                raise RequestError(f"{file}: no field {field!r}; {nearest(field, table.schema_arrow.names)}")
            batches = (batch.to_pylist() for batch in table.iter_batches(columns=[field]))
            for number, row in enumerate(chain.from_iterable(batches), 1):
                yield text_of(row, field, f"{file}, row {number}")
    except pa.ArrowException as fault:
        raise RequestError(f"{file} cannot be read as parquet: {str(fault).splitlines()[0]}") from None


READERS: dict[str, Read] = {"jsonl": _lines, "parquet": _rows}
