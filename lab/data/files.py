"""Files that a path names: one, those below a folder, or those a pattern matches."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from lab.core.errors import RequestError


def named(path: str, suffixes: Sequence[str]) -> list[Path]:
    """A FILE or a GLOB gives exactly what it names, a DIR every file below it with one of the suffixes, in order.

    Raises:
        RequestError: nothing is there, or a folder cannot be read.
    """
    if os.path.isdir(path):
        found = [file for file in below(path) if file.suffix.lower() in suffixes]
    elif os.path.exists(path):
        found = [Path(path)]
    elif not glob.has_magic(path):
        raise RequestError(f"data.path={path} does not exist")
    else:
        found = [Path(match) for match in glob.glob(path, recursive=True) if os.path.isfile(match)]
    # Ordered as words: the order of Path objects depends on the system.
    return sorted(found, key=Path.as_posix)


def below(root: str, without: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Every file in a folder and its folders, hidden ones and those named ``without`` apart.

    Raises:
        RequestError: a folder cannot be read.
    """

    def refuse(refusal: OSError) -> None:
        raise RequestError(f"cannot read {refusal.filename}: {refusal.strerror}")

    for folder, inner, names in os.walk(root, onerror=refuse):
        # Pruned on the way rather than filtered afterwards: site-packages may be larger than all the rest.
        inner[:] = [name for name in inner if name not in without and not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def absolute(path: str | None, source: str) -> str:
    """What the user gave as ``data.path``, which may begin with ``~``.

    Raises:
        RequestError: nothing was given.
    """
    if not path:
        raise RequestError(f"data={source} needs data.path=FILE|DIR|GLOB")
    return os.path.abspath(os.path.expanduser(path))
