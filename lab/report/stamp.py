"""The stamp of a report: a digest of everything it was made from, so that an unchanged report is not drawn again."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lab.analysis.judging.evidence import READINGS_FILE
from lab.core import files
from lab.core.registry import packages_of_others
from lab.records import store

LIBRARIES = ("jinja2", "matplotlib", "numpy", "pandas", "scipy")
STAMP = "report.json"
SOURCES = (".py", ".yaml", ".html", ".css", ".js")


def origin(folder: Path) -> str | None:
    """Digest of everything on which a report of one folder depends: tables, commands, the lab's code, libraries.

    Returns:
        None if the tables lack a run, or if a script has added figures.
    """
    tables = store.digest_of_tables(folder)
    if tables is None or _has_other_figures():
        return None
    versions = [platform.python_version(), *(version(name) for name in LIBRARIES)]
    return files.digest([folder.resolve().name, tables, _requests(folder), code(), versions])


def _requests(folder: Path) -> dict[str, str]:
    """Digests of the files that hold the commands, their days, their questions, and readings of claims."""
    return {
        path.name: files.file_digest(path)
        for path in [folder / "commands.json", folder / "requests.json", folder.resolve().parent / READINGS_FILE]
        if path.exists()
    }


def _has_other_figures() -> bool:
    """Whether a script has added figures, which no stamp covers."""
    registry = sys.modules.get("lab.analysis.drawing.registry")  # a script that adds a figure has imported it
    entries = registry.FIGURES._entries.values() if registry else ()
    return not all(map(is_in_code, entries))


def is_in_code(entry: Any) -> bool:
    """Whether ``code`` covers the module of a class or function, which it does unless it is a script's."""
    return entry.__module__.split(".")[0] in {"lab", *packages_of_others()}


@cache
def code() -> str:
    """Digest of the source files of the lab, and of each installed package that adds to it."""
    return files.digest({package: dict(_sources(package)) for package in ("lab", *packages_of_others())})


def _sources(package: str) -> Iterator[tuple[str, str]]:
    """Yield path and digest of each source file of a top-level package or module, without importing it."""
    spec = find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in (path for path in Path(folder).rglob("*") if path.suffix in SOURCES):
            yield str(path.relative_to(folder)), files.file_digest(path)
    if spec and spec.origin and not spec.submodule_search_locations:
        yield package, files.file_digest(Path(spec.origin))


def write(folder: Path, made_from: str, summary: str) -> None:
    """Stamp a report that was made from this origin, together with its summary."""
    parts = {path.relative_to(folder).as_posix(): files.file_digest(path) for path in _parts(folder)}
    files.write_text(folder / STAMP, json.dumps({"origin": made_from, "parts": parts, "summary": summary}) + "\n")


def remove(folder: Path) -> None:
    """Remove the stamp, before the report changes."""
    with suppress(OSError):  # if the folder cannot be written, the next write refuses it
        files.remove(folder / STAMP, within=folder)


def current_summary(folder: Path) -> str | None:
    """The summary of the folder's report if making it again would change nothing; else None."""
    try:
        stamp = files.read_json(folder / STAMP, dict)
        if any(files.file_digest(folder / name) != digest for name, digest in stamp["parts"].items()):
            return None
        return str(stamp["summary"]) if stamp["origin"] == origin(folder) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _parts(folder: Path) -> list[Path]:
    return sorted([folder / "report.html", *folder.glob("figures/*.svg"), *folder.glob("tables/*.csv")])
