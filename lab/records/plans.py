"""A request under way: its frozen list of points and fleets, and how far each fleet is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lab.core.errors import RequestError
from lab.core.files import digest, write_text


def freeze(folder: Path, plan: Mapping[str, Any]) -> str:
    """Freeze a request before anything of it runs; returns the name under which ``thaw`` finds it."""
    name = digest(plan)
    write_text(folder / "plans" / f"{name}.json", json.dumps(plan, indent=1) + "\n")
    return name


def thaw(folder: Path, name: str) -> dict[str, Any]:
    """The request frozen under ``name``.

    Raises:
        RequestError: it is not there as it was written.
    """
    path = folder / "plans" / f"{name}.json"
    with suppress(OSError, ValueError):
        plan: dict[str, Any] = json.loads(path.read_text())
        if digest(plan) == name:
            return plan
    raise RequestError(f"{path} is damaged; the same command writes it again")


def write_progress(folder: Path, plan: str, index: int, progress: Mapping[str, Any]) -> None:
    """Say how far a fleet of a plan is, to whoever watches the folder."""
    write_text(folder / "plans" / f"{plan}.progress" / str(index), json.dumps(progress))


def read_progress(folder: Path, plan: str) -> dict[int, dict[str, Any]]:
    """How far the fleets of a plan are that have begun, by index; what cannot be read is left out."""
    found = {}
    with suppress(FileNotFoundError):  # another process that trains the same may clear it meanwhile
        for place in (folder / "plans" / f"{plan}.progress").glob("[0-9]*"):
            with suppress(OSError, ValueError):
                found[int(place.name)] = json.loads(place.read_text())
    return found


def forget_progress(folder: Path, plan: str) -> None:
    """Clear what ``write_progress`` left: at the start of a request, and at its end."""
    shutil.rmtree(folder / "plans" / f"{plan}.progress", ignore_errors=True)
