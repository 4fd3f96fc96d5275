"""Snapshots: copies of a fleet's state in memory, from which single runs are restored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lab.training.clock import Clock

Snapshot = dict[str, Any]  # position of the clock, tensors, and which runs may still go back to it


class Snapshots:
    """A ring of snapshots of all runs; a run that went back may no longer use those taken after.

    Args:
        tensors: the state of the fleet ``[r ...]`` by name, which is copied and restored.
        most: how many snapshots are kept.
    """

    def __init__(self, tensors: Mapping[str, Tensor], most: int) -> None:
        self.tensors, self.most = tensors, most
        self.ring: list[Snapshot] = []

    @torch.no_grad()
    def take(self, clock: Clock) -> None:
        """Copy the present state, in place of the oldest copy once the ring is full."""
        oldest = self.ring.pop(0)["tensors"] if len(self.ring) == self.most else None
        copies = {name: tensor.clone() for name, tensor in self.tensors.items()} if oldest is None else oldest
        if oldest is not None:
            for name, tensor in self.tensors.items():
                copies[name].copy_(tensor)
        position = clock.position()
        self.ring.append({"position": position, "tensors": copies, "usable_r": [True] * len(position["step_r"])})

    @torch.no_grad()
    def go_back(self, run: int, clock: Clock, updates: int) -> None:
        """Restore one run from its newest snapshot at least so many updates back, or else from its oldest."""
        index = self._newest(run, clock, updates)
        for name, tensor in self.tensors.items():
            tensor[run].copy_(self.ring[index]["tensors"][name][run])
        clock.go_back(run, self.ring[index]["position"])
        for later in self.ring[index + 1 :]:
            later["usable_r"][run] = False

    @torch.no_grad()
    def restore_part(self, run: int, clock: Clock, updates: float, *, weights: bool) -> int:
        """As ``go_back``, but of one run's weights alone, or of its optimizer's state and age alone; the rest goes on.

        Returns:
            Updates between that snapshot and now.
        """
        snapshot = self.ring[self._newest(run, clock, updates)]
        for name, tensor in self.tensors.items():
            if name.startswith("weight.") == weights:
                tensor[run].copy_(snapshot["tensors"][name][run])
        if not weights:
            clock.age_r[run] = snapshot["position"]["age_r"][run]
        return int(clock.step_r[run]) - int(snapshot["position"]["step_r"][run])

    def _newest(self, run: int, clock: Clock, updates: float) -> int:
        """Index of the newest snapshot of a run that is at least so many updates back, or else of its oldest."""
        usable = [index for index, snapshot in enumerate(self.ring) if snapshot["usable_r"][run]]
        limit = clock.step_r[run] - updates
        return max((i for i in usable if self.ring[i]["position"]["step_r"][run] <= limit), default=usable[0])
