"""Claims on public runs. Each rule stands above its effect; the rules were written before the runs were judged.

Runs of one table are alike, and most were trained once. So an effect is first averaged over what is alike (the batches
of one size and budget, the budgets of one optimizer), and its interval is over these averages.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pandas as pd

from lab.analysis.laws.brackets import PowerLaw, fit_power_law
from lab.analysis.sensitivity import LOST
from lab.analysis.statistics import Interval, student_t
from labwatch.events.logit_rounding import BF16, rounding_cost
from studies.claims.as_functions import Rule, claim
from studies.claims.shares import share_of_clusters
from studies.real_runs.curves import TOLERATED, RealRuns, failing_brackets, read_real_runs

SOURCE = "public runs"
STEP_LAW, MARIN, EMBEDDING = "Step Law", "Marin", "output embedding"
SIZED = ["parameters", "tokens"]
STEP = math.log10(2) / 2  # decades between neighbouring rates of Step Law
AS_ADAM = ("adamw", "nadamw", "lion", "adam_mini")
MATRIX = ("muon", "scion")
RARELY, NEARLY_ALWAYS = (-math.inf, 0.1), (0.9, math.inf)
RULES: list[Rule] = []
read = read_real_runs

of_step_law, of_marin, of_embedding = (partial(claim, RULES, source=name) for name in (STEP_LAW, MARIN, EMBEDDING))


def by_cell(runs: RealRuns) -> pd.DataFrame:
    """Losses at the edge, means over the batches of each size and budget of Step Law."""
    curves = runs.curves[runs.curves["source"] == STEP_LAW]
    table = curves[SIZED].assign(
        rise=(curves["failing_loss"] - curves["edge_loss"]) * STEP / np.log10(curves["failing_lr"] / curves["edge_lr"]),
        edge=curves["edge_loss"] - curves["best_loss"],
    )
    return table.groupby(SIZED, as_index=False).mean()


def failing_law(runs: RealRuns) -> PowerLaw:
    """The first failing rate of Step Law, a power of size, tokens and batch."""
    return _law(failing_brackets(runs.curves[runs.curves["source"] == STEP_LAW]))


def best_law(runs: RealRuns) -> PowerLaw:
    """The best rate of Step Law likewise; it is known to half a step of the grid."""
    curves = runs.curves[(runs.curves["source"] == STEP_LAW) & runs.curves["is_inside"]]
    half = 10 ** (STEP / 2)
    return _law(curves.assign(low=curves["best_lr"] / half, high=curves["best_lr"] * half))


def _law(curves: pd.DataFrame) -> PowerLaw:
    return fit_power_law(curves, [*SIZED, "batch"], curves["parameters"].astype(str) + curves["tokens"].astype(str))


def share_of_breaks(changes: pd.DataFrame) -> Interval:
    """The share of changes that break a run, which are alike for one optimizer."""
    breaks = changes.groupby("optimizer")["breaks"]
    return share_of_clusters(breaks.sum().tolist(), breaks.count().tolist())


def excess_over(runs: RealRuns, arm: str, low: float, high: float) -> Interval:
    """The mean loss of the baseline above that of an arm, over the learning rates from low to high, at each size."""
    inside = runs.embedding[runs.embedding["lr"].between(low * 0.99, high * 1.01)]
    means = inside.groupby(["arm", "parameters"])["loss"].mean()
    return student_t(means["baseline"] - means[arm])


def share_that_keeps(runs: RealRuns, arm: str) -> Interval:
    """The share of sizes at which no rate above the best one and up to 0.3 is costly."""
    inside = runs.embedding[(runs.embedding["arm"] == arm) & (runs.embedding["lr"] < 0.31)]
    kept = []
    for _, curve in inside.groupby("parameters"):
        losses = curve.set_index("lr")["loss"]
        kept.append(float(losses[losses.index > losses.idxmin()].max() < losses.min() + LOST))
    return share_of_clusters(kept, [1.0] * len(kept))


def single(runs: RealRuns, *keys: str, low: float = 0.0, high: float = math.inf) -> pd.DataFrame:
    """Single changes of some keys whose ratio to the value of the base lies between two numbers."""
    changes = runs.changes[runs.changes["changed_key"].isin(keys)]
    return changes[changes["ratio"].between(low, high)]


# Divergence.


@of_step_law("the step of 0.15 decades to the first failing rate raises the loss by over a nat", side=(1, math.inf))
def divergence_is_a_cliff(runs: RealRuns) -> Interval:
    return student_t(by_cell(runs)["rise"])


@of_step_law(
    "one step below the first failing rate a run ends less than 0.2 nats above the best", side=(-math.inf, 0.2)
)
def the_edge_costs_little(runs: RealRuns) -> Interval:
    return student_t(by_cell(runs)["edge"])


@of_step_law("of the rates above the first failing one, fewer than one in ten end well", side=RARELY)
def no_higher_rate_survives(runs: RealRuns) -> Interval:
    curves = runs.curves[runs.curves["source"] == STEP_LAW].groupby(SIZED)
    return share_of_clusters(curves["survivors"].sum().tolist(), curves["higher"].sum().tolist())


# The first failing rate.

FALLS = "the first failing rate falls with size"


@of_step_law(FALLS, unit="decades per decade", lab="eta_div_falls_with_size", is_slope=True)
def failing_rate_falls_with_size(runs: RealRuns) -> Interval:
    return -failing_law(runs).exponent("parameters")


@of_marin(FALLS, unit="decades per decade", lab="eta_div_falls_with_size", is_slope=True)
def failing_rate_falls_with_size_in_marin(runs: RealRuns) -> Interval:
    curves = runs.curves[runs.curves["source"] == MARIN].assign(log=np.log10(runs.curves["failing_lr"]))
    slopes = []
    for _, own in curves.groupby("arm"):
        ratio = own["tokens"] / own["parameters"]
        pairs = own.assign(ratio=ratio.round()).pivot_table(index="ratio", columns="parameters", values="log")
        if pairs.shape[1] == 2:
            small, large = map(float, pairs.columns.tolist())
            slopes.append(-((pairs[large] - pairs[small]) / math.log10(large / small)).mean())
    return student_t(slopes)


@of_step_law(
    "the first failing rate changes with tokens by less than their power 0.25",
    side=(-0.25, 0.25),
    unit="decades per decade",
)
def failing_rate_hardly_changes_with_tokens(runs: RealRuns) -> Interval:
    return failing_law(runs).exponent("tokens")


@of_step_law(
    "the first failing rate changes with the batch by less than its power 0.15",
    side=(-0.15, 0.15),
    unit="decades per decade",
)
def failing_rate_hardly_changes_with_batch(runs: RealRuns) -> Interval:
    return failing_law(runs).exponent("batch")


# The best rate.


@of_step_law(
    "the best rate falls with size", unit="decades per decade", lab="larger_models_take_smaller_rates", is_slope=True
)
def best_rate_falls_with_size(runs: RealRuns) -> Interval:
    return -best_law(runs).exponent("parameters")


@of_step_law(
    "the best rate changes with tokens by less than their power 0.15", side=(-0.15, 0.15), unit="decades per decade"
)
def best_rate_hardly_changes_with_tokens(runs: RealRuns) -> Interval:
    return best_law(runs).exponent("tokens")


@of_step_law(
    "at as many tokens the best rate rises with the batch",
    unit="decades per decade",
    lab="best_rate_of_adam_rises_by_a_power",
    is_slope=True,
)
def best_rate_rises_with_batch(runs: RealRuns) -> Interval:
    return best_law(runs).exponent("batch")


@of_step_law(
    f"the distance from the best rate to that which costs {TOLERATED} nats does not shrink with size by its power 0.15",
    side=(-0.15, math.inf),
    unit="decades per decade",
)
def tolerance_does_not_shrink_with_size(runs: RealRuns) -> Interval:
    curves = runs.curves[(runs.curves["source"] == STEP_LAW) & runs.curves["is_inside"]]
    tolerated, half = curves["tolerated_lr"] / curves["best_lr"], 10 ** (STEP / 2)
    low = (tolerated / half).fillna(curves["highest_lr"] / curves["best_lr"])
    return _law(curves.assign(low=low, high=(tolerated * half).fillna(math.inf))).exponent("parameters")


# Single changes of a tuned recipe.


@of_marin("a smaller or larger epsilon, from 1e-25 to 1e-10, breaks fewer than one run in ten", side=RARELY)
def epsilon_breaks_no_run(runs: RealRuns) -> Interval:
    return share_of_breaks(single(runs, "epsilon"))


@of_marin(
    "a smaller epsilon changes the loss by less than 0.02",
    side=(-0.02, 0.02),
    unit="nats/token",
)
def smaller_epsilon_changes_nothing(runs: RealRuns) -> Interval:
    return student_t(single(runs, "epsilon", high=0.99).groupby("optimizer")["excess"].mean())


@of_marin("clipping at twice the norm, or none, breaks fewer than one run in ten", side=RARELY)
def looser_clipping_breaks_no_run(runs: RealRuns) -> Interval:
    clips = single(runs, "max_grad_norm")
    return share_of_breaks(clips[(clips["ratio"] > 1) | (clips["value"] == 0)])


@of_marin("more weight decay breaks fewer than one run in ten", side=RARELY)
def more_decay_breaks_no_run(runs: RealRuns) -> Interval:
    return share_of_breaks(single(runs, "weight_decay", low=1.01))


@of_marin("a longer warm-up breaks fewer than one run in ten", side=RARELY)
def longer_warm_up_breaks_no_run(runs: RealRuns) -> Interval:
    return share_of_breaks(single(runs, "warmup", low=1.01))


@of_marin("a quarter of the warm-up ends higher", unit="nats/token", margin=0.02, lab="warm_up_helps_at_the_top")
def shorter_warm_up_ends_higher(runs: RealRuns) -> Interval:
    return student_t(single(runs, "warmup", high=0.26).groupby("optimizer")["excess"].mean())


@of_marin(
    "a quarter of the warm-up breaks over half of the runs of AdamW, NAdamW, Lion and Adam-mini", side=(0.5, 1.01)
)
def shorter_warm_up_breaks_adam(runs: RealRuns) -> Interval:
    short = single(runs, "warmup", high=0.26)
    return share_of_breaks(short[short["optimizer"].isin(AS_ADAM)])


@of_marin("AdamW and its kin stand a smaller multiple of their tuned rate than Muon and Scion", unit="decades")
def matrix_optimizers_stand_higher_multiples(runs: RealRuns) -> Interval:
    """At each size and budget, log10 of the multiple that fails; where none failed, of the largest one tried."""
    rates = runs.changes[runs.changes["is_base"] | (runs.changes["changed_key"] == "learning_rate")]
    tried = rates[rates["changed_key"] == "learning_rate"].assign(log=np.log10(rates["ratio"]))
    tried = tried[tried["log"] > 0]
    keys = ["size", "chinchilla", "optimizer"]
    first = tried[tried["breaks"]].groupby(keys)["log"].min()
    multiples = first.reindex(tried.groupby(keys).size().index).fillna(tried.groupby(keys)["log"].max()).unstack()
    return student_t(multiples[[*MATRIX]].mean(axis=1) - multiples[[*AS_ADAM]].mean(axis=1))


@of_marin("the same single changes break more runs at 300 million parameters than at 130", unit="share")
def changes_break_more_at_size(runs: RealRuns) -> Interval:
    changes = runs.changes[~runs.changes["is_base"]]
    keys = ["optimizer", "chinchilla", "changed_key", "value"]
    pairs = changes.pivot_table(index=keys, columns="size", values="breaks", aggfunc="max").dropna().astype(float)
    return student_t((pairs["300m"] - pairs["130m"]).groupby("optimizer").mean())


@of_marin(
    "the same single changes break fewer runs that see more tokens", unit="share per doubling", side=(-math.inf, 0)
)
def changes_break_fewer_with_tokens(runs: RealRuns) -> Interval:
    small = runs.changes[~runs.changes["is_base"] & (runs.changes["size"] == "130m")]
    keys = ["optimizer", "changed_key", "value"]
    shares = small.pivot_table(index=keys, columns="chinchilla", values="breaks", aggfunc="max").dropna().astype(float)
    slopes = np.polyfit(np.log2(shares.columns.astype(float)), shares.T.to_numpy(), 1)[0]
    return student_t(pd.Series(slopes, shares.index).groupby("optimizer").mean())


# Output logits, with a norm of queries and keys.

KEEPS = "with a norm of queries and keys no rate up to 0.3 is costly"


@of_embedding(KEEPS, side=NEARLY_ALWAYS, lab="qk_layernorm_keeps_every_learning_rate")
def qk_norm_keeps_every_learning_rate(runs: RealRuns) -> Interval:
    return share_that_keeps(runs, "baseline")


@of_embedding(f"{KEEPS}, if there is a z-loss of 1e-4", side=NEARLY_ALWAYS)
def qk_norm_with_z_loss_keeps_every_learning_rate(runs: RealRuns) -> Interval:
    return share_that_keeps(runs, "zloss 0.0001")


@of_embedding(f"{KEEPS}, if the output embedding is centred", side=NEARLY_ALWAYS)
def qk_norm_with_centering_keeps_every_learning_rate(runs: RealRuns) -> Interval:
    return share_that_keeps(runs, "mucentering")


@of_embedding(
    "a z-loss of 1e-4 lowers the loss at rates of 0.1 and 0.3",
    unit="nats/token",
    margin=0.02,
    lab="z_loss_lowers_the_top_loss_in_bf16",
)
def z_loss_lowers_the_loss_at_high_rates(runs: RealRuns) -> Interval:
    return excess_over(runs, "zloss 0.0001", 0.1, 0.3)


@of_embedding("centring the output embedding lowers the loss at rates of 0.1 and 0.3", unit="nats/token", margin=0.02)
def centering_lowers_the_loss_at_high_rates(runs: RealRuns) -> Interval:
    return excess_over(runs, "mucentering", 0.1, 0.3)


@of_embedding(
    "up to a rate of 0.01 losses with and without z-loss differ by less than 0.02",
    side=(-0.02, 0.02),
    unit="nats/token",
    lab="z_loss_curves_coincide",
)
def z_loss_changes_nothing_at_low_rates(runs: RealRuns) -> Interval:
    return excess_over(runs, "zloss 0.0001", 0.0003, 0.01)


@of_embedding(
    "what the baseline loses at rates of 0.1 and 0.3 is within threefold of what rounding its log Z to bf16 costs",
    side=(math.log10(1 / 3), math.log10(3)),
    unit="decades",
    lab="harm_follows_the_law",
)
def harm_is_that_of_rounding(runs: RealRuns) -> Interval:
    table = runs.embedding.set_index(["arm", "parameters", "lr"]).sort_index()
    high = table.loc["baseline"][lambda rows: rows.index.get_level_values("lr") > 0.09]
    harm = high["loss"] - table.loc["mucentering"]["loss"].reindex(high.index)
    law = pd.Series(rounding_cost(high["log_z"], BF16), high.index)
    return student_t(np.log10(harm / law).groupby("parameters").mean())
