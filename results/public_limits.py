"""Measure in the numbers of public runs the limits that come with the package, and how well they foretell other runs.

``python results/public_limits.py`` prints the second: each sweep and each size is left out in turn, and foretold. It
also prints what the lab's own brackets allow, how far runs fall on the step on which they first fail, and from which
learning rate short and long runs of the lab are costly. These are in ``fine_ladders.csv``, which ``python
results/public_limits.py runs/fine_ladders`` makes of what was trained there.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy

import real_runs
from lab.analysis.curves import load
from lab.analysis.laws.brackets import PowerLaw, fit_power_law
from lab.analysis.laws.fits import Crossing
from lab.analysis.sensitivity import LOST
from lab.analysis.statistics import Interval, student_t
from lab.analysis.text import count
from lab.core import files
from lab.features.predict.limits import Limit
from studies.real_runs.curves import RealRuns, failing_brackets, read_real_runs

LAW = ("params", "tokens")  # what the failing rate without a norm of queries and keys is a power of
ADAMW: Mapping[str, Sequence[str]] = {"Step Law": ["adamw"], "Marin": ["adamw"], "the lab": ["adamw"]}
# The loss of a model that knows only how often each byte of the lab's text occurs, nats: `results/faithful_toy.py`.
UNIGRAM = 3.24
FINE_LADDERS = Path(__file__).with_name("fine_ladders.csv")


@cache
def runs_of_others() -> RealRuns:
    """The committed numbers."""
    return read_real_runs()


def curves_of_sources(curves: Mapping[str, Sequence[str]]) -> pd.DataFrame:
    """The curves of sources, of these arms or of all, with their brackets, ``params`` and ``steps``."""
    known = failing_brackets(runs_of_others().curves).rename(columns={"parameters": "params"})
    pairs = zip(known["source"], known["arm"], strict=True)
    kept = known[[source in curves and (not curves[source] or arm in curves[source]) for source, arm in pairs]]
    return kept.assign(steps=kept["tokens"] / kept["batch"])


def law_of(table: pd.DataFrame, of: Sequence[str]) -> PowerLaw:
    """The law of the failing rates of curves, in which each size of each source counts equally."""
    return fit_power_law(table, of, table["source"] + table["params"].astype(str), equal=True)


def foretold(law: PowerLaw, table: pd.DataFrame) -> list[Crossing]:
    """What a law says of each curve."""
    return [law.predict({name: float(row[name]) for name in law.exponents}) for _, row in table.iterrows()]


def failing_rate(of: Sequence[str], *, curves: Mapping[str, Sequence[str]], runs: str, offsets_in: str = "") -> Limit:
    """The learning rate from which runs end 0.3 nats above the best.

    Args:
        of: the numbers of which it is a power; none for a level.
        curves: the arms of each source that count.
        runs: whose they are.
        offsets_in: the source whose other arms are optimizers, each with a level of its own.
    """
    table = curves_of_sources(curves)
    law = law_of(table, of)
    others = curves_of_sources({offsets_in: []}) if offsets_in else table.head(0)
    ranges = {"tokens": _range(table["tokens"])} if "tokens" in of else {}
    return _limit(table, runs, law=law, ranges=ranges, offsets=_offsets(law, others))


def _offsets(law: PowerLaw, table: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """By optimizer, how far the limits of its curves lie above a law of AdamW, in decades, with the standard error.

    Optimizers whose limit is nowhere known from both sides are left out.
    """
    found = {"adamw": (0.0, 0.0)}
    for name, own in table[table["arm"] != "adamw"].groupby("arm"):
        if ((own["low"] > 0) & np.isfinite(own["high"])).any():
            middle = np.array([each.middle for each in foretold(law, own)])
            above = own.assign(low=own["low"] / middle, high=own["high"] / middle)
            level = fit_power_law(above, [], own["params"].astype(str) + own["tokens"].astype(str))
            found[str(name)] = (level.height, math.sqrt(level.covariance[0][0]))
    return found if len(found) > 1 else {}


def shortest_warm_up(of: str, *, runs: str) -> Limit:
    """The warm-up, in memories of beta2, below which tuned recipes broke; ``of`` is their source."""
    changes = runs_of_others().changes
    warmed = changes[(changes["is_base"] & (changes["warmup"] > 0)) | (changes["changed_key"] == "warmup")]
    steps = warmed["warmup"].where(warmed["is_base"], warmed["value"])
    warmed = warmed.assign(memories=steps * (1 - warmed["beta2"]))
    rows = []
    for (optimizer, *_), own in warmed.groupby(["optimizer", "size", "chinchilla"]):
        first = own.iloc[0]
        broken = float(np.nan_to_num(own.loc[own["breaks"], "memories"].max()))
        fine = own.loc[~own["breaks"] & (own["memories"] > broken), "memories"].min()
        rows.append(
            {"arm": optimizer, "params": first["parameters"], **first[["tokens", "steps"]], "low": broken, "high": fine}
        )
    table = pd.DataFrame(rows)
    adamw = table[table["arm"] == "adamw"]
    law = fit_power_law(adamw, [], adamw["params"].astype(str) + adamw["tokens"].astype(str))
    found = {"ranges": {"beta2": _range(changes["beta2"])}, "offsets": _offsets(law, table)}
    return _limit(table, runs, law=law, tried=_range(warmed["memories"]), **found)


def rounding_cost(of: float, *, runs: str) -> Limit:
    """The learning rate from which a baseline ends higher by so many nats than with centred output logits."""
    losses = runs_of_others().embedding.pivot_table(index="parameters", columns=["arm", "lr"], values="loss")
    costs = losses["baseline"] - losses["mucentering"]
    rows = []
    for size, cost in costs.iterrows():
        first = cost.index[cost > of].min()
        rows.append(
            {"source": "", "params": size, "steps": 1e5, "low": cost.index[cost.index < first].max(), "high": first}
        )
    table = pd.DataFrame(rows)
    return _limit(table, runs, law=law_of(table, []), tried=_range(costs.columns))


def _limit(table: pd.DataFrame, runs: str, tried: tuple[float, float] | None = None, **found: Any) -> Limit:
    tried = tried or (float(table["best_lr"].min()), float(table["highest_lr"].max()))
    steps = round(table["steps"].min()), round(table["steps"].max())
    return Limit(runs, _range(table["params"]), steps, tried, **found)


def _range(values: pd.Series | pd.Index) -> tuple[float, float]:
    return float(values.min()), float(values.max())


@cache
def held_out() -> pd.DataFrame:
    """How well curves are foretold by the law fitted to other curves; a row for each part that is left out.

    Parts are a source, a size, and an optimizer, which is foretold by the spread of the others.

    Columns: ``left out``; ``curves``; ``inside``, the share whose bracket meets the 95 % interval; ``error``, the mean
    distance in decades from the law to their brackets, and ``too high``, the same with its sign; ``half width`` of the
    interval; of these curves the shares whose failing rate lies below the interval (``costly among clear``) and whose
    best rate lies above it (``best among beyond``).
    """
    table = curves_of_sources(ADAMW)
    parts = {source: table["source"] == source for source in table["source"].unique()}
    parts |= {f"{count(size)} parameters": table["params"] == size for size in np.sort(table["params"].unique())}
    rows = [_score(name, foretold(law_of(table[~out], LAW), table[out]), table[out]) for name, out in parts.items()]
    whole = failing_rate(LAW, curves=ADAMW, runs="", offsets_in="Marin")
    for name in whole.offsets:
        limit = replace(whole, offsets={other: offset for other, offset in whole.offsets.items() if other != name})
        own = curves_of_sources({"Marin": [name]})
        asked = [{"optimizer": name, **{key: float(row[key]) for key in LAW}} for _, row in own.iterrows()]
        if name != "adamw":
            rows.append(_score(f"{name}, by the others", [limit.at(each) for each in asked], own))
    return pd.DataFrame(rows)


def _score(name: str, predicted: Sequence[Crossing], table: pd.DataFrame) -> dict[str, Any]:
    middle, low, high = np.array(predicted).T
    ends = np.log10(middle) - np.log10(table[["low", "high"]].to_numpy()).T  # of each curve to both ends of its bracket
    above = np.maximum(ends[1], 0) + np.minimum(ends[0], 0)
    return {
        "left out": name,
        "curves": len(table),
        "inside": float(((low <= table["high"]) & (high >= table["low"])).mean()),
        "error": float(np.abs(above).mean()),
        "too high": float(above.mean()),
        "half width": float(np.log10(high / low).mean() / 2),
        "costly among clear": float((table["high"] < low).mean()),
        "best among beyond": float((table["best_lr"] > high).mean()),
    }


def diverged_loss() -> float:
    """The loss at which runs of Step Law ended at the first rate on which they failed, nats, the median over curves."""
    curves = curves_of_sources({"Step Law": ["adamw"]})
    return float(curves["failing_loss"].median())


def way_fallen(source: str) -> Interval:
    """On the step to the first failing rate, the share of the way from the best loss to a unigram model's.

    Large models that diverge end about there; for them the loss at which they ended stands for it. Means over the
    batches of a size and budget.
    """
    curves = curves_of_sources({source: ["adamw"]}).dropna(subset=["failing_lr"])
    room = (UNIGRAM if source == "the lab" else diverged_loss()) - curves["best_loss"]
    share = (curves["failing_loss"] - curves["edge_loss"]) / room
    return student_t(share.groupby([curves["params"], curves["tokens"]]).mean())


def brackets_of_the_lab(share: float) -> pd.DataFrame:
    """The lab's curves without qk-norm, where failing is to lose a share of the way to a unigram model."""
    rows = []
    runs = pd.concat(map(real_runs.own, real_runs.OWN)).sort_values("lr")
    for (size, tokens), curve in runs[runs["arm"] == "adamw"].groupby(["parameters", "tokens"]):
        lr, loss = curve["lr"].to_numpy(), curve["loss"].to_numpy()
        failed = (loss > loss.min() + share * (UNIGRAM - loss.min())) & (np.arange(len(lr)) > loss.argmin())
        first = int(failed.argmax())
        rows.append({"params": size, "tokens": tokens, "low": lr[first - 1], "high": lr[first]})
    return pd.DataFrame(rows)


def allowed_by(brackets: pd.DataFrame) -> tuple[float, float]:
    """By how many decades laws that meet all brackets of small curves may miss the law of all curves, at public runs.

    Returns:
        The least and the most, means over the public curves, above 0 where a forecast is too high.
    """
    table = curves_of_sources(ADAMW)
    public = table[table["source"] != "the lab"]
    truth = np.log10([each.middle for each in foretold(law_of(table, LAW), public)])
    x_nk, x_mk = (np.column_stack([np.ones(len(own)), np.log10(own[[*LAW]])]) for own in (brackets, public))
    low_n, high_n = np.log10(brackets[["low", "high"]].to_numpy(float)).T
    within = {"A_ub": np.vstack([-x_nk, x_nk]), "b_ub": np.concatenate([-low_n, high_n]), "bounds": (None, None)}
    least, most = (scipy.optimize.linprog(sign * x_mk.mean(0), **within).fun * sign for sign in (1, -1))
    return float(least - truth.mean()), float(most - truth.mean())


@cache
def allowed() -> dict[str, tuple[float, float]]:
    """``allowed_by`` where failing is to lose ``LOST`` nats, and where it is the share of the way that these are."""
    curves = curves_of_sources({"Step Law": ["adamw"]})
    share = float((LOST / (diverged_loss() - curves["best_loss"])).mean())
    small = curves_of_sources({"the lab": ["adamw"]})
    return {"by nats": allowed_by(small), "by share": allowed_by(brackets_of_the_lab(share))}


def costly_rates() -> pd.DataFrame:
    """From which learning rate a run ends ``LOST`` nats above the best, interpolated in logs: a row for each width."""
    runs = pd.read_csv(FINE_LADDERS)
    found = {}
    for (width, steps), curve in runs.groupby(["model.width", "steps"]):
        losses = curve.groupby("optimizer.lr")["final_val_loss"].mean()
        above = losses[losses.index >= losses.idxmin()] - losses.min()
        found[width, steps] = 10 ** np.interp(LOST, above, np.log10(above.index), right=math.nan)
    return pd.Series(found).unstack()


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        ladders = load(folder).runs[["id", "model.width", "steps", "seed", "optimizer.lr", "status", "final_val_loss"]]
        files.write_csv(FINE_LADDERS, ladders.sort_values([*ladders.columns[1:5]]), float_format="%.6g")
    print(held_out().round(3).to_string(index=False))
    print("what the lab's brackets allow, decades:", allowed())
    print("public runs that diverged end at", diverged_loss())
    for source in ("Step Law", "the lab"):
        fallen = way_fallen(source)
        print("share of the way that the first failing step falls:", source, fallen, sorted(fallen.values))
    print("costly rate, by width and steps:", costly_rates().round(4), sep="\n")
