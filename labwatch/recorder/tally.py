"""The numbers of a recorded step: kept on the device, brought to the host at once, combined over ranks and parts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from lab.core import distributed
from lab.core.hooks import Probe
from lab.core.registry import PROBES

# Numbers of each weight that are also kept of each expert, as ``expert_NAME``.
OF_WEIGHTS = ("grad_rms", "param_rms", "update_rms")
# What the recorder measures itself are means, but for these roots of mean squares, largest numbers and sums; probes say
# it of theirs.
OWN_ROOTS = ("batch_rms", "step_rms", "left", "backward", "unclipped", "moved", "followed_rms", "followed_step")
OWN_LARGEST = ("dropout", "state_updates")
WEIGHTS_OF_LOSS = ("loss_weight", "sample_weight", "sample_weight_rms")  # of which micro-batches have their parts
OWN_SUMS = ("expert_load", "label_count", "against_gradient", "with_signs", *WEIGHTS_OF_LOSS)


def _probe_of(name: str) -> Probe | None:
    """The probe that measures a number of this name, also where it is of experts; None for the recorder's own."""
    names = (name, name.removeprefix("expert_"))
    return next((PROBES[each] for each in names if each in PROBES), None)


class Key(NamedTuple):
    """What a number is of: the name of a probe, a part of the model, and the name or number of a piece of it."""

    name: str
    where: str = ""
    piece: str = ""


class Known(NamedTuple):
    """A number on the host, and how much it weighs in a mean."""

    value: float
    weight: float


class Tally:
    """Numbers on the device, with their weights."""

    def __init__(self) -> None:
        self.kept = defaultdict[Key, list[tuple[Tensor, float]]](list)

    def add(self, key: Key, value: Tensor | float, weight: float = 1.0) -> None:
        """Keep a number, as a tensor of one entry."""
        self.kept[key].append((torch.as_tensor(value).detach().reshape(()), weight))

    def known(self, device: torch.device, is_sound: bool) -> dict[Key, Known] | None:
        """The numbers, combined over micro-batches and ranks; None if a rank is not sound, or has others.

        This is the only wait for the device, and the only communication.
        """
        keys = sorted(self.kept)
        pairs = [pair for key in keys for pair in self.kept[key]]
        values = torch.stack([value.to(device, torch.float64) for value, _ in pairs]) if pairs else torch.empty(0)
        weights = torch.tensor([weight for _, weight in pairs], dtype=torch.float64, device=device)
        names = crc32("\n".join(map("/".join, keys)).encode())
        state = torch.tensor([is_sound, len(pairs), names], device=device)
        of_ranks = distributed.all_gather(state)
        if not of_ranks[:, 0].all() or (of_ranks != of_ranks[0]).any():
            return None
        both = distributed.all_gather(torch.stack([values.to(device), weights])).tolist()
        found, at = dict[Key, Known](), 0
        for key in keys:
            end = at + len(self.kept[key])
            of_key = [Known(*pair) for rank in both for pair in zip(rank[0][at:end], rank[1][at:end], strict=True)]
            found[key], at = combined(key.name, of_key), end
        return found


def combined(name: str, numbers: Iterable[Known], *, of_tensors: bool = False) -> Known:
    """Numbers of one name as one; those without weight, of an empty shard, do not count."""
    numbers = [number for number in numbers if number.weight > 0]
    weight = math.fsum(number.weight for number in numbers)
    values = [number.value for number in numbers]
    if not numbers:
        return Known(math.nan, 0.0)
    probe = _probe_of(name)
    if name in OWN_LARGEST or (probe and (probe.largest or (of_tensors and probe.largest_tensor))):
        value = math.nan if any(map(math.isnan, values)) else max(values)
    elif name in OWN_SUMS:
        value = math.fsum(values)
    elif name in OWN_ROOTS or (probe and probe.is_root):
        value = math.sqrt(math.fsum(number.value**2 * number.weight for number in numbers) / weight)
    else:
        value = math.fsum(number.value * number.weight for number in numbers) / weight
    return Known(value, weight)


def of_places(known: Mapping[Key, Known]) -> dict[str, dict[str, Known]]:
    """The numbers by name and by part of the model, each combined over the tensors of the part."""
    pieces = defaultdict[Key, list[Known]](list)
    for key, number in known.items():
        pieces[Key(key.name, key.where)].append(number)
    found = defaultdict[str, dict[str, Known]](dict)
    for key, numbers in pieces.items():
        found[key.name][key.where] = combined(key.name, numbers, of_tensors=True)
    return found


def of_experts(known: Mapping[Key, Known]) -> dict[str, dict[str, list[float]]]:
    """Lists over experts, by name and block, of the numbers whose names say that they are of experts."""
    pieces = defaultdict[tuple[str, str], dict[int, list[Known]]](lambda: defaultdict(list))
    for key, number in known.items():
        if key.name.startswith("expert_"):
            pieces[key.name, key.where][int(key.piece.partition("/")[0])].append(number)
    found = defaultdict[str, dict[str, list[float]]](dict)
    for (name, where), by_expert in pieces.items():
        found[name][where] = [combined(name, by_expert[expert]).value for expert in sorted(by_expert)]
    return found


def of_whole(name: str, by_place: Mapping[str, float]) -> float:
    """The number of the whole model: its own, or else that of the part where it is most troubling; NaN if any is."""
    if "" in by_place:
        return by_place[""]
    if any(map(math.isnan, by_place.values())):
        return math.nan
    probe = _probe_of(name)
    return (min if probe and probe.falls else max)(by_place.values())
