"""How much sooner a planted loss spike ends with an arm of the board, as the study of spikes measured it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from lab.analysis.judging.evidence import Config, Evidence, MissingRunsError, read_evidence
from lab.analysis.judging.verdicts import effects_of
from lab.analysis.statistics import Interval
from lab.core.shipped import default_recipe, results
from lab.records import store
from lab.studies.claims import CLAIMS
from lab.studies.leaderboard.arms import ArmCard, arm_cards
from lab.studies.leaderboard.board import QK, Panel, Row, default_reference
from lab.studies.spikes.effects import USUAL, each_burst_with

CLAIM = "a_tight_clip_ends_the_spike_sooner"  # its effect is a difference of durations


@cache
def planted_durations(folder: Path) -> Mapping[str, Mapping[str, Interval]]:
    """Durations of planted spikes with an arm minus those with the recipe, in updates, by arm and by burst.

    They are the effect of the study's own claim on durations, on the arms that its sweep trained with the numbers of
    the board. Bursts are bad batches, and a spike ends when the held-out loss is back within 0.1 nats of the usual one.

    Args:
        folder: holds the results of that sweep; without them there are no arms.
    """
    folder /= CLAIMS[CLAIM].sweep
    records = store.find(folder) if folder.is_dir() else None
    if not records:
        return {}
    evidence = [read_evidence(folder, records)]
    return {name: found for name, card in arm_cards().items() if (found := _durations(card, evidence))}


def _durations(card: ArmCard, evidence: Sequence[Evidence]) -> dict[str, Interval]:
    """By burst; empty if the sweep did not train this arm, or if the recipe has it."""
    if f"intervention.{card.name}" in default_recipe():
        return {}
    change = _change(card)
    claim = CLAIMS[CLAIM]._replace(name="", arms=lambda group: each_burst_with(group, change, {}))
    try:
        _, effects = effects_of(claim, evidence)
    except MissingRunsError:
        return {}
    return dict(zip(effects.parts, effects.intervals(), strict=True))


def _change(card: ArmCard) -> Config:
    """The settings in which an arm differs from the recipe, including the settings of ``USUAL``."""
    if not card.is_optimizer:
        return {f"intervention.{card.name}": "on"}
    own = {key: card.defaults.get(key.partition(".")[2]) for key in USUAL if key.startswith("optimizer.")}
    return {**own, "optimizer.name": card.name}


def planted_of(panel: Panel, row: Row) -> Mapping[str, Interval]:
    """Durations of planted spikes with an arm, by burst; only beside the recipe with which they were measured."""
    is_recipe = panel.reference.interventions == default_reference().interventions | {QK}
    return planted_durations(results().resolve()).get(row.name, {}) if is_recipe and not row.pair else {}
