"""An outline: everything that is known of one curve and seed at all its learning rates together."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from lab.analysis.optimum import vertex
from lab.analysis.sensitivity import PARTS, regret

# They say nothing of a curve on which no learning rate beat the bigram model (Wortsman et al. 2023, app. B).
OF_A_CURVE = (*PARTS, "coupled", "log_best", "log_lost", "border")
COUPLED_WINDOWS = ((1e-4, 1e-1), (3e-4, 3e-1))


def outlines(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per curve and seed; what cannot be known is NaN.

    Args:
        runs: as made by ``sensitivity.judge``.

    Returns:
        ``curve``, ``size``, ``seed``; ``ran`` (its learning rates), ``alive`` (some loss is a number), ``learned``
        (some run beat the bigram model); ``best`` loss; ``total``, ``below``, ``above`` as in ``split``; ``coupled``,
        the smaller of S over two windows that the paper uses for coupled decay (sec. 3.2.2); ``log_best``, log10 of
        the fine eta*; ``log_lost``, log10 of eta_div, one step above the grid where nothing is lost; ``border``, the
        middle between that and the learning rate below it.
    """
    return pd.DataFrame([_outline(some) for _, some in runs.sort_values("lr").groupby(["curve", "seed"], sort=False)])


def _outline(runs: pd.DataFrame) -> dict[str, Any]:
    lr, loss = runs["lr"].to_numpy(), runs["capped"].to_numpy()
    alive = bool(np.isfinite(runs["loss"].to_numpy()).any())
    learned = bool(loss.min() < np.fmin(runs["loss_at_init"].max(), runs["loss_bigram"].min()))
    known: dict[str, Any] = {"best": loss.min() if alive else math.nan, **dict.fromkeys(OF_A_CURVE, math.nan)}
    if alive and learned:
        known |= regret(lr, loss)._asdict() | _stability(lr, runs["fate"].to_numpy() != "")
        known["coupled"] = min(regret(lr, loss, *window).total for window in COUPLED_WINDOWS)
        known["log_best"] = math.log10(vertex(lr, loss))
    where = {column: runs[column].iloc[0] for column in ("curve", "size", "seed")}
    return {**where, **known, "alive": alive, "learned": learned, "ran": tuple(lr)}


def _stability(lr: np.ndarray, lost: np.ndarray) -> dict[str, float]:
    """Log10 of the smallest lost learning rate, one step above the grid where none is, and the middle below it."""
    lrs, at = np.log10(lr), np.flatnonzero(lost)
    step = float(np.diff(lrs).min()) if len(lrs) > 1 else 0.5
    first = float(lrs[at[0]]) if len(at) else float(lrs[-1]) + step
    return {"log_lost": first, "border": first - step / 2}
