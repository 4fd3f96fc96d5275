"""The stamp of a report says what the report was made from, so that an unchanged one need not be drawn again."""

from __future__ import annotations

import json
import platform
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

from lab.core import files
from lab.core.registry import others_add
from lab.records import store

LIBRARIES = ("matplotlib", "numpy", "pandas", "scipy")
STAMP = "report.json"


def origin(folder: Path) -> str | None:
    """Digest of all that a report of one folder depends on: its tables and commands, the lab's code, the libraries.

    Returns:
        None if the tables lack a run, or if another package may add figures.
    """
    tables = store.digest_of_tables(folder)
    if tables is None or _has_other_figures():
        return None
    versions = [platform.python_version(), *(version(name) for name in LIBRARIES)]
    return files.digest([folder.resolve().name, tables, _requests(folder), code(), versions])


def _requests(folder: Path) -> dict[str, str]:
    """Digests of the files that hold the commands, their days and their questions."""
    return {
        path.name: files.file_digest(path)
        for path in [folder / name for name in ("commands.json", "requests.json")]
        if path.exists()
    }


def _has_other_figures() -> bool:
    if others_add("figures"):
        return True
    registry = sys.modules.get("lab.analysis.drawing.registry")  # a script that adds a figure has imported it
    entries = registry.FIGURES._entries.values() if registry else ()
    return any(not draw.__module__.startswith("lab.") for draw in entries)


@cache
def code() -> str:
    """Digest of the lab's source files."""
    package = Path(__file__).parents[1]
    return files.digest({str(path.relative_to(package)): files.file_digest(path) for path in package.rglob("*.py")})


def write(folder: Path, made_from: str, summary: str) -> None:
    """Stamp a report that was made from this origin, together with its summary."""
    parts = {path.relative_to(folder).as_posix(): files.file_digest(path) for path in _parts(folder)}
    files.write_text(folder / STAMP, json.dumps({"origin": made_from, "parts": parts, "summary": summary}) + "\n")


def remove(folder: Path) -> None:
    """Remove the stamp, before the report changes."""
    with suppress(OSError):  # a folder that cannot be written is refused by whatever is written first
        files.remove(folder / STAMP, within=folder)


def current_summary(folder: Path) -> str | None:
    """The summary of the folder's report, if making it again would change nothing; else None."""
    try:
        stamp = files.read_json(folder / STAMP, dict)
        if any(files.file_digest(folder / name) != digest for name, digest in stamp["parts"].items()):
            return None
        return str(stamp["summary"]) if stamp["origin"] == origin(folder) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _parts(folder: Path) -> list[Path]:
    return sorted([folder / "report.html", *folder.glob("figures/*.svg"), *folder.glob("tables/*.csv")])
