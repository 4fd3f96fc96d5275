"""Files: written whole or not at all, checked for damage, and text made safe to show."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pandas as pd

from lab.core.errors import RequestError


def printable(text: str) -> str:
    """The text with control characters, surrogates and marks that turn the direction of writing spelled out."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in text
    )


def digest(value: Any) -> str:
    """Sixteen hexadecimal digits that stand for a JSON value; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_text(path: Path, text: str) -> None:
    """Write a text file that is there whole or not at all."""
    with atomic_write(path) as beside:
        beside.write_text(text, encoding="utf-8")


# A note in a table's own footer: this word, then the digest of the file in which zeros stand for the digest.
SEAL, ZEROS = b"sealed by sha256:", b"0" * 64


@contextmanager
def atomic_write(path: Path) -> Any:
    """Within the block write the file this gives; then it stands under ``path``, whole."""
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
    """Sixteen hexadecimal digits that stand for the bytes of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def check_zip(file: Path | BinaryIO) -> None:
    """Compare what lies in a zip, such as ``torch.save`` writes, with its checksums, which torch does not.

    Raises:
        ValueError: it is damaged.
    """
    try:
        damaged = zipfile.ZipFile(file).testzip()
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as fault:
        raise ValueError(f"damaged: {fault}") from None
    if damaged:
        raise ValueError(f"{damaged} is damaged")


def write_table(path: Path, table: pd.DataFrame, **packing: Any) -> str:
    """Write a table and its seal; returns the digest of the file."""
    import pyarrow  # slow to load, and not everybody writes
    import pyarrow.parquet

    content = pyarrow.Table.from_pandas(table, preserve_index=False)
    content = content.replace_schema_metadata({**content.schema.metadata, b"seal": SEAL + ZEROS})
    with atomic_write(path) as beside:
        pyarrow.parquet.write_table(content, beside, compression="zstd", **packing)
        written = beside.read_bytes()
        with open(beside, "r+b") as file:
            file.seek(written.rindex(SEAL) + len(SEAL))
            file.write(hashlib.sha256(written).hexdigest().encode())
        return file_digest(beside)


def read_table(path: Path) -> pd.DataFrame:
    """A table; one that was written before there were seals is taken as it is.

    Raises:
        ValueError: the seal does not fit.
    """
    content = path.read_bytes()
    found = content.rfind(SEAL)
    place = slice(found + len(SEAL), found + len(SEAL) + len(ZEROS))
    blank = content[: place.start] + ZEROS + content[place.stop :]
    if found >= 0 and hashlib.sha256(blank).hexdigest().encode() != content[place]:
        raise ValueError(f"{path.name} is not what was written")
    return pd.read_parquet(io.BytesIO(content))
