"""The clock of each run: how many updates it has made, which batch comes next, how old its optimizer state is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass
class Clock:
    """Where each run of a fleet stands before its next update.

    Attributes:
        step_r: updates made, which the schedule of the learning rate follows.
        batch_r: index of the batch of the data that comes next.
        age_r: updates since the optimizer's state was fresh, which Adam's bias correction follows.
        lr_factor_r: what the learning rate is multiplied by.
    """

    step_r: NDArray[np.int64]
    batch_r: NDArray[np.int64]
    age_r: NDArray[np.int64]
    lr_factor_r: NDArray[np.float64]

    @classmethod
    def begin(cls, runs: int) -> Clock:
        """The clock before the first update."""
        step_r, batch_r, age_r = np.zeros((3, runs), dtype=np.int64)
        return cls(step_r, batch_r, age_r, np.ones(runs))

    def at(self, run: int) -> tuple[int, int]:
        """The step that a run makes next, and the batch of the data that it sees."""
        return int(self.step_r[run]), int(self.batch_r[run])

    def tick(self, run: int, *, updated: bool) -> None:
        """Count a batch of a run, and its update unless it was left out."""
        self.batch_r[run] += 1
        self.step_r[run] += updated
        self.age_r[run] += updated

    def position(self) -> dict[str, list[int]]:
        """Where all runs stand, as plain numbers; a snapshot keeps it."""
        return {name: getattr(self, name).tolist() for name in ("step_r", "batch_r", "age_r")}

    def go_back(self, run: int, position: Mapping[str, list[int]]) -> None:
        """Put one run where a snapshot was taken; its factor of the learning rate stays."""
        for name, numbers in position.items():
            getattr(self, name)[run] = numbers[run]

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores."""
        return {**self.position(), "lr_factor_r": self.lr_factor_r.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state`` returned."""
        for name, numbers in state.items():
            getattr(self, name)[:] = numbers
