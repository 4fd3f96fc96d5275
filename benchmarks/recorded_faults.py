"""Where did it begin? Plants faults in training loops with a recorder, and scores what `lab watch` says of each.

    python benchmarks/recorded_faults.py [tuning|all] [FOLDER]

Loops and faults are in ``fault_loops.py``, the design, the rule and the split in ``recorded_faults.yaml``. Recordings
that FOLDER (default: runs/recorded_faults) already holds are kept. ``all`` writes ``recorded_faults.csv`` and
RECORDED_FAULTS.md; ``tuning`` prints what is wrong on the runs on which rules were made, and reads no others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import fault_loops
import torch
import yaml

HERE = Path(__file__).parent
DESIGN: dict[str, Any] = yaml.safe_load((HERE / "recorded_faults.yaml").read_text(encoding="utf-8"))
EMBEDDING = {"vision": "other"}  # the part that holds it


class Planted(NamedTuple):
    """A run of the design: a fault or a healthy habit, by name, and the loop in which it is."""

    name: str
    is_fault: bool
    model: str
    optimizer: str
    seed: int
    at: int
    block: int
    finest: int  # it is recorded every so many steps
    steps: int

    @property
    def is_of_tuning(self) -> bool:
        split = DESIGN["tuning"]
        of_kind = not self.is_fault or DESIGN["faults"][self.name].get("tuning", False)
        return bool(of_kind and self.model in split["models"] and self.optimizer in split["optimizers"])

    @property
    def file(self) -> str:
        return "-".join(map(str, self)) + ".jsonl"

    def loop(self) -> fault_loops.Loop:
        loop = fault_loops.Loop(self.model, self.optimizer, self.seed, self.steps, self.at, self.block)
        getattr(fault_loops, self.name)(loop)
        return loop


def design() -> Iterator[Planted]:
    """The runs: first the eight faults of the first table, then a fraction of all combinations."""
    for number, name in enumerate(list(DESIGN["faults"])[:8]):
        at = DESIGN["faults"][name].get("at", 150)
        yield Planted(name, True, "nano", "adamw", 0, at, (1, 1, 0, 0, 2, 2, 0, 3)[number], 5, 200)
    for is_fault, rows, repeats in (
        (True, DESIGN["faults"], DESIGN["repeats"]),
        (False, DESIGN["healthy"], DESIGN["healthy_repeats"]),
    ):
        for number, (name, row) in enumerate(rows.items()):
            models, optimizers = (row.get(of, DESIGN[of]) for of in ("models", "optimizers"))
            for repeat in range(repeats):
                turn = number + repeat
                at = row.get("at", DESIGN["at"][turn % 3]) if is_fault else 0
                model, optimizer = models[turn % len(models)], optimizers[(number + 2 * repeat) % len(optimizers)]
                yield Planted(
                    *(name, is_fault, model, optimizer, 10 * number + repeat, at, turn % fault_loops.BLOCKS),
                    *(1 if turn % 4 == 0 and model in DESIGN["every_step"] else 10, DESIGN["steps"]),
                )


def thinned(recording: Path, every: int, out: Path) -> Path:
    """What would have been recorded every so many steps: a measurement changes nothing, so its rows are the same."""
    rows = map(json.loads, recording.read_text(encoding="utf-8").splitlines())
    kept = [
        row | {"every": every} if "recorder" in row else row if row["step"] % every == 0 else _loss_alone(row)
        for row in rows
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(f"{json.dumps(row)}\n" for row in kept), encoding="utf-8")
    return out


def _loss_alone(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"step": row["step"], "loss": row["loss"]}


def recorded(planted: Planted, folder: Path) -> Path:
    """The recording of a run, which is trained if it is missing."""
    recording = folder / planted.file
    if not recording.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = recording.with_suffix(".part")
        unfinished.unlink(missing_ok=True)
        planted.loop().run(planted.finest, unfinished)
        unfinished.rename(recording)
    return recording


def rates(planted: Planted) -> list[int]:
    """How many steps lie between two recorded rows of the recordings that are judged."""
    return [planted.finest] if planted.finest == 5 else [every for every in DESIGN["every"] if every >= planted.finest]


def main(part: str, folder: Path) -> None:
    torch.set_num_threads(1)
    for planted in design():
        if part == "all" or planted.is_of_tuning:
            recording = recorded(planted, folder)
            for every in rates(planted):
                thinned(recording, every, folder / f"every{every}" / planted.file)


if __name__ == "__main__":
    main(
        sys.argv[1] if len(sys.argv) > 1 else "all", Path(sys.argv[2] if len(sys.argv) > 2 else "runs/recorded_faults")
    )
