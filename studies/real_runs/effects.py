"""What the claims on public runs measure; ``claims.yaml`` has the claims.

Runs of one table are alike, and most were trained once. So an effect is first averaged over what is alike (the batches
of one size and budget, the budgets of one optimizer), and its interval is over these averages.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import pandas as pd

from lab.analysis.laws.brackets import PowerLaw, fit_power_law
from lab.analysis.sensitivity import LOST
from lab.analysis.statistics import Interval, student_t
from labwatch.events.logit_rounding import BF16, rounding_cost
from studies.claims.statistics import share_of_clusters
from studies.real_runs.curves import RealRuns, failing_brackets, read_real_runs

STEP_LAW, MARIN = "Step Law", "Marin"
SIZED = ["parameters", "tokens"]
STEP = math.log10(2) / 2  # decades between neighbouring rates of Step Law
read = read_real_runs  # what the claims are judged on


def of_step_law(runs: RealRuns) -> pd.DataFrame:
    """The curves of Step Law."""
    return runs.curves[runs.curves["source"] == STEP_LAW]


def mean_over_cells(runs: RealRuns, of: str) -> Interval:
    """Nats at the edge of Step Law's curves, over its sizes and budgets, whose batches are averaged.

    Args:
        of: ``rise``, the loss of the first failing rate above that of the rate below it, per ``STEP``; or ``edge``, the
            loss of the rate below it above the best one.
    """
    curves = of_step_law(runs)
    table = curves[SIZED].assign(
        rise=(curves["failing_loss"] - curves["edge_loss"]) * STEP / np.log10(curves["failing_lr"] / curves["edge_lr"]),
        edge=curves["edge_loss"] - curves["best_loss"],
    )
    return student_t(table.groupby(SIZED)[of].mean())


def share_of_survivors(runs: RealRuns) -> Interval:
    """The share of rates above Step Law's first failing one that end well."""
    curves = of_step_law(runs).groupby(SIZED)
    return share_of_clusters(curves["survivors"].sum().tolist(), curves["higher"].sum().tolist())


def law(runs: RealRuns, of: str) -> PowerLaw:
    """A rate of Step Law as a power of size, tokens and batch.

    Args:
        of: ``failing``; ``best``, which is known to half a step of the grid; or ``tolerated``, the distance in decades
            from the best rate to the one that costs ``TOLERATED`` nats, or beyond the highest one that was tried.
    """
    curves, half = of_step_law(runs), 10 ** (STEP / 2)
    inside = curves[curves["is_inside"]]
    if of == "failing":
        brackets = failing_brackets(curves)
    elif of == "best":
        brackets = inside.assign(low=inside["best_lr"] / half, high=inside["best_lr"] * half)
    else:
        tolerated = inside["tolerated_lr"] / inside["best_lr"]
        low = (tolerated / half).fillna(inside["highest_lr"] / inside["best_lr"])
        brackets = inside.assign(low=low, high=(tolerated * half).fillna(math.inf))
    return fit_power_law(
        brackets, [*SIZED, "batch"], brackets["parameters"].astype(str) + brackets["tokens"].astype(str)
    )


def exponent(runs: RealRuns, of: str, key: str, sign: int = 1) -> Interval:
    """The exponent of ``parameters``, ``tokens`` or ``batch`` in ``law``; with a sign of -1 how fast the rate falls."""
    found = law(runs, of).exponent(key)
    return -found if sign < 0 else found


def fall_of_failing_rates_at_equal_budgets(runs: RealRuns) -> Interval:
    """Decades by which Marin's first failing rate falls per decade of size, at equal tokens per parameter, by arm."""
    curves = runs.curves[runs.curves["source"] == MARIN].assign(log=np.log10(runs.curves["failing_lr"]))
    slopes = []
    for _, own in curves.groupby("arm"):
        ratio = own["tokens"] / own["parameters"]
        pairs = own.assign(ratio=ratio.round()).pivot_table(index="ratio", columns="parameters", values="log")
        if pairs.shape[1] == 2:
            small, large = map(float, pairs.columns.tolist())
            slopes.append(-((pairs[large] - pairs[small]) / math.log10(large / small)).mean())
    return student_t(slopes)


def single_changes(runs: RealRuns, key: str, low: float = 0.0, high: float = math.inf) -> pd.DataFrame:
    """Single changes of a key whose ratio to the value of the base lies between two numbers."""
    changes = runs.changes[runs.changes["changed_key"] == key]
    return changes[changes["ratio"].between(low, high)]


def share_of_breaks(
    runs: RealRuns,
    key: str,
    low: float = 0.0,
    high: float = math.inf,
    or_off: bool = False,
    optimizers: Collection[str] = (),
) -> Interval:
    """The share of ``single_changes`` that break a run, which are alike for one optimizer.

    Args:
        or_off: whether a value of zero, which switches something off, counts as well.
        optimizers: limits them; empty for all.
    """
    changes = single_changes(runs, key, low, high)
    if or_off:
        every = single_changes(runs, key)
        changes = pd.concat([changes, every[every["value"] == 0]])
    if optimizers:
        changes = changes[changes["optimizer"].isin(optimizers)]
    breaks = changes.groupby("optimizer")["breaks"]
    return share_of_clusters(breaks.sum().tolist(), breaks.count().tolist())


def excess_of_changes(runs: RealRuns, key: str, low: float = 0.0, high: float = math.inf) -> Interval:
    """Nats by which runs with ``single_changes`` end above their base, over optimizers."""
    return student_t(single_changes(runs, key, low, high).groupby("optimizer")["excess"].mean())


def gain_of_failing_multiples(runs: RealRuns, these: Sequence[str], others: Sequence[str]) -> Interval:
    """Decades by which the multiple of the tuned rate that fails is higher for these optimizers than for others.

    It is compared at each size and budget. Where none failed, the largest multiple that was tried stands for it.
    """
    changes, keys = runs.changes, ["size", "chinchilla", "optimizer"]
    tried = changes[(changes["changed_key"] == "learning_rate") & (changes["ratio"] > 1)]
    first, highest = tried[tried["breaks"]].groupby(keys)["ratio"].min(), tried.groupby(keys)["ratio"].max()
    multiples = np.log10(first.reindex(highest.index).fillna(highest)).unstack()
    return student_t(multiples[[*these]].mean(axis=1) - multiples[[*others]].mean(axis=1))


def breaks_more_at_size(runs: RealRuns) -> Interval:
    """The share of single changes that break a run at 300 million parameters, minus that at 130, by optimizer."""
    changes = runs.changes[~runs.changes["is_base"]]
    keys = ["optimizer", "chinchilla", "changed_key", "value"]
    pairs = changes.pivot_table(index=keys, columns="size", values="breaks", aggfunc="max").dropna().astype(float)
    return student_t((pairs["300m"] - pairs["130m"]).groupby("optimizer").mean())


def slope_of_breaks_over_tokens(runs: RealRuns) -> Interval:
    """How the share of single changes that break a run changes with each doubling of tokens, by optimizer."""
    small = runs.changes[~runs.changes["is_base"] & (runs.changes["size"] == "130m")]
    keys = ["optimizer", "changed_key", "value"]
    shares = small.pivot_table(index=keys, columns="chinchilla", values="breaks", aggfunc="max").dropna().astype(float)
    slopes = np.polyfit(np.log2(shares.columns.astype(float)), shares.T.to_numpy(), 1)[0]
    return student_t(pd.Series(slopes, shares.index).groupby("optimizer").mean())


def share_that_keeps(runs: RealRuns, arm: str) -> Interval:
    """The share of sizes at which no rate above the best one and up to 0.3 is costly."""
    inside = runs.embedding[(runs.embedding["arm"] == arm) & (runs.embedding["lr"] < 0.31)]
    kept = []
    for _, curve in inside.groupby("parameters"):
        losses = curve.set_index("lr")["loss"]
        kept.append(float(losses[losses.index > losses.idxmin()].max() < losses.min() + LOST))
    return share_of_clusters(kept, [1.0] * len(kept))


def excess_over(runs: RealRuns, arm: str, low: float, high: float) -> Interval:
    """The mean loss of the baseline above that of an arm, over the learning rates from low to high, at each size."""
    inside = runs.embedding[runs.embedding["lr"].between(low * 0.99, high * 1.01)]
    means = inside.groupby(["arm", "parameters"])["loss"].mean()
    return student_t(means["baseline"] - means[arm])


def harm_over_cost_of_rounding(runs: RealRuns) -> Interval:
    """log10 of what the baseline loses from 0.1 on over what rounding its log Z to bf16 costs, at each size."""
    table = runs.embedding.set_index(["arm", "parameters", "lr"]).sort_index()
    high = table.loc["baseline"][lambda rows: rows.index.get_level_values("lr") > 0.09]
    harm = high["loss"] - table.loc["mucentering"]["loss"].reindex(high.index)
    cost = pd.Series(rounding_cost(high["log_z"], BF16), high.index)
    return student_t(np.log10(harm / cost).groupby("parameters").mean())
