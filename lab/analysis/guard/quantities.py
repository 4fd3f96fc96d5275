"""The quantities that a check compares, and their values per curve and seed."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.guard.baseline import PROBES, Baseline, whole_seeds
from lab.analysis.sensitivity import capped, per_seed
from lab.analysis.statistics import FEWEST_SEEDS
from lab.core.errors import RequestError

GRID_MARGIN = 1.0  # in steps of the learning-rate grid
PROBE_MARGIN = math.log10(2)  # in decades: the value of a probe may double
HEADROOM_MARGIN = math.log10(2)  # it may halve
NATS, STEPS, DECADES, TENFOLD = "nats/token", "grid steps", "decades", "factors of ten"


class GuardedQuantity(NamedTuple):
    """A quantity that is compared.

    Attributes:
        unit: the unit of its change.
        worse: the sign of a change that is worse; 0 if either is.
        rate: the column of the learning rate whose place in the grid it is; empty for other quantities.
    """

    name: str
    unit: str
    worse: int
    rate: str = ""

    def mean(self, seeds: pd.DataFrame, column: str) -> float:
        """Its mean over the seeds of a table of ``measured``, which is geometric for learning rates.

        A seed without such a learning rate counts as infinite.
        """
        if self.rate:
            return float(np.exp(np.log(seeds[self.rate].fillna(np.inf)).mean()))
        return float(seeds[column].mean())


QUANTITIES = {
    "total": GuardedQuantity("LR sensitivity", NATS, +1),
    "below": GuardedQuantity("its under-training part", NATS, +1),
    "above": GuardedQuantity("its instability part", NATS, +1),
    "best": GuardedQuantity("best loss", NATS, +1),
    "best_lr_index": GuardedQuantity("best learning rate", STEPS, 0, "best_lr"),
    "unstable_lr_index": GuardedQuantity("smallest unstable learning rate", STEPS, -1, "eta_div"),
    "loss_at_init": GuardedQuantity("loss at initialization", NATS, 0),
    "logit_growth": GuardedQuantity("growth of the attention logits", DECADES, +1),
    "eps_ratio": GuardedQuantity("Adam's epsilon over the gradients' RMS", DECADES, +1),
    "grad_norm_clipped": GuardedQuantity("largest gradient norm after clipping", DECADES, +1),
    "param_rms": GuardedQuantity("RMS of the weights", DECADES, 0),
    "log_z_square": GuardedQuantity("mean square of log Z", DECADES, +1),
}
# It is compared apart, since its margin depends on whether the recipe's own learning rate has changed.
HEADROOM = GuardedQuantity("headroom of the learning rate", TENFOLD, -1, "headroom")
LOG_HEADROOM, RECIPE_LR, STEP_OF_GRID = "log_headroom", "recipe_lr", "step_of_grid"
RATES = [quantity.rate for quantity in (*QUANTITIES.values(), HEADROOM) if quantity.rate]
# The reasons why a quantity may be missing from a comparison over a ``{window}``.
MISSING_BECAUSE = {
    "total": "fewer than two learning rates lie from {window}",
    "unstable_lr_index": "no run ended better than the bigram model on one of the sides",
    "best_lr_index": f"fewer than {FEWEST_SEEDS} seeds have a run that did not diverge on one of the sides",
    **{column: f"{probe} was recorded on one side only" for column, probe in PROBES.items()},
}


def margins(before: pd.DataFrame, margin: float) -> dict[str, float]:
    """The largest change allowed, by unit; ``margin`` is a share of the best loss of the table ``before``."""
    return {NATS: margin * float(before["best"].mean()), STEPS: GRID_MARGIN, DECADES: PROBE_MARGIN}


def measured(baseline: Baseline) -> dict[int, pd.DataFrame]:
    """Tables by number of the curve, with a row per complete seed, and a column per key of ``QUANTITIES`` and rate.

    Other columns are ``RECIPE_LR``; ``LOG_HEADROOM``, log10 of the smallest unstable learning rate over it, or of the
    next one beyond the grid if none was unstable; and ``STEP_OF_GRID``, log10 of the largest ratio in the grid.

    Raises:
        RequestError: no seed ran at every learning rate of its curve.
    """
    runs = whole_seeds(baseline.runs).assign(capped=capped)
    if runs.empty:
        raise RequestError(f"no seed of {baseline.source} ran at every learning rate")
    seeds = per_seed(runs, *baseline.window).set_index(["curve", "seed"])
    runs_by_seed = runs.groupby(["curve", "seed"])
    seeds["best"] = runs_by_seed["capped"].min()
    seeds["untrained"] = seeds["best"] > runs_by_seed["loss_bigram"].min()
    seeds = seeds.join(runs_by_seed[["loss_at_init", *PROBES]].mean())
    tables = {}
    for number, table in seeds.groupby("curve"):
        grid = sorted(set(runs.loc[runs["curve"] == number, "lr"]))
        index = {lr: float(n) for n, lr in enumerate(grid, 1)}
        table["best_lr_index"] = table["best_lr"].map(index)
        table["unstable_lr_index"] = table["eta_div"].map(index).fillna(len(grid) + 1.0).mask(table["untrained"])
        steps = np.diff(np.log10(grid)) if len(grid) > 1 else [math.nan]
        table[RECIPE_LR], table[STEP_OF_GRID] = baseline.recipe_lrs.get(int(str(number)), math.nan), max(steps)
        table["headroom"] = table["eta_div"] / table[RECIPE_LR]
        unstable = table["eta_div"].fillna(grid[-1] * 10 ** steps[-1]).mask(table["untrained"])
        table[LOG_HEADROOM] = np.log10(unstable / table[RECIPE_LR])
        others = [RECIPE_LR, LOG_HEADROOM, STEP_OF_GRID]
        tables[int(str(number))] = table.droplevel("curve")[[*QUANTITIES, *RATES, *others]]
    return tables
