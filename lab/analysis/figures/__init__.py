"""Figures of the report, each registered under the name of its file."""

from lab.analysis.figures import (  # noqa: F401  (these fill the registry)
    arms,
    batches,
    bursts,
    detectors,
    ledgers,
    losses,
    probes,
    ramps,
    rounding,
    spikes,
    steps,
    updates,
)
from lab.analysis.figures.registry import FIGURES

__all__ = ["FIGURES"]
