"""Remedies for loss spikes of a run's own: how many spikes follow the first, which of them come back, and costs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lab.analysis.events.costs import NONE
from lab.analysis.events.detectors import loss_spikes
from lab.analysis.events.scores import PER_STEPS
from lab.analysis.probe_values import training_losses
from lab.core.detectors import MERGE
from lab.records.store import Records
from lab.studies.spikes.effects import RESPONSES

SHRINK = "intervention.embedding_gradient_shrink"
# What a remedy is called, by its name among ``RESPONSES``.
NAMES = {
    "none": "no remedy",
    "same_batches": "go back only",
    "skip": "go back and skip",
    "skip_and_lower": "go back, skip, lower LR",
    "lower": "lower LR",
    "restart": "go back, lower LR",
    "restart_newest": "newest state, lower LR",
}
NO_REMEDY, SHRUNK_NAME = NAMES["none"], "shrunk embedding gradient"
NUMBERS = ("steps", "spikes", "rewound_steps", "final_val_loss")
COLUMNS = ("more", "rate", "overall", "answered", "returned", "lost", "final")

Event = tuple[int, int, str, float]  # step, batch, kind and value


def remedy_traits(records: Records) -> pd.DataFrame:
    """The loss spikes of each run without planted bad data, indexed by its id.

    Spikes are those that training met: one that comes back after a run went back counts again.  Runs that answer none
    have no events, so theirs are found in the training loss, where it was measured at every step.

    Returns:
        Columns ``more``, spikes after the first, and ``rate``, these in 1,000 of the steps that follow it, both 0
        without a spike; ``overall``, spikes in 1,000 steps of the run; ``answered``, how often it went back, and
        ``returned``, after how many of these a spike began up to 20 updates after the step from which it went back;
        ``lost``, updates gone back, and batches that the run which was kept passed over; ``final``, the final held-out
        loss, nats/token.
    """
    cards = _own(records)
    events = _happened(records, cards[cards["spikes"].notna()])
    losses = training_losses(records)
    rows: dict[str, tuple[float, ...]] = {}
    for card in cards.to_dict("records"):
        run = str(card["id"])
        if run in events:
            rows[run] = _traits(card, events[run])
        elif run in losses:
            rows[run] = _traits(card, [(span.first, span.first, "spike", 0.0) for span in loss_spikes(losses[run])])
    return pd.DataFrame.from_dict(rows, orient="index", columns=list(COLUMNS), dtype=float)


def remedy_names(cards: Iterable[Mapping[Hashable, Any]]) -> dict[str, str]:
    """The remedy of each of these runs by its id; none for other responses."""
    return {str(card["id"]): name for card in cards if (name := _name(card))}


def _name(card: Mapping[Hashable, Any]) -> str:
    settings = {str(key): value for key, value in card.items()}
    if SHRINK.partition(".")[2] in str(settings["intervention"]).split("+"):
        return SHRUNK_NAME if settings.get("response") == NONE else ""
    named = (name for key, name in NAMES.items() if RESPONSES[key].of(settings.get("burst"))(settings))
    return next(named, "")


def _own(records: Records) -> pd.DataFrame:
    """The cards of finished and diverged runs in which nothing was planted or scheduled."""
    cards = records.runs.reindex(columns=["id", "burst", "ledger", "status", *NUMBERS]).astype(
        dict.fromkeys(NUMBERS, float)
    )
    return cards[(cards[["burst", "ledger"]].fillna(NONE) == NONE).all(axis=1) & (cards["status"] != "failed")]


def _happened(records: Records, cards: pd.DataFrame) -> dict[str, list[Event]]:
    """The events of these runs in the order in which they happened."""
    happened: dict[str, list[Event]] = {str(run): [] for run in cards["id"]}
    chosen = records.events[records.events["id"].isin(list(happened))]
    columns = [chosen[key] for key in ("id", "step", "batch", "kind", "value")]
    for run, step, batch, kind, value in zip(*columns, strict=True):
        happened[str(run)].append((int(step), int(batch), str(kind), float(value)))
    return happened


def _traits(card: Mapping[Hashable, Any], events: Sequence[Event]) -> tuple[float, ...]:
    steps = float(card["steps"])
    spikes = [step for step, _, kind, _ in events if kind == "spike"]
    more = max(0, len(spikes) - 1)
    rate = PER_STEPS * more / (steps - spikes[0]) if spikes else 0.0
    returned = [_comes_back(events[place:]) for place, (_, _, kind, _) in enumerate(events) if kind == "rewind"]
    last_step, last_batch = events[-1][:2] if events else (0, 0)
    lost = np.nansum([card["rewound_steps"], last_batch - last_step])
    overall = PER_STEPS * len(spikes) / steps
    return more, rate, overall, len(returned), sum(returned), float(lost), float(card["final_val_loss"])


def _comes_back(events: Sequence[Event]) -> bool:
    """Whether a spike begins, after the rewind that is the first event, up to 20 updates after where it came from."""
    start, _, _, back = events[0]
    later = next((step for step, _, kind, _ in events[1:] if kind == "spike"), math.inf)
    return later - start <= back - 1 + MERGE
