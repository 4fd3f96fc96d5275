"""Files written atomically and checked for damage, and digests."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tempfile
import zipfile
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from lab.core.errors import RequestError
from lab.core.printing import printable

if TYPE_CHECKING:
    import pandas as pd


def quoted(folder: Path) -> str:
    """A path as the value of an override; Hydra takes backslashes literally, except before a quote."""
    text = re.sub(r"(\\*)(?='|$)", r"\1\1", str(folder)).replace("'", "\\'")
    return f"'{text}'"


def digest(value: Any) -> str:
    """Sixteen hexadecimal digits of a JSON value's SHA-256; the order of keys does not matter."""
    return text_digest(json.dumps(value, sort_keys=True, separators=(",", ":")))


def text_digest(text: str) -> str:
    """Sixteen hexadecimal digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_csv(path: Path, table: pd.DataFrame, **form: Any) -> None:
    """Write a table as CSV, atomically and ``printable``, since terminals show it; ``form`` goes to ``to_csv``."""
    write_text(path, printable(table.to_csv(index=False, lineterminator="\n", **form)))


# A table's footer holds this word and then the digest of the file, computed with zeros in the digest's place.  A digest
# in a file of its own could belong to the table of another process that gathers at the same time.
SEAL, ZEROS = b"sealed by sha256:", b"0" * 64


@contextmanager
def atomic_write(path: Path) -> Any:
    """Yield a temporary path to write within the block; it is moved to ``path`` at the end.

    Raises:
        RequestError: the file cannot be written.
    """
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


def file_digest(path: Path) -> str:
    """Sixteen hexadecimal digits of a file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def check_zip(file: Path | BinaryIO) -> None:
    """Verify the checksums of a zip file, such as ``torch.save`` writes; torch itself does not.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        damaged = zipfile.ZipFile(file).testzip()
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as fault:
        raise ValueError(f"damaged: {fault}") from None
    if damaged:
        raise ValueError(f"{damaged} is damaged")


def write_table(path: Path, table: pd.DataFrame, **packing: Any) -> str:
    """Write a table as parquet, sealed with its checksum; returns the digest of the file."""
    import pyarrow  # slow to load, and needed only to write
    import pyarrow.parquet

    content = pyarrow.Table.from_pandas(table, preserve_index=False)
    content = content.replace_schema_metadata({**content.schema.metadata, b"seal": SEAL + ZEROS})
    with atomic_write(path) as temporary:
        pyarrow.parquet.write_table(content, temporary, compression="zstd", **packing)
        written = temporary.read_bytes()
        with open(temporary, "r+b") as file:
            file.seek(written.rindex(SEAL) + len(SEAL))
            file.write(hashlib.sha256(written).hexdigest().encode())
        return file_digest(temporary)


def read_table(path: Path, columns: list[str] | None = None) -> pd.DataFrame:
    """Read a table, or some columns of it, and verify its seal; a table without one is read as it is.

    Raises:
        ValueError: the file differs from what was written.
    """
    import pandas as pd  # slow to load, and needed only to read

    return pd.read_parquet(io.BytesIO(_verified(path)), columns=columns)


def read_tables(paths: Iterable[Path]) -> pd.DataFrame:
    """Read tables of the same columns as one, each as by ``read_table``.

    Raises:
        ValueError: a file differs from what was written.
    """
    import pyarrow.parquet

    tables = [pyarrow.parquet.read_table(io.BytesIO(_verified(path))) for path in paths]
    table: pd.DataFrame = pyarrow.concat_tables(tables).to_pandas()
    return table


def read_distinct(path: Path, column: str) -> list[str]:
    """The distinct values of one column of text; much faster than ``read_table``.

    Raises:
        ValueError: the file differs from what was written.
    """
    import pyarrow.parquet

    content = io.BytesIO(_verified(path))
    table = pyarrow.parquet.read_table(content, columns=[column], read_dictionary=[column])
    return list(map(str, table.column(column).unique().to_pylist()))


def _verified(path: Path) -> bytes:
    content = path.read_bytes()
    seal = content.rfind(SEAL)
    position = slice(seal + len(SEAL), seal + len(SEAL) + len(ZEROS))
    blank = content[: position.start] + ZEROS + content[position.stop :]
    if seal >= 0 and hashlib.sha256(blank).hexdigest().encode() != content[position]:
        raise ValueError(f"{path.name} is not what was written")
    return content
