"""Restarts by hand, read from the records: the step of each restart, and its changes.

A restart log (config group ``ledger``) lists the steps at which a run is restarted with other settings.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from lab.analysis.curves import setting_name

LEDGER, ENTRIES, NONE, CHAIN = "ledger", "ledger.entries", "none", "optimizer.chain"
# Settings of the optimizer that are shown as multiples of those at the start; and names of settings for readers.
RELATIVE = ("lr", "weight_decay")
TIMES = "\N{MULTIPLICATION SIGN}"
SAME = "same links"
NAMES = {"lr": "LR", "weight_decay": "decay"}


class RecordedRestart(NamedTuple):
    """One restart: the step before which it came, and its changes in words."""

    step: int
    changes: str


def restarts_of(card: Mapping[Hashable, Any]) -> list[RecordedRestart]:
    """The restarts in the restart log of a run, in the order of their steps."""
    entries = card.get(ENTRIES)
    if not isinstance(entries, str):
        return []
    return [_restart(entry, card) for entry in re.split(r"\+(?=\d+: )", entries)]


def _restart(entry: str, card: Mapping[Hashable, Any]) -> RecordedRestart:
    step, _, changes = entry.partition(": ")
    return RecordedRestart(int(step), ", ".join(_change(change, card) for change in changes.split()))


def _change(change: str, card: Mapping[Hashable, Any]) -> str:
    key, _, value = change.partition("=")
    if key == CHAIN:
        return _links(str(card.get(CHAIN, "")).split("+"), value.split(","))
    end = key.removeprefix("optimizer.")
    name = NAMES.get(end, setting_name(end, ()))
    first = card.get(key)
    return (
        f"{name} {TIMES}{float(f'{float(value) / float(first):.3g}'):g}"
        if end in RELATIVE and first
        else f"{name} {value}"
    )


def _links(first: Sequence[str], links: Sequence[str]) -> str:
    """The links that a chain adds to the first chain of the run, and those that it drops: ``sgd for adam``."""
    new, gone = ([name for name in one if name not in other] for one, other in ((links, first), (first, links)))
    words = [" and ".join(setting_name(name, ()) for name in names) for names in (new, gone)]
    return " for ".join(words) if all(words) else f"with {words[0]}" if new else f"without {words[1]}" if gone else SAME
