"""A probe of architectures: how far weights have moved."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lab.core.axes import per_run_norm
from lab.probes.listener import probe


@probe(event="initial_parameters")
def distance_from_init(weights: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Distance of each tensor from its initial value, over the norm of that value, after the update.

    Infinite for a tensor that began at zero and has moved, NaN while it has not.
    """
    distances = {name: per_run_norm([weight - initial[name]]) for name, weight in weights.items()}
    return {name: distance_r / per_run_norm([initial[name]]) for name, distance_r in distances.items()}
