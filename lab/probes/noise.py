"""Probes of the gradient noise scale, of the batch, and of the sources of its windows."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lab.probes.listener import probe


@probe(event="noise")
def noise_scale(noise: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Trace of the gradient's covariance and squared norm of the true gradient, of each group of weights.

    Unbiased, from all micro-batches of the steps since the last measurement (McCandlish et al. 2018, app. A.1).
    The noise scale is the ratio of their averages; its unit is a sequence.
    """
    steps_r = noise["steps"]
    return {name: sum_r / steps_r for name, sum_r in noise.items() if name != "steps"}


@probe(event="batch")
def batch(sequences_r: Tensor, tokens_r: Tensor) -> dict[str, Tensor]:
    """Sequences of the update, and tokens seen before it."""
    return {"sequences": sequences_r, "tokens": tokens_r}


@probe(event="sources")
def source_rows(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Windows of the update that are of each source of a mixture, by its name; of other data there is none."""
    return rows
