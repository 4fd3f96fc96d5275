"""Files written atomically inside their folder, and read within limits; digests, and checks for damage."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from lab.core.errors import RequestError
from lab.core.printing import printable

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow.parquet

Json = TypeVar("Json", dict[str, Any], list[Any])

# Sizes that none of our folders reaches, and that take less than 2 GB of memory to read. A large folder holds 20,000
# runs: a card takes 4 kB, a plan 2 kB a run, and the metrics 500 rows of five columns a run.
MIB = 2**20
LARGEST_JSON = 32 * MIB
LARGEST_FILE = 256 * MIB  # a table, a plan, a log
MOST_CELLS = 60_000_000  # rows times columns of all tables that are read as one
COMPRESSED = ".gz"
FORMULA = ("=", "+", "-", "@", "\t", "\r")
MOST_COLUMNS = 2_000  # settings of a run and of all its interventions
LFS_POINTER = "is a pointer of Git LFS and not the file itself; git lfs pull fetches that"


def quoted(text: str | Path) -> str:
    """A text, such as a path, as the value of an override; Hydra takes backslashes literally, except before a quote."""
    text = re.sub(r"(\\*)(?='|$)", r"\1\1", str(text)).replace("'", "\\'")
    return f"'{text}'"


def digest(value: Any) -> str:
    """Sixteen hexadecimal digits of a JSON value's SHA-256; the order of keys does not matter."""
    return text_digest(json.dumps(value, sort_keys=True, separators=(",", ":")))


def text_digest(text: str) -> str:
    """Sixteen hexadecimal digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_text(path: Path, text: str, *, within: Path | None = None) -> None:
    """Write a text file atomically; see ``atomic_write``."""
    with atomic_write(path, within=within) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_output(path: Path, text: str) -> None:
    """Write a text where a user wants it: to a file atomically, also through a link; into a device or a pipe as it is.

    Raises:
        RequestError: it cannot be written.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        try:
            path.write_text(text, encoding="utf-8")
        except BrokenPipeError:
            raise
        except OSError as refusal:
            raise RequestError(f"cannot write {path}: {refusal.strerror}") from None
    else:
        write_text(Path(os.path.realpath(path)), text)


def write_csv(path: Path, table: pd.DataFrame, *, within: Path | None = None, **form: Any) -> None:
    """Write a table as CSV, atomically; see ``csv_text``."""
    write_text(path, csv_text(table, **form), within=within)


def csv_text(table: pd.DataFrame, **form: Any) -> str:
    """A table as CSV, ``printable``, since terminals show it; ``form`` goes to ``to_csv``.

    A spreadsheet runs what begins with a sign of FORMULA, unless it is a number; a quote before it makes it text.
    """
    import pandas  # slow to load

    plain = table.rename(columns=_no_formula)
    for name, words in plain.items():
        if not pandas.api.types.is_numeric_dtype(words) and any(_no_formula(cell) is not cell for cell in words):
            plain[name] = pandas.Series(map(_no_formula, words), plain.index, dtype=object)
    return printable(str(plain.to_csv(index=False, lineterminator="\n", **form)))


def _no_formula(cell: Any) -> Any:
    if not isinstance(cell, str) or not cell.startswith(FORMULA):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


@contextmanager
def atomic_write(path: Path, *, within: Path | None = None) -> Any:
    """Yield a temporary path to write within the block; it is moved to ``path`` at the end.

    Args:
        path: the file.
        within: the folder that it may not leave, see ``inside``; by default the one it lies in.

    Raises:
        RequestError: the file cannot be written.
    """
    inside(path, within or path.parent)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        try:
            yield Path(name)
            os.chmod(name, 0o644)
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as refusal:
        raise RequestError(f"cannot write {path}: {refusal.strerror or refusal}") from None


def inside(path: Path, folder: Path) -> Path:
    """The path, to be written or deleted, unless a link in a folder leads there from elsewhere.

    Whoever names a folder trusts its own path, links included, but not what others have put into it.

    Raises:
        RequestError: a link on the way from the folder to the path leads out of the folder.
    """
    place = os.path.realpath(path.parent)
    if not Path(place).is_relative_to(os.path.realpath(folder)):
        raise RequestError(f"a link in {folder} leads {path.parent} to {place}; remove it, nothing is changed there")
    return path


def remove(path: Path, *, within: Path) -> None:
    """Delete a file, a link or a folder with all in it, if it is there.

    Raises:
        OSError: it cannot be deleted.
        RequestError: see ``inside``.
    """
    inside(path, within)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def open_file(path: Path) -> io.BufferedReader:
    """Open a file to read; not a pipe, which may keep its reader waiting, nor a device, which may have no end.

    Whatever the lab reads is opened here, by this function or those below.

    Raises:
        OSError: it cannot be opened, or is no file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a file", str(path))
    return os.fdopen(handle, "rb")


def unpacked(path: Path, file: BinaryIO) -> BinaryIO:
    """The content of an open file, without the compression by gzip that its name tells.

    Reading from it raises ``EOFError`` or ``OSError`` if it was cut off or is damaged.
    """
    return gzip.GzipFile(fileobj=file) if path.suffix == COMPRESSED else file  # type: ignore[return-value]


def read_bytes(path: Path, largest: int = LARGEST_FILE) -> bytes:
    """The content of a file.

    Raises:
        OSError: it cannot be read, is no file, or has more than ``largest`` bytes.
    """
    with open_file(path) as file:
        content = file.read(min(largest, os.fstat(file.fileno()).st_size) + 1)
    if len(content) > largest:
        raise OSError(errno.EFBIG, f"larger than {largest // MIB} MiB", str(path))
    return content


def is_lfs_pointer(content: bytes) -> bool:
    """Whether the content of a file, or its beginning, is a pointer of Git LFS to a file that was not fetched."""
    return content.startswith(b"version https://git-lfs.github.com/spec/")


def read_text(path: Path) -> str:
    """The content of a text file.

    Raises:
        OSError: see ``read_bytes``.
        ValueError: it is not UTF-8.
    """
    return read_bytes(path).decode()


def read_csv(path: Path, **form: Any) -> pd.DataFrame:
    """The table in a CSV file; ``form`` goes to ``pandas.read_csv``.

    Raises:
        OSError: see ``read_bytes``.
        ValueError: it is no such table.
    """
    import pandas  # slow to load

    table: pd.DataFrame = pandas.read_csv(io.BytesIO(read_bytes(path)), **form)
    return table


def read_json(path: Path, kind: type[Json]) -> Json:
    """The JSON in a file; see ``parse_json``.

    Raises:
        OSError: see ``read_bytes``.
        ValueError: see ``parse_json``.
    """
    return parse_json(read_bytes(path, LARGEST_JSON), kind)


def parse_json(content: bytes, kind: type[Json]) -> Json:
    """The JSON object or array in this text.

    Raises:
        ValueError: it is no JSON, no ``kind``, nested too deeply for Python, or holds an integer of more than 64 bits.
    """
    try:
        value = json.loads(content.decode("utf-8-sig"), parse_int=_integer)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, kind):
        raise ValueError(f"no JSON {'object' if kind is dict else 'array'}")
    return value


def _integer(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (number := int(digits)) < 2**63:
        raise ValueError(f"{digits[:20]}... is more than 64 bits")
    return number


def file_digest(path: Path) -> str:
    """Sixteen hexadecimal digits of a file's SHA-256."""
    return hashlib.sha256(read_bytes(path)).hexdigest()[:16]


def check_zip(file: BinaryIO) -> None:
    """Verify the checksums of a zip file, such as ``torch.save`` writes; torch itself does not.

    Raises:
        ValueError: the file is damaged, or holds more than it takes: ``torch.save`` compresses nothing.
    """
    try:
        content = zipfile.ZipFile(file)
        if sum(entry.file_size for entry in content.infolist()) > file.seek(0, io.SEEK_END):
            raise ValueError("larger inside than outside")
        damaged = content.testzip()
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as fault:
        raise ValueError(f"damaged: {fault}") from None
    if damaged:
        raise ValueError(f"{damaged} is damaged")


def write_table(path: Path, table: pd.DataFrame, *, within: Path | None = None, note: str = "", **packing: Any) -> str:
    """Write a table as parquet with a checksum of each page; returns the digest of the file.  See ``atomic_write``.

    ``note`` is a text about the table for ``read_footer``.
    """
    import pyarrow  # slow to load, and needed only to write
    import pyarrow.parquet

    content = pyarrow.Table.from_pandas(table, preserve_index=False)
    notes = {b"note": note.encode()} if note else {}
    # a second copy of the schema, and the least and largest value of each column, would be half of a table of runs
    packing |= {"store_schema": False, "write_statistics": False, "compression": "zstd", "write_page_checksum": True}
    with atomic_write(path, within=within) as temporary:
        with pyarrow.parquet.ParquetWriter(temporary, content.schema, **packing) as writer:
            writer.write_table(content)
            # no page holds the names and types of columns
            columns = _digest_of_columns(content.column_names, content.schema.metadata)
            writer.add_key_value_metadata({**content.schema.metadata, **notes, b"columns": columns})
        return file_digest(temporary)


def read_table(path: Path, columns: list[str] | None = None) -> pd.DataFrame:
    """Read a table, or some columns of it, and verify its checksums; older tables have none.

    Raises:
        OSError: see ``read_bytes``.
        ValueError: the file is damaged, is no table, or holds too much.
    """
    (content,) = _opened([path])
    table: pd.DataFrame = content.read(columns, use_pandas_metadata=True).to_pandas()
    return table


def read_tables(paths: Iterable[Path]) -> pd.DataFrame:
    """Read tables of the same columns as one, each as by ``read_table``.

    Raises:
        OSError, ValueError: see ``read_table``.
    """
    import pyarrow  # slow to load, and needed only to read

    tables = [content.read() for content in _opened(paths)]
    # the schema of older tables calls their text large
    table: pd.DataFrame = pyarrow.concat_tables(tables, promote_options="permissive").to_pandas()
    return table


def read_distinct(path: Path, column: str) -> list[str]:
    """The distinct values of one column of text; much faster than ``read_table``.

    Raises:
        OSError, ValueError: see ``read_table``.
    """
    (content,) = _opened([path], read_dictionary=[column])
    return list(map(str, content.read([column]).column(column).unique().to_pylist()))


def read_footer(path: Path) -> tuple[int, str]:
    """The number of rows of a table, and the note with which it was written; no checksum is verified.

    Raises:
        OSError: see ``open_file``.
        ValueError: the file is no table.
    """
    import pyarrow.parquet  # slow to load, and needed only to read

    with open_file(path) as file:
        footer = pyarrow.parquet.read_metadata(file)
    return footer.num_rows, (footer.metadata or {}).get(b"note", b"").decode()


def _opened(paths: Iterable[Path], **options: Any) -> Iterator[pyarrow.parquet.ParquetFile]:
    """Tables that together fit into memory."""
    cells = 0
    for path in paths:
        content, more = _table_of(read_bytes(path), path.name, cells, **options)
        cells += more
        yield content


def _table_of(file: bytes, name: str, cells: int = 0, **options: Any) -> tuple[pyarrow.parquet.ParquetFile, int]:
    """A table with its number of cells, which beside so many others fit into memory.

    The size of a file says nothing of a column of equal values.
    """
    import pyarrow.parquet  # slow to load, and needed only to read

    if is_lfs_pointer(file):
        raise ValueError(f"{name} {LFS_POINTER}")
    content = pyarrow.parquet.ParquetFile(io.BytesIO(file), page_checksum_verification=True, **options)
    footer = content.metadata
    if footer.num_columns > MOST_COLUMNS:
        raise ValueError(f"{name} has {footer.num_columns:,} columns, more than {MOST_COLUMNS:,}")
    more = footer.num_rows * footer.num_columns
    if cells + more > MOST_CELLS:
        raise ValueError(f"{name} makes it {cells + more:,} numbers and words, more than {MOST_CELLS:,}")
    notes = footer.metadata or {}
    if b"columns" in notes and notes[b"columns"] != _digest_of_columns(content.schema_arrow.names, notes):
        raise ValueError(f"{name} is not what was written")
    return content, more


def table_rows(file: bytes, name: str) -> Iterator[dict[str, Any]]:
    """The rows of a table that was read as bytes, by column; cells that are null are None.

    Raises:
        ValueError, OSError: it is damaged, is no table, or holds too much.
    """
    for batch in _table_of(file, name)[0].iter_batches(batch_size=1000):
        yield from batch.to_pylist()


def _digest_of_columns(names: list[str], notes: Mapping[bytes, bytes]) -> bytes:
    return digest([names, notes.get(b"pandas", b"").decode()]).encode()
