"""Gradients summed over the micro-batches of a step, and what their spread says of the gradient noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add as plus
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.core.axes import over, whole
from lab.core.hooks import announce
from lab.core.number_formats import rounded
from lab.core.registry import PROBES
from lab.training.config import RunConfig


class Accumulation(NamedTuple):
    """Sums over the micro-batches of a step, changed in place; a tree of tensors, as an engine takes it.

    Attributes:
        gradients: of the loss summed over targets, by weight ``[r ...]``.
        targets_r: number of targets that count.
        loss_r: loss summed over them, nats.
        squares: sum of squared norms of the micro-batches' mean gradients, by group of weights ``[r]``; empty unless
            noise is measured.
        noise: sums over the steps since the last measurement: ``trace.GROUP``, ``squared_norm.GROUP``, ``steps``.
        smoothed: of an adaptive batch, exponential averages over steps of ``trace`` and ``squared_norm`` of all
            weights, from 0 on, where only the ratio means something; empty for any other schedule.
    """

    gradients: dict[str, Tensor]
    targets_r: Tensor
    loss_r: Tensor
    squares: dict[str, Tensor]
    noise: dict[str, Tensor]
    smoothed: dict[str, Tensor]


class SumInFP16(NamedTuple):
    """How gradients are summed in emulated fp16, each micro-batch in the place of a worker that sends its own.

    Attributes:
        scale_r: the loss scale, with which they are summed.
        targets: of a micro-batch in which every target counts.
        divisor: number by which each gradient is divided before the sum; the rest of their number follows after it
            (Zhang et al. 2022, arXiv 2205.01068, sec. 2.2).
    """

    scale_r: Tensor
    targets: int
    divisor: int

    def workers(self, targets_r: Tensor) -> Tensor:
        """How many gradients ``[r]`` of full micro-batches a sum over so many targets has, over the divisor."""
        return targets_r / (self.targets * self.divisor)


def sum_in_fp16(config: RunConfig, loss_scale: Mapping[str, Tensor]) -> SumInFP16 | None:
    """How the gradients of a fleet's micro-batches are summed, with the state of its loss scale; None is in fp32."""
    if config.gradient_sum == "fp32":
        return None
    divisor = divisor_before(int(config.micro_batches[0])) if config.gradient_sum == "fp16_divided" else 1
    return SumInFP16(loss_scale["scale"], config.rows * config.seq_len, divisor)


def divisor_before(workers: int) -> int:
    """The divisor of gradients ahead of a sum over workers: a power of two, about the root of their number (FSDP)."""
    factor = 1
    while workers % factor == 0 and workers / factor > factor:
        factor *= 2
    return factor


def group_of(weight: str) -> str:
    """The group that a weight belongs to: ``block0`` of ``block0.mlp.up``."""
    return weight.partition(".")[0]


def begin(weights: Mapping[str, Tensor], *, with_noise: bool, adaptive: bool = False) -> Accumulation:
    """Sums of nothing."""
    first = next(iter(weights.values()))
    zero_r = torch.zeros(len(first), dtype=first.dtype, device=first.device)  # of a sharded weight each rank holds all
    groups = dict.fromkeys(map(group_of, weights)) if with_noise else {}
    names = [f"{part}.{group}" for part in ("trace", "squared_norm") for group in groups] + ["steps"] * with_noise
    return Accumulation(
        {name: torch.zeros_like(weight) for name, weight in weights.items()},
        zero_r.clone(),
        zero_r.clone(),
        {group: zero_r.clone() for group in groups},
        {name: zero_r.clone() for name in names},
        {name: zero_r.clone() for name in ("trace", "squared_norm") if adaptive},
    )


def clear(sums: Accumulation) -> None:
    """Forget the micro-batches of the last step."""
    for tensor in (*sums.gradients.values(), sums.targets_r, sums.loss_r, *sums.squares.values()):
        tensor.zero_()


@torch.no_grad()
def add(
    sums: Accumulation,
    gradients: Mapping[str, Tensor],
    loss_r: Tensor,
    targets_r: Tensor,
    fp16: SumInFP16 | None = None,
) -> None:
    """Add a micro-batch: gradients and loss are means over its ``targets_r`` targets, and nothing if it has none."""
    weight_r = targets_r if fp16 is None else fp16.workers(targets_r) * fp16.scale_r
    for name, gradient in gradients.items():
        total = sums.gradients[name]
        counts: Any = over(targets_r, gradient)
        weighed = torch.where(counts > 0, gradient * over(weight_r, gradient), 0.0)
        if fp16 is None:
            total.add_(weighed)
        else:
            total.copy_(rounded(total + rounded(weighed, torch.float16), torch.float16))
    sums.loss_r.add_(torch.where(targets_r > 0, loss_r * targets_r, 0.0))
    sums.targets_r.add_(targets_r)
    for group, square_r in _squares(gradients, sums.squares).items():
        sums.squares[group].add_(square_r)


def mean(sums: Accumulation, fp16: SumInFP16 | None = None) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients and loss ``[r]`` of the whole batch: means over its targets, whichever micro-batch they stood in."""
    weight_r = sums.targets_r if fp16 is None else fp16.workers(sums.targets_r)
    gradients = {name: total / over(weight_r, total) for name, total in sums.gradients.items()}
    if fp16 is not None:
        scaled = {name: rounded(gradient, torch.float16) for name, gradient in gradients.items()}
        gradients = {name: gradient / over(fp16.scale_r, gradient) for name, gradient in scaled.items()}
    return gradients, sums.loss_r / sums.targets_r


@torch.no_grad()
def add_noise(
    sums: Accumulation, gradients: Mapping[str, Tensor], micro_batch: int, count: Tensor, memory: float = 1.0
) -> None:
    """Add this step's unbiased estimates of trace and squared norm (McCandlish et al. 2018, app. A.1); announce all.

    A step of one micro-batch says nothing of the noise and does not count.

    Args:
        sums: of this step.
        gradients: of the whole batch.
        micro_batch: sequences in a micro-batch.
        count: number of micro-batches, a tensor without axes.
        memory: steps over which an adaptive batch averages.
    """
    several = count > 1
    others = torch.where(several, count - 1, 1)
    step_trace_r, step_squared_r = torch.zeros_like(sums.loss_r), torch.zeros_like(sums.loss_r)
    for group, big_r in _squares(gradients, sums.squares).items():
        small_r = sums.squares[group] / count
        trace_r = (small_r - big_r) * micro_batch * count / others
        squared_norm_r = (count * big_r - small_r) / others
        sums.noise[f"trace.{group}"].add_(torch.where(several, trace_r, 0.0))
        sums.noise[f"squared_norm.{group}"].add_(torch.where(several, squared_norm_r, 0.0))
        step_trace_r, step_squared_r = step_trace_r + trace_r, step_squared_r + squared_norm_r
    latest = {"trace": step_trace_r, "squared_norm": step_squared_r}
    for name, average_r in sums.smoothed.items():
        average_r.copy_(torch.where(several, average_r + (latest[name] - average_r) / memory, average_r))
    if sums.noise:
        sums.noise["steps"].add_(several)
        announce("noise", "", sums.noise)


def clear_noise(sums: Accumulation) -> None:
    """Begin a new interval of measurement."""
    for sum_r in sums.noise.values():
        sum_r.zero_()


def _squares(gradients: Mapping[str, Tensor], groups: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Squared norm ``[r]`` of each of the groups."""
    squares = {group: torch.zeros_like(zero_r) for group, zero_r in groups.items()}
    for name, gradient in gradients.items():
        if group_of(name) in squares:
            squares[group_of(name)] = squares[group_of(name)] + whole(gradient.square().flatten(1).sum(1))
    return squares


def combine(probe: str, values: Sequence[Tensor]) -> Tensor:
    """Combine what a probe measured in each micro-batch ``[r]``."""
    if PROBES[probe].largest:
        return reduce(torch.maximum, values)
    # one after the other: a reduction over stacked numbers adds in another order for another number of runs
    return reduce(plus, values) / len(values)
