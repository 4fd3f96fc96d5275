"""The rate of each ladder, the effect of each setting on it, the law of all, and what the law says of public runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import scipy  # its parts are loaded when they are used

from lab.analysis.crossings import crossing, failing
from lab.analysis.laws.brackets import PowerLaw, fit_power_law
from lab.analysis.sensitivity import LOST, capped
from lab.analysis.statistics import Interval
from studies.claims.curve_summaries import steepness
from studies.claims.statistics import effects_of_levels

LADDER = ["stage", "row", "seed"]  # what runs of a ladder share
LEVEL = 500.0  # of the largest attention logit, above which it has run away
RATES = {"runaway": "runaway rate", "failing": "failing rate", "costly": f"rate that costs {LOST:g} nats"}
POWERS = ["width", "depth", "steps", "tokens_per_step"]  # settings in which the law is a power law
COVARIATES = ["warm_up", "head_width", "memory"]  # settings of the factorial that are numbers
CODES = ["is_bf16", "is_bpe", "is_small_init"]
# Decay that does not multiply the learning rate has exponents of its own; the others are those of coupled decay.
INDEPENDENT = ["is_independent", "width_if_independent", "steps_if_independent"]
SETTINGS = [*POWERS, *COVARIATES, *CODES, *INDEPENDENT]
INTERPOLATED = 0.01  # decades, to which a crossing between two rates of a fine ladder is known


def ladders(runs: pd.DataFrame, unigram: Mapping[int, float], level: float = LEVEL) -> pd.DataFrame:
    """A row for each ladder: its settings, best rate and loss, and the ``Crossing`` of each of ``RATES``.

    Args:
        runs: a row for each run, as ``results/runaway/runs.csv`` has them.
        unigram: the loss of a unigram model by vocabulary, nats per token.
        level: of the largest attention logit, above which it has run away.

    Returns:
        Columns: those of ``runs`` that hold settings; ``best_lr``, ``best_loss``; a column for each of ``RATES``;
        ``share``, the largest rise of the loss within 0.15 decades as a share of the way from the best loss to that of
        a unigram model; and the settings as ``fit_power_law`` takes them.
    """
    rows = []
    for _, own in runs.groupby(LADDER, sort=False):
        own = own.assign(loss=capped(own)).sort_values("lr")
        lr, loss = own["lr"].to_numpy(float), own["loss"].to_numpy(float)
        way = unigram[int(own["vocabulary"].iloc[0])] - loss.min()
        logit = own["logit"].where(own["status"] != "diverged", math.inf)
        found = {
            "runaway": crossing(lr, logit, level, log=True),
            "failing": failing(lr, loss, way / 2),
            "costly": failing(lr, loss, LOST),
        }
        best = {"best_lr": lr[loss.argmin()], "best_loss": loss.min(), "share": steepness(lr, loss) / way}
        rows.append({**dict(own.drop(columns=["lr", "id"]).iloc[0]), **best, **found})
    return as_settings(pd.DataFrame(rows))


def as_settings(table: pd.DataFrame) -> pd.DataFrame:
    """A table of ladders, or of runs, with the settings as ``fit_power_law`` takes them."""
    independent = table["optimizer"] == "adamw"
    return table.assign(
        is_independent=np.where(independent, 10.0, 1.0),
        width_if_independent=table["width"].where(independent, 32) / 32,
        steps_if_independent=table["steps"].where(independent, 400) / 400,
        total_if_independent=(table["weight_decay"] * table["steps"]).where(independent, 1.0),
        tokens_per_step=table["batch_size"] * table["seq_len"],
        memory=1 / (1 - table["beta2"]),  # steps over which Adam averages squares
        is_bf16=_code(table["precision"] == "bf16"),
        is_bpe=_code(table["vocabulary"] > 256),
        is_small_init=_code(table["intervention"].str.contains("small_init")),
    )


def _code(is_high: pd.Series) -> pd.Series:
    """A setting of two levels, one decade apart, so that its exponent is its effect in decades."""
    return is_high.map({True: math.sqrt(10), False: 1 / math.sqrt(10)})


def effects(rows: pd.DataFrame, signs: pd.DataFrame, rate: str, together: Sequence[str]) -> dict[str, Interval]:
    """By how many decades each setting's high level moves a rate, and what pairs of settings add together.

    Least squares with 95 % Student-t intervals; what is left unexplained tells the error. A rate that lies outside its
    ladder is taken at the end of it.

    Args:
        rows: as ``ladders`` makes them, a row each, with the names of the rows of the design in ``row``.
        signs: -1 or 1 of each setting, by the name of a row.
        rate: one of ``RATES``.
        together: settings of which every pair has an effect of its own.
    """
    log_rate = np.array([found.log_or_beyond(0.15) for found in rows[rate]])
    signs = signs.loc[rows["row"]].reset_index(drop=True)
    columns = {str(name): signs[name] for name in signs}
    columns |= {f"{first} x {second}": signs[first] * signs[second] for first, second in combinations(together, 2)}
    return effects_of_levels(columns, log_rate)


def law(rows: pd.DataFrame, rate: str, over: Sequence[str]) -> PowerLaw:
    """The power law of a rate in settings, by brackets: an interpolated crossing is known to ``INTERPOLATED``."""
    return fit_power_law(rows.assign(**bracket(rows[rate])), over, rows["row"].astype(str))


def bracket(found: pd.Series) -> pd.DataFrame:
    """``low`` and ``high``, between which a crossing lies."""
    ends = [
        (each.low, each.high) if each.is_censored else tuple(each.at * 10 ** np.array([-INTERPOLATED, INTERPOLATED]))
        for each in found
    ]
    return pd.DataFrame(ends, columns=["low", "high"], index=found.index)


def public_settings(curves: pd.DataFrame, real: Mapping[str, Any]) -> pd.DataFrame:
    """What the law takes of each curve of public runs of AdamW, with the ``low`` and ``high`` of its failing rate.

    Args:
        curves: as ``failing_brackets`` makes them.
        real: what these runs share, and their shapes, as the plan has them.
    """
    chosen = curves[(curves["arm"] == "adamw") & curves["parameters"].isin(real["shapes"])].reset_index(drop=True)
    width, depth = zip(*(real["shapes"][int(size)] for size in chosen["parameters"]), strict=True)
    steps = chosen["tokens"] / chosen["batch"]
    high = math.sqrt(10)  # they have bf16, tokens of several bytes, and small initial values
    return chosen.assign(
        width=width,
        depth=depth,
        steps=steps,
        tokens_per_step=chosen["batch"],
        warm_up=real["warm_up"] / steps,
        head_width=real["head_width"],
        memory=1 / (1 - real["beta2"]),
        **dict.fromkeys(CODES, high),
        **dict.fromkeys(INDEPENDENT, 1.0),
    )


def error_of(fitted: PowerLaw, settings: pd.DataFrame) -> Interval:
    """By how many decades a law is off the failing rates of these settings, on average, with the interval of the law.

    Settings of which no rate that was tried failed are left out. ``values`` are the errors of the settings.
    """
    known = settings[np.isfinite(settings["high"])]
    x_nk = _logs(fitted, known)
    off_n = fitted.height + x_nk[:, 1:] @ [*fitted.exponents.values()] - _observed(known)
    mean_k = x_nk.mean(0)
    error = math.sqrt(mean_k @ np.array(fitted.covariance) @ mean_k)
    half = float(scipy.special.stdtrit(fitted.freedom, 0.975)) * error
    return Interval.around(float(off_n.mean()), half, len(known), tuple(off_n.tolist()), error)


def _observed(known: pd.DataFrame) -> np.ndarray:
    """log10 of the middle of each bracket."""
    return np.asarray(np.log10(known[["low", "high"]].to_numpy()).mean(1))


def errors_of_nulls(small: pd.DataFrame, rate: str, public: pd.DataFrame) -> pd.DataFrame:
    """By how many decades rules with nothing but a height miss public runs: mean, and mean absolute.

    Each goes through the mean of the small runs, but the last, which is the mean failing rate of Marin's curves.
    """
    known = public[np.isfinite(public["high"])]
    observed = _observed(known)
    marin = (known["source"] == "Marin").to_numpy()
    size = np.log10((12 * small["width"] ** 2 * small["depth"]).to_numpy(float))
    tokens = np.log10((small["steps"] * small["tokens_per_step"]).to_numpy(float))
    own = np.array([found.log_or_beyond(0.15) for found in small[rate]])
    real_size, real_tokens = (np.log10(known[name].to_numpy(float)) for name in ("parameters", "tokens"))
    rules = {"constant": (0.0, 0.0), "N^-1/2": (-1 / 2, 0.0), "(D/N^2)^(1/4)": (-1 / 2, 1 / 4)}
    off = {}
    for name, (of_size, of_tokens) in rules.items():
        height = (own - of_size * size - of_tokens * tokens).mean()
        off[name] = height + of_size * real_size + of_tokens * real_tokens - observed
    off["Marin's mean"] = observed[marin].mean() - observed[~marin]
    return pd.DataFrame({name: {"off by": each.mean(), "absolute": abs(each).mean()} for name, each in off.items()}).T


def _logs(fitted: PowerLaw, settings: pd.DataFrame) -> np.ndarray:
    columns = (np.log10(settings[name] / centre) for name, centre in fitted.centres.items())
    return np.column_stack([np.ones(len(settings)), *columns])
