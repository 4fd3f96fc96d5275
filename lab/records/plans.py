"""Files of a sweep: its plan, frozen before anything runs, how far each fleet is, and which left checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from lab.core import files
from lab.core.errors import RequestError
from lab.core.files import digest, parse_json, read_json, text_digest, write_text

LARGEST_LINE = files.LARGEST_JSON  # of a plan, which holds a fleet


def freeze(folder: Path, fleets: Iterable[Sequence[Mapping[str, Any]]]) -> str:
    """Write the plan of a request before it runs; returns the name by which ``thaw`` reads it.

    The first line lists the digests of the others, which hold a fleet each, so that a job reads its own fleet only.
    """
    lines = [json.dumps(fleet, separators=(",", ":")) for fleet in fleets]
    digests = [text_digest(line) for line in lines]
    name = digest(digests)
    write_text(_path(folder, name), "\n".join([json.dumps(digests), *lines, ""]), within=folder)
    return name


def thaw(folder: Path, name: str, index: int) -> list[dict[str, Any]]:
    """Read one fleet of the plan of this name.

    Raises:
        RequestError: the plan is missing or damaged.
    """
    path = _path(folder, name)
    with suppress(OSError, ValueError, IndexError), files.open_file(path) as file:
        digests = parse_json(file.readline(LARGEST_LINE), list)
        line = next(islice(iter(lambda: file.readline(LARGEST_LINE), b""), index, None), b"").rstrip(b"\n")
        if digest(digests) == name and text_digest(line.decode()) == digests[index]:
            return parse_json(line, list)
    raise RequestError(f"{path} is damaged; the same command writes it again")


def fleets_of_plans(folder: Path) -> dict[str, list[list[str]]]:
    """The run ids of each fleet of every intact plan in a folder, by the name of the plan, newest plan last."""
    written: dict[str, tuple[float, list[list[str]]]] = {}
    for path in (folder / "plans").glob("*.jsonl"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            head, *lines = files.read_bytes(path).splitlines()
            digests = parse_json(head, list)
            if digest(digests) == path.stem and [text_digest(line.decode()) for line in lines] == digests:
                fleets = [[str(point["id"]) for point in parse_json(line, list)] for line in lines]
                written[path.stem] = path.stat().st_mtime, fleets
    return {name: fleets for name, (_, fleets) in sorted(written.items(), key=lambda plan: plan[1][0])}


def _path(folder: Path, name: str) -> Path:
    return folder / "plans" / f"{name}.jsonl"


class Setting(NamedTuple):
    """What distinguishes runs of a bench that differ in their seeds only.

    Attributes:
        words: overrides after those of the recipe.
        lr: the learning rate.
    """

    words: tuple[str, ...]
    lr: float

    def beside(self, words: tuple[str, ...]) -> Setting:
        """The setting with more words."""
        return self._replace(words=(*self.words, *words))


class FleetProgress(NamedTuple):
    """Progress of one fleet; a rate of 0 means not known yet, and only a fleet that has ended has a verdict."""

    step: int
    steps: int
    seconds: float
    rate: float  # steps per second, from its first step on
    evaluation: float  # seconds that the evaluation after the last step will take; 0 if not known
    losses: Sequence[float | None]  # latest of each run, nats per token; None if not known
    notes: Sequence[str]
    verdict: str | None
    cpu: float | None = None  # of one core, the share that its process had since the last writing; None on a GPU

    @classmethod
    def of(cls, record: Any) -> FleetProgress:
        """Progress from JSON that a fleet wrote.

        Raises:
            ValueError: a key is missing, or its value is invalid.
        """
        try:
            losses = [None if loss is None else float(loss) for loss in record["losses"]]
            notes = [str(note) for note in record["notes"]]
            seconds, rate, evaluation = (float(record[key]) for key in ("seconds", "rate", "evaluation"))
            step, steps = int(record["step"]), max(1, int(record["steps"]))
            cpu = None if record.get("cpu") is None else float(record["cpu"])
            return cls(step, steps, seconds, rate, evaluation, losses, notes, record["verdict"], cpu)
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"not the progress of a fleet: {record!r}") from error

    @property
    def diverged(self) -> int:
        """Runs whose loss is not finite."""
        return sum(loss is not None and not math.isfinite(loss) for loss in self.losses)

    @property
    def left(self) -> float | None:
        """Seconds until the fleet has ended; None if not known yet."""
        if self.verdict:
            return 0.0
        return (self.steps - self.step) / self.rate + self.evaluation if self.rate else None

    @property
    def share(self) -> float:
        """The share of its time that has passed, or of its steps while its rate is not known."""
        if self.left is None or self.verdict:
            return self.step / self.steps
        return self.seconds / (self.seconds + self.left) if self.left else 1.0


def write_progress(folder: Path, plan: str, index: int, progress: FleetProgress) -> None:
    """Write the progress of one fleet of a plan, for other processes to read."""
    path = folder / "plans" / f"{plan}.progress" / str(index)
    write_text(path, json.dumps(progress._asdict()), within=folder)


def read_progress(folder: Path, plan: str) -> dict[int, FleetProgress]:
    """Read the progress of the fleets of a plan that have begun, by index; files that make no sense are left out."""
    progress = {}
    with suppress(FileNotFoundError):  # another process that trains the same plan may clear the folder meanwhile
        for path in (folder / "plans" / f"{plan}.progress").glob("[0-9]*"):
            with suppress(OSError, ValueError):
                progress[int(path.name)] = FleetProgress.of(read_json(path, dict))
    return progress


def progress_written(folder: Path, plan: str, index: int) -> float:
    """When the progress of a fleet was last written, in seconds since the epoch; 0 without any."""
    path = folder / "plans" / f"{plan}.progress" / str(index)
    return path.stat().st_mtime if path.exists() else 0.0


def forget_progress(folder: Path, plan: str) -> None:
    """Delete the progress of a plan, at the start of a request and at its end."""
    with suppress(OSError):
        files.remove(folder / "plans" / f"{plan}.progress", within=folder)


def checkpoint_folder(folder: Path, ids: Sequence[str]) -> Path:
    """The folder of the checkpoints of a fleet of these runs."""
    return folder / "checkpoints" / digest(list(ids))


def checkpointed_fleets(folder: Path) -> list[list[str]]:
    """Ids of the runs of every fleet that left a checkpoint, in the fleet's order."""
    fleets = []
    for card in sorted(folder.glob("checkpoints/*/fleet.json")):
        with suppress(OSError, ValueError):  # removed meanwhile, or not a card of ours
            if ids := list(map(str, read_json(card, list))):
                fleets.append(ids)
    return fleets


def remove_checkpoints(folder: Path, ended: Collection[str]) -> None:
    """Remove the checkpoints of fleets all of whose runs have ended."""
    for ids in checkpointed_fleets(folder):
        if set(ids) <= set(ended):
            with suppress(OSError):
                files.remove(checkpoint_folder(folder, ids), within=folder)
