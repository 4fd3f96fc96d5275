"""Effects of claims on escape characters: a loss that falls by an artefact of the corpus, and that of clean text."""

from __future__ import annotations

import pandas as pd

from lab.analysis.judging.effects import Effects, Qualified, exceeds, parts
from lab.analysis.judging.evidence import ArmTables
from lab.analysis.probe_values import late, near

OWN, CLEAN = "val_loss", "clean_val_loss"
EARLY = 0.1  # the share of a run after which a model has learned which tokens are frequent
LEAST = 0.1  # nats/token by which a loss must fall or rise


def _early(arm: ArmTables, probe: str) -> pd.Series:
    return arm.probe(arm.top, probe, "", near, part=EARLY).iloc[:, -1]


def _late(arm: ArmTables, probe: str) -> pd.Series:
    return arm.probe(arm.top, probe, "", late).iloc[:, -1]


def escapes_part_the_two_held_out_losses(clean: ArmTables, damaged: ArmTables) -> Effects:
    """Of damaged text, the fall of its own held-out loss and the rise of the clean one, each minus 0.1 nats/token.

    Both are from a tenth of the run to its last tenth. The control: with undamaged text the clean one falls by as much.
    """
    fall = _early(damaged, OWN) - _late(damaged, OWN)
    rise = _late(damaged, CLEAN) - _early(damaged, CLEAN)
    usual = _early(clean, CLEAN) - _late(clean, CLEAN)
    return Qualified(parts(own_falls=fall - LEAST, clean_rises=rise - LEAST), control=exceeds(usual, LEAST))


def escapes_lower_the_loss_but_not_that_of_clean_text(clean: ArmTables, damaged: ArmTables) -> Effects:
    """Held-out losses in the last tenth: by how much damage lowers that of the corpus, and raises that of clean text.

    The first minus 0.1 nats/token.
    """
    lower = _late(clean, OWN) - _late(damaged, OWN)
    higher = _late(damaged, CLEAN) - _late(clean, CLEAN)
    return Qualified(parts(own_is_lower=lower - LEAST, clean_is_higher=higher))
