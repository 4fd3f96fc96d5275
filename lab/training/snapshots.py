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
        usable = [index for index, snapshot in enumerate(self.ring) if snapshot["usable_r"][run]]
        limit = clock.step_r[run] - updates
        index = max((i for i in usable if self.ring[i]["position"]["step_r"][run] <= limit), default=usable[0])
        for name, tensor in self.tensors.items():
            tensor[run].copy_(self.ring[index]["tensors"][name][run])
        clock.go_back(run, self.ring[index]["position"])
        for later in self.ring[index + 1 :]:
            later["usable_r"][run] = False
