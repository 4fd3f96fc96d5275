"""Files of a sweep: its plan, frozen before anything runs, how far each fleet is, and which left checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from lab.core.errors import RequestError
from lab.core.files import digest, text_digest, write_text


def freeze(folder: Path, fleets: Iterable[Sequence[Mapping[str, Any]]]) -> str:
    """Write the plan of a request before it runs; returns the name by which ``thaw`` reads it.

    The first line lists the digests of the others, which hold a fleet each, so that a job reads its own fleet only.
    """
    lines = [json.dumps(fleet, separators=(",", ":")) for fleet in fleets]
    digests = [text_digest(line) for line in lines]
    name = digest(digests)
    write_text(_path(folder, name), "\n".join([json.dumps(digests), *lines, ""]))
    return name


def thaw(folder: Path, name: str, index: int) -> list[dict[str, Any]]:
    """Read one fleet of the plan of this name.

    Raises:
        RequestError: the plan is missing or damaged.
    """
    path = _path(folder, name)
    with suppress(OSError, ValueError, IndexError), open(path, encoding="utf-8") as file:
        digests = json.loads(next(file, ""))
        line = next(islice(file, index, None), "").rstrip("\n")
        if digest(digests) == name and text_digest(line) == digests[index]:
            fleet: list[dict[str, Any]] = json.loads(line)
            return fleet
    raise RequestError(f"{path} is damaged; the same command writes it again")


def fleets_of_plans(folder: Path) -> dict[str, list[list[str]]]:
    """The run ids of each fleet of every intact plan in a folder, by the name of the plan, newest plan last."""
    fleets = {}
    paths = sorted((folder / "plans").glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    for path in paths:
        with suppress(OSError, ValueError, KeyError, TypeError):
            digests, *lines = path.read_text(encoding="utf-8").splitlines()
            if digest(json.loads(digests)) == path.stem and list(map(text_digest, lines)) == json.loads(digests):
                fleets[path.stem] = [[point["id"] for point in json.loads(line)] for line in lines]
    return fleets


def _path(folder: Path, name: str) -> Path:
    return folder / "plans" / f"{name}.jsonl"


def write_progress(folder: Path, plan: str, index: int, progress: Mapping[str, Any]) -> None:
    """Write the progress of one fleet of a plan, for other processes to read."""
    write_text(folder / "plans" / f"{plan}.progress" / str(index), json.dumps(progress))


def read_progress(folder: Path, plan: str, skip: Container[int] = ()) -> dict[int, dict[str, Any]]:
    """Read the progress of the fleets of a plan that have begun, by index; unreadable files are left out."""
    progress = {}
    with suppress(FileNotFoundError):  # another process that trains the same plan may clear the folder meanwhile
        for path in (folder / "plans" / f"{plan}.progress").glob("[0-9]*"):
            with suppress(OSError, ValueError):
                if (index := int(path.name)) not in skip:
                    progress[index] = json.loads(path.read_text())
    return progress


def progress_written(folder: Path, plan: str, index: int) -> float:
    """When the progress of a fleet was last written, in seconds since the epoch; 0 without any."""
    path = folder / "plans" / f"{plan}.progress" / str(index)
    return path.stat().st_mtime if path.exists() else 0.0


def forget_progress(folder: Path, plan: str) -> None:
    """Delete the progress of a plan, at the start of a request and at its end."""
    shutil.rmtree(folder / "plans" / f"{plan}.progress", ignore_errors=True)


def checkpoint_folder(folder: Path, ids: Sequence[str]) -> Path:
    """The folder of the checkpoints of a fleet of these runs."""
    return folder / "checkpoints" / digest(list(ids))


def checkpointed_fleets(folder: Path) -> list[list[str]]:
    """Ids of the runs of every fleet that left a checkpoint, in the fleet's order."""
    fleets = []
    for card in sorted(folder.glob("checkpoints/*/fleet.json")):
        with suppress(OSError, ValueError):  # removed meanwhile, or not a card of ours
            fleets.append(list(map(str, json.loads(card.read_text()))))
    return fleets


def remove_checkpoints(folder: Path, ended: Collection[str]) -> None:
    """Remove the checkpoints of fleets all of whose runs have ended."""
    for ids in checkpointed_fleets(folder):
        if set(ids) <= set(ended):
            shutil.rmtree(checkpoint_folder(folder, ids), ignore_errors=True)


def note_request(folder: Path, name: str, request: Mapping[str, Any]) -> None:
    """Keep what a finished request consisted of, under the digest of its settings."""
    write_text(_request_path(folder, name), json.dumps({**request, "digest": digest(request)}))


def read_request(folder: Path, name: str) -> dict[str, Any] | None:
    """What ``note_request`` kept; None if it is missing or damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        request: dict[str, Any] = json.loads(_request_path(folder, name).read_text())
        return request if request.pop("digest") == digest(request) else None
    return None


def _request_path(folder: Path, name: str) -> Path:
    return folder / "plans" / f"{name}.request.json"
