"""Requests that finished before: they are recognized without planning, and so without loading torch."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lab.core import distributed
from lab.core.files import digest
from lab.core.registry import DATA, KINDS
from lab.core.schema import build
from lab.data.corpus import look_again
from lab.records import plans, store
from lab.report import stamp


@dataclass(frozen=True)
class FinishedRequest:
    """A request, by everything on which its plan depends besides the records.

    Attributes:
        folder: the results folder.
        name: digest of the points, the options, the code of the lab and of packages that add to it, the versions of
            Python and torch, and the machine.
        data: the configs of its data sources, as JSON.
    """

    folder: Path
    name: str
    data: tuple[str, ...]

    def note(self, ids: Sequence[str]) -> None:
        """Note in the folder that the request finished, with the ids of its points."""
        plans.note_request(self.folder, self.name, {"ids": list(ids), "fingerprints": self._fingerprints()})

    def finished_ids(self) -> list[str] | None:
        """The ids of the points if the request finished before on the same data, and its records are intact; else None.

        Raises:
            RequestError: records of another version, damaged tables, or data that cannot be read.
        """
        noted = plans.read_request(self.folder, self.name)
        if noted is None:
            return None
        statuses = store.statuses(self.folder)
        if any(statuses.get(name, "failed") == "failed" for name in noted["ids"]):
            return None
        look_again()
        return list(noted["ids"]) if noted["fingerprints"] == self._fingerprints() else None

    def _fingerprints(self) -> dict[str, str]:
        return {source: _fingerprint(json.loads(source)) for source in self.data}


def recognizable(trees: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> FinishedRequest | None:
    """The request for these points, given by their config trees, with these options of sweeper and launcher.

    Returns:
        The request; None for a shard, on several ranks, for several folders, or if a script has added entries to the
        lab, since the digest would then be incomplete.
    """
    folders = {str(tree["out"]) for tree in trees}
    if options["shard"] != "1/1" or distributed.world_size() > 1 or len(folders) > 1 or "" in folders or _is_extended():
        return None
    made_by = [stamp.code(), platform.python_version(), version("torch"), platform.node()]
    sources = {json.dumps(tree["data"], sort_keys=True) for tree in trees}
    return FinishedRequest(Path(folders.pop()), digest([trees, options, made_by]), tuple(sorted(sources)))


def _is_extended() -> bool:
    """Whether a script has registered entries of its own."""
    entries = [entry for registry in KINDS.values() for entry in registry._entries.values()]
    return not all(stamp.is_in_code(getattr(entry, "measure", entry)) for entry in entries)


def _fingerprint(values: Mapping[str, Any]) -> str:
    numbers = dict(values)
    name = str(numbers.pop("name"))
    source = build(DATA.find_loaded(name) or DATA[name], numbers, "data")
    return str(source.open().fingerprint)
