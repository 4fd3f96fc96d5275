"""The figure of two held-out losses: that of a corpus with an artefact, and that of clean text."""

from __future__ import annotations

import pandas as pd

from lab.analysis.drawing.registry import figure
from lab.analysis.drawing.series import ProbeSeries, over_steps
from lab.analysis.rendering.layout import Sheet
from lab.records.store import Records
from lab.studies.spikes.escape_effects import CLEAN, OWN


@figure("two_held_out_losses")
def two_held_out_losses(records: Records, runs: pd.DataFrame) -> Sheet:
    """Loss on clean held-out text against step, with the loss on held-out text of the corpus as it is below it.

    Where the second falls and the first does not, the model learns an artefact of the corpus. Lines are means over
    seeds, one per learning rate.
    """
    clean = ProbeSeries(CLEAN, "", "clean text\n(nats/token)")
    return over_steps(records, runs, [clean, ProbeSeries(OWN, "", "own text\n(nats/token)", "loss")])
