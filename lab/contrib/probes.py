"""Probes that studies record: what updates and successive gradients have in common, precision, distances."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from lab.core.axes import over, per_run_dot, per_run_mean, per_run_norm
from lab.core.hooks import HeldOut
from lab.core.number_formats import E4M3, MX_BLOCK, joined, mx_blocks, split
from lab.probes.listener import probe, share

LARGE = 0.8  # of an entry of the update, whose size is about 1 at most once gradients agree for long


@probe(event="direction")
def update_large(directions: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Share of the entries of the update above 0.8, before the learning rate (Molybog et al. 2023, arXiv:2304.09871).

    Adam's entries are about normal with RMS 0.23 if successive gradients are independent, and near 1 if they agree.
    """
    return {name: share(direction.abs() > LARGE, direction) for name, direction in directions.items()}


@probe(event="direction")
def update_bimodality(directions: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Bimodality coefficient of the update's entries, (skewness^2 + 1) / kurtosis (Sarle; Molybog et al. 2023).

    A normal distribution has 1/3, a uniform one 5/9, two points 1.  It is no alarm by itself: with beta2 = 0.999,
    gradients whose correlation outlasts a hundred steps give an RMS near 1 and still a single mode.  Read it together
    with ``update_rms`` and ``update_large``.  A tensor of equal entries has none (NaN).
    """
    bimodality = dict[str, Tensor]()
    for name, direction in directions.items():
        centred_r = direction - over(per_run_mean(direction), direction)
        square_r, cube_r, fourth_r = (per_run_mean(centred_r**power) for power in (2, 3, 4))
        bimodality[name] = (cube_r.square() / square_r**3 + 1) * square_r.square() / fourth_r
    return bimodality


@probe(event="descent")
def update_descent_cosine(directions: Mapping[str, Tensor], held_out: HeldOut) -> dict[str, Tensor]:
    """Cosine of the update with the descent of the held-out loss, per tensor and of all weights together.

    1 where the update follows the steepest descent, 0 where it is uncorrelated with it (Molybog et al. 2023).  The
    update is taken before learning rate and decay, the gradient, with added terms of the loss, at the weights before
    the update, on the slice of held-out text of ``val_loss``.  That slice is small, so its noise brings the cosine
    nearer to zero, by a factor that does not depend on the update.
    """
    return _cosines(directions, held_out.gradients)


@probe(event="successive_gradients")
def grad_lag_cosine(gradients: Mapping[str, Tensor], previous: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cosine of the gradients of this step and the one before, per tensor and of all weights together.

    Each gradient is of its own batch at the weights of its own step, before clipping: the correlation in time of
    Molybog et al. 2023.  At fixed weights it would be about 1 / (1 + B_simple / B) for batches of B sequences and
    gradients of noise scale B_simple; steps that overshoot make it smaller, or negative.  The first step has none.
    """
    return _cosines(gradients, previous)


def _cosines(firsts: Mapping[str, Tensor], seconds: Mapping[str, Tensor]) -> dict[str, Tensor]:
    cosines = {name: _cosine([first], [seconds[name]]) for name, first in firsts.items()}
    return {**cosines, "": _cosine(list(firsts.values()), [seconds[name] for name in firsts])}


def _cosine(firsts_r: Collection[Tensor], seconds_r: Collection[Tensor]) -> Tensor:
    """Cosine ``[r]`` between two lists of tensors of a run, each taken together; NaN where one of them is zero."""
    return per_run_dot(firsts_r, seconds_r) / (per_run_norm(firsts_r) * per_run_norm(seconds_r))


@probe(event="sources")
def source_rows(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Windows of the update that are of each source of a mixture, by its name; of other data there is none."""
    return rows


@probe(event="gradients")
def zero_gradients(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Share of each tensor's gradient that is exactly zero when it reaches the optimizer.

    The embedding has zeros in any format: tokens that are not in the batch.
    """
    return {name: share(gradient == 0, gradient) for name, gradient in gradients.items()}


@probe(event="gains")
def gain_octave(gains: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Largest share of the gains of a norm that lie between one power of two and the next, of one sign."""
    return {
        name: _largest_share(torch.frexp(gain_r)[1] * gain_r.sign().to(torch.int32)) for name, gain_r in gains.items()
    }


@probe(event="gains")
def gain_code(gains: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Largest share of the gains of a norm that MXFP8 (E4M3, blocks of 32, floored scale) would round to one number.

    The same measure in every precision, whether the model rounds its gains or not (arXiv:2506.20752).
    """
    shares = dict[str, Tensor]()
    for name, gain_r in gains.items():
        kept_r, _ = mx_blocks(split(gain_r.float(), -1, MX_BLOCK), -1, E4M3)
        shares[name] = _largest_share(joined(kept_r, -1, gain_r.shape[-1]))
    return shares


def _largest_share(value_r: Tensor) -> Tensor:
    """Share of the entries of each run that have its most frequent value."""
    flat_rn = value_r.flatten(1)
    return per_run_mean((flat_rn == flat_rn.mode(1).values[:, None]).to(torch.float32))


@probe(event="initial_parameters")
def distance_from_init(weights: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Distance of each tensor from its initial value, over the norm of that value, after the update.

    Infinite for a tensor that began at zero and has moved, NaN while it has not.
    """
    distances = {name: per_run_norm([weight - initial[name]]) for name, weight in weights.items()}
    return {name: distance_r / per_run_norm([initial[name]]) for name, distance_r in distances.items()}


@probe(event="parameters")
def head_common_mode(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Share of the head's norm in its common mode, the mean over the vocabulary, which moves all logits alike.

    From 0 (the columns ``[d]`` of the head add up to zero) to 1 (all are equal), about 1/sqrt(vocabulary) at the start.
    A custom model has no head by this name.
    """
    if "head" not in weights:
        return {}
    head_rdv = weights["head"]
    common_rd = head_rdv.mean(-1) * head_rdv.shape[-1] ** 0.5
    return {"head": per_run_norm([common_rd]) / per_run_norm([head_rdv])}
