"""Documents in the rows of one's own files: JSON lines or parquet, packed once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from lab.core import schema
from lab.core.errors import RequestError, nearest
from lab.core.registry import DATA
from lab.core.schema import PerRunSeed
from lab.data import documents, files
from lab.data.corpus import Corpus, once
from lab.data.tokenizer import BYTES

# All documents of a file, in order, given the field that holds their text.
Read = Callable[[Path, str], Iterator[str]]


@DATA.register("jsonl")
@dataclass(frozen=True)
class JsonLines:
    """JSON lines of your own, a document each: ``path`` is a FILE, a DIR or a GLOB; ``field`` holds the text.

    A DIR gives every ``*.jsonl`` below it.  Held out are the 20th, 40th, ... document in the order of paths and lines.
    """

    path: str | None = None
    field: str = "text"
    tokenizer: str = schema.one_of("bytes", "bpe", default="bytes")
    vocabulary: int = schema.bounded(BYTES, above=0)
    seed: PerRunSeed = schema.seed(0)

    def open(self) -> Corpus:
        """Read the files, once for all processes.

        Raises:
            RequestError: no path, nothing there, a line that is no document, or see ``documents.corpus``.
        """
        return _open("jsonl", files.absolute(self.path, "jsonl"), self.field, self.tokenizer, self.vocabulary)


@DATA.register("parquet")
@dataclass(frozen=True)
class Parquet:
    """Parquet files of your own, a document per row: ``path`` is a FILE, a DIR or a GLOB; column ``field`` is the text.

    A DIR gives every ``*.parquet`` below it.  Held out are the 20th, 40th, ... document in the order of paths and rows.
    """

    path: str | None = None
    field: str = "text"
    tokenizer: str = schema.one_of("bytes", "bpe", default="bytes")
    vocabulary: int = schema.bounded(BYTES, above=0)
    seed: PerRunSeed = schema.seed(0)

    def open(self) -> Corpus:
        """Read the files, once for all processes.

        Raises:
            RequestError: no path, nothing there, files that are no parquet or lack the column, or see
                ``documents.corpus``.
        """
        return _open("parquet", files.absolute(self.path, "parquet"), self.field, self.tokenizer, self.vocabulary)


@once
def _open(kind: str, path: str, field: str, tokenizer: str, vocabulary: int) -> Corpus:
    found, origin = files.named(path, [f".{kind}"]), f"data.path={path}"
    if not found:
        raise RequestError(f"{origin} holds no {kind} file")
    source = {"kind": kind, "field": field, "files": [_digest(file) for file in found]}

    def read() -> documents.Parts:
        rows = [row.encode("utf-8", errors="replace") for file in found for row in READERS[kind](file, field)]
        if not rows:
            raise RequestError(f"{origin} holds no documents")
        return documents.split(rows)

    return documents.pack(source, read, origin, {"files": len(found)}, tokenizer, vocabulary)


def _digest(file: Path) -> str:
    try:
        with open(file, "rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as refusal:
        raise RequestError(f"cannot read {file}: {refusal.strerror}") from None


def _lines(file: Path, field: str) -> Iterator[str]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as refusal:
                raise RequestError(f"{file}, line {number}: no JSON ({refusal})") from None
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
        with parquet.ParquetFile(file) as table:
            if field not in table.schema_arrow.names:
                raise RequestError(f"{file}: no field {field!r}; {nearest(field, table.schema_arrow.names)}")
            batches = (batch.to_pylist() for batch in table.iter_batches(columns=[field]))
            for number, row in enumerate(chain.from_iterable(batches), 1):
                yield text_of(row, field, f"{file}, row {number}")
    except pa.ArrowException as refusal:
        raise RequestError(f"{file} cannot be read as parquet: {str(refusal).splitlines()[0]}") from None


READERS: dict[str, Read] = {"jsonl": _lines, "parquet": _rows}
