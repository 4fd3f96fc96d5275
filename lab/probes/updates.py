"""Probes of the backward pass and the update.

A norm is one number per run, ``[r]``; an RMS or a ratio is one per weight tensor and run, by the tensor's name.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lab.core.axes import per_run_norm, per_run_rms
from lab.probes.listener import probe


def _rms_of_each(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: per_run_rms(tensor) for name, tensor in tensors.items()}


@probe(hears="gradients")
def grad_norm(gradients: Mapping[str, Tensor]) -> Tensor:
    """Global norm of the gradient before clipping."""
    return per_run_norm(gradients.values())


@probe(hears="clipped_gradients")
def grad_norm_clipped(gradients: Mapping[str, Tensor]) -> Tensor:
    """Global norm of the gradient after clipping."""
    return per_run_norm(gradients.values())


@probe(hears="clipped_gradients")
def grad_rms(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradient RMS per tensor, after clipping (Wortsman et al. 2023, fig. 11)."""
    return _rms_of_each(gradients)


@probe(hears="direction")
def update_rms(directions: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Update RMS per tensor, before the learning rate and without decay (Wortsman et al. 2023, fig. 13)."""
    return _rms_of_each(directions)


@probe(hears="loss_scale")
def loss_scale(scale_r: Tensor) -> Tensor:
    """Factor of the loss in this update's backward pass."""
    return scale_r


@probe(hears="parameters")
def param_rms(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameter RMS per tensor, before the update."""
    return _rms_of_each(weights)


@probe(hears="parameters")
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


@probe(hears="adam")
def eps_ratio(gradients: Mapping[str, Tensor], eps: Tensor | float) -> dict[str, Tensor]:
    """Adam's epsilon over gradient RMS per tensor; above 1 the update shrinks (Wortsman et al. 2023, sec. 3.4)."""
    return {name: eps / rms for name, rms in _rms_of_each(gradients).items()}
