"""Which setting makes the cliff: a fractional factorial of eight settings, with a ladder of learning rates in each row.

The design has resolution IV: of the fifteen contrasts of its sixteen rows, eight are the effects of one setting each,
and seven are mixtures of effects that two settings have only together. These seven are what single settings leave
unexplained, and tell the error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.crossings import failing
from lab.analysis.sensitivity import LOST, capped
from lab.analysis.statistics import Interval
from studies.claims.curve_summaries import steepness
from studies.claims.statistics import effects_of_levels


class Factor(NamedTuple):
    """A factor of the screen: its column in the records, and how its two levels are called."""

    column: str
    low: str
    high: str


FACTORS = {
    "depth": Factor("model.depth", "3", "9 blocks"),
    "width": Factor("model.width", "32", "64"),
    "steps": Factor("steps", "200", "800"),
    "context": Factor("seq_len", "32", "128 tokens"),
    "vocabulary": Factor("data.vocabulary", "256 bytes", "2,048 tokens"),
    "initial values": Factor("small", "by width", "std 0.02"),
    "warm-up": Factor("schedule.warmup", "5 %", "40 %"),
    "precision": Factor("bf16", "fp32", "bf16"),
}
RESPONSES = {
    "steepness": "steepest rise (nats per 0.15 decades)",
    "share": "the same, as a share of the way to a unigram model",
    "headroom": f"from the best rate to one that costs {LOST:g} nats (decades)",
}


def design_rows(runs: pd.DataFrame, unigram: Mapping[int, float]) -> pd.DataFrame:
    """A row for each row of the design: its settings at -1 or 1, and ``RESPONSES``, with the best rate and its loss.

    A run of Marin's that diverged ended about where a unigram model is, so a small vocabulary leaves less room to fall.
    The headroom is interpolated; where no rate costs so much, it leads to one step of the ladder beyond its end.

    Args:
        runs: run cards of the screen.
        unigram: the loss of a unigram model of the text, nats per token, by the size of the vocabulary.
    """
    runs = runs.assign(
        small=runs["intervention"].str.contains("small_init").astype(float),
        bf16=(runs["precision"] == "bf16").astype(float),
        loss=capped(runs.rename(columns={"final_val_loss": "loss"})),
    )
    columns = [factor.column for factor in FACTORS.values()]
    rows = []
    for levels, own in runs.groupby(columns):
        room = unigram[int(own["data.vocabulary"].iloc[0])] - own["loss"].min()
        own = own.sort_values("optimizer.lr")
        lr, loss = own["optimizer.lr"].to_numpy(float), own["loss"].to_numpy(float)
        rows.append(
            {
                **dict(zip(FACTORS, np.array(levels, float), strict=True)),
                "best_lr": lr[loss.argmin()],
                "best_loss": loss.min(),
                "steepness": steepness(lr, loss),
                "share": steepness(lr, loss) / room,
                "headroom": _headroom(lr, loss),
            }
        )
    table = pd.DataFrame(rows)
    for name in FACTORS:
        middle = (table[name].min() + table[name].max()) / 2
        table[name] = np.sign(table[name] - middle)
    return table


def _headroom(lr: np.ndarray, loss: np.ndarray) -> float:
    """Decades from the best rate to that which costs ``LOST``, interpolated in log."""
    log = np.log10(lr)
    return float(failing(lr, loss, LOST).log_or_beyond(log[-1] - log[-2]) - log[loss.argmin()])


def effects(rows: pd.DataFrame, response: str) -> dict[str, Interval]:
    """By how much each setting's high level moves a response, with 95 % intervals, see ``effects_of_levels``.

    There are seven degrees of freedom if all rows are there.
    """
    moved = effects_of_levels({name: rows[name] for name in FACTORS}, rows[response])
    return {name: effect._replace(n=len(rows)) for name, effect in moved.items()}
