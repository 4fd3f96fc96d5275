"""Files of a sweep under way: the plan, frozen before anything runs, and how far each of its fleets is."""

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
    """Write the plan of a request before it runs; returns the name by which ``thaw`` reads it."""
    name = digest(plan)
    write_text(folder / "plans" / f"{name}.json", json.dumps(plan, indent=1) + "\n")
    return name


def thaw(folder: Path, name: str) -> dict[str, Any]:
    """Read the plan of this name.

    Raises:
        RequestError: it is missing or damaged.
    """
    path = folder / "plans" / f"{name}.json"
    with suppress(OSError, ValueError):
        plan: dict[str, Any] = json.loads(path.read_text())
        if digest(plan) == name:
            return plan
    raise RequestError(f"{path} is damaged; the same command writes it again")


def fleets_of_plans(folder: Path) -> dict[str, list[list[str]]]:
    """The run ids of each fleet of every intact plan in a folder, by the name of the plan, newest plan last."""
    fleets = {}
    paths = sorted((folder / "plans").glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in paths:
        with suppress(RequestError, KeyError, TypeError):
            fleets[path.stem] = [[point["id"] for point in fleet] for fleet in thaw(folder, path.stem)["fleets"]]
    return fleets


def write_progress(folder: Path, plan: str, index: int, progress: Mapping[str, Any]) -> None:
    """Write the progress of one fleet of a plan, for other processes to read."""
    write_text(folder / "plans" / f"{plan}.progress" / str(index), json.dumps(progress))


def read_progress(folder: Path, plan: str) -> dict[int, dict[str, Any]]:
    """Read the progress of all fleets of a plan that have begun, by index; unreadable files are left out."""
    progress = {}
    with suppress(FileNotFoundError):  # another process that trains the same plan may clear the folder meanwhile
        for path in (folder / "plans" / f"{plan}.progress").glob("[0-9]*"):
            with suppress(OSError, ValueError):
                progress[int(path.name)] = json.loads(path.read_text())
    return progress


def progress_written(folder: Path, plan: str, index: int) -> float:
    """When the progress of a fleet was last written, in seconds since the epoch; 0 without any."""
    path = folder / "plans" / f"{plan}.progress" / str(index)
    return path.stat().st_mtime if path.exists() else 0.0


def forget_progress(folder: Path, plan: str) -> None:
    """Delete the progress of a plan, at the start of a request and at its end."""
    shutil.rmtree(folder / "plans" / f"{plan}.progress", ignore_errors=True)
