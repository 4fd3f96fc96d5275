"""An outline: everything that is known of one curve and seed at all its learning rates together."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.sensitivity import PARTS, regret, vertex

# They say nothing of a curve on which no learning rate beat the bigram model (Wortsman et al. 2023, app. B).
OF_A_CURVE = (*PARTS, "coupled", "log_best", "log_lost", "border")
COUPLED_WINDOWS = ((1e-4, 1e-1), (3e-4, 3e-1))


class Run(NamedTuple):
    """A run: its final loss, at most that at initialization, how far that is above the bigram model's, its fate."""

    id: str
    loss: float
    over_bigram: float
    lost: bool


class Outline(NamedTuple):
    """One curve and seed; ``runs`` by learning rate, rising.

    Attributes:
        alive: some final loss is a number.
        learned: some run beat the bigram model.
        known: ``best`` loss; ``total``, ``below``, ``above`` as in ``sensitivity.split``; ``coupled``, the smaller of S
            over the two windows that the paper uses for coupled decay (sec. 3.2.2); ``log_best``, log10 of the fine
            eta*; ``log_lost``, log10 of eta_div, one step above the grid where nothing is lost; ``border``, the middle
            between that and the learning rate below it.  What cannot be known is NaN.
    """

    curve: int
    size: int
    seed: str
    runs: dict[float, Run]
    alive: bool
    learned: bool
    known: dict[str, float]


def outlines(runs: pd.DataFrame) -> list[Outline]:
    """One for each curve and seed of ``runs``, a table as made by ``sensitivity.judge``."""
    rows: dict[tuple[int, str], list[Any]] = {}
    for row in runs.sort_values("lr").itertuples():
        rows.setdefault((row.curve, row.seed), []).append(row)  # type: ignore[arg-type]
    return [_outline(some) for some in rows.values()]


def _outline(rows: list[Any]) -> Outline:
    lr, loss = np.array([row.lr for row in rows]), np.array([row.capped for row in rows])
    runs = {row.lr: Run(row.id, row.capped, row.capped - row.loss_bigram, row.fate != "") for row in rows}
    alive = any(math.isfinite(row.loss) for row in rows)
    learned = bool(loss.min() < np.fmin(rows[0].loss_at_init, rows[0].loss_bigram))
    known = {"best": float(loss.min()) if alive else math.nan, **dict.fromkeys(OF_A_CURVE, math.nan)}
    if alive and learned:
        known |= regret(lr, loss)._asdict() | _stability(lr, [run.lost for run in runs.values()])
        known["coupled"] = min(regret(lr, loss, *window).total for window in COUPLED_WINDOWS)
        known["log_best"] = math.log10(vertex(lr, loss))
    return Outline(rows[0].curve, rows[0].size, rows[0].seed, runs, alive, learned, known)


def _stability(lr: np.ndarray, lost: list[bool]) -> dict[str, float]:
    """Log10 of the smallest lost learning rate, one step above the grid where none is, and the middle below it."""
    lrs = np.log10(lr)
    step = float(np.diff(lrs).min()) if len(lrs) > 1 else 0.5
    first = float(lrs[lost.index(True)]) if True in lost else float(lrs[-1]) + step
    return {"log_lost": first, "border": first - step / 2}
