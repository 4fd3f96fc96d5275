"""A response within an update: leaving it out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lab.core.axes import over
from lab.core.registry import RESPONSES
from lab.core.schema import PerRun, bounded
from lab.responses.response import Gate, Response


@RESPONSES.register("skip_update")
@dataclass(frozen=True)
class SkipUpdate(Response):
    """Leave out the update of a batch whose gradient norm is too large or not finite (OPT-175B, run 11.6).

    Weights, moments and their age stay as they are, and the batch is lost.

    Attributes:
        norm: largest norm of a gradient, before clipping.
        start: updates before any is left out, since norms are large at initialization.
    """

    norm: PerRun = bounded(1.0, above=0)
    start: int = bounded(50, at_least=0)

    def gate(self, step: Tensor, loss_r: Tensor, norm_r: Tensor, usual_loss_r: Tensor) -> Gate:
        """Keep updates up to the norm; a norm that is not a number is none of them."""
        return Gate(keep_r=(norm_r <= over(self.norm, norm_r)) | (step < self.start))
