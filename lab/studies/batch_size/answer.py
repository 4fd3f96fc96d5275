"""The answer of a sweep of batch sizes or of the noise scale, in a sentence that speaks of the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from lab.analysis.sensitivity import Study
from lab.analysis.statistics import Interval, student_t
from lab.analysis.text import count, listed, spell
from lab.studies.batch_size.estimates import exponent
from lab.studies.batch_size.growth import by_tenth
from lab.studies.batch_size.tuning import TunedBudget, TunedSteps, budgets, tuned_steps

CONSTANT = "constant"


def sentence(study: Study) -> str:
    """One sentence on the batch; empty where the runs do not compare batch sizes and no size's noise scale."""
    fitted = [curve for curve in tuned_steps(study.records) if curve.has_fit]
    if fitted:
        return _steps(fitted)
    at_budgets = budgets(study.records, study.points)
    return _rates(at_budgets) if at_budgets else _ramps(study) or _noise(study)


def cautions(study: Study) -> list[str]:
    """A sentence on each batch size that is left out of a fit."""
    tuned = tuned_steps(study.records) or budgets(study.records, study.points)
    return [sentence for one in tuned for sentence in one.cautions()]


def _steps(fitted: list[TunedSteps]) -> str:
    parts = [f"{curve.fit.scale_text} with {curve.name}" for curve in fitted]
    return f"The critical batch on the way to the loss of a bigram model is {listed(parts)}."


def _rates(at_budgets: list[TunedBudget]) -> str:
    first, last = (spell(float(at_budgets[0].loss.columns[end])) for end in (0, -1))
    return f"From a batch of {first} to {last} sequences, {'; '.join(map(_budget, at_budgets))}."


def _budget(budget: TunedBudget) -> str:
    change = student_t(budget.loss.iloc[:, -1] - budget.loss.iloc[:, 0])
    whole = budget.lr.dropna(axis=1)
    power = ""
    if whole.shape[1] > 1:
        powers = student_t([exponent(whole.columns, row) for _, row in whole.iterrows()])
        power = f"the best learning rate grows as the power {powers.mean:.2g}{_range(powers)} of the batch and "
    word = "falls" if change.mean < 0 else "rises"
    size = -change if change.mean < 0 else change
    return f"at {budget.name} {power}the best loss {word} by {size.mean:.3f} nats/token{_range(size)}"


def _range(interval: Interval) -> str:
    return "" if math.isnan(interval.low) else f" (95 % interval {interval.low:.3g} to {interval.high:.3g})"


def _ramps(study: Study) -> str:
    """How each batch schedule ends against the constant batch, each at its best learning rate, paired by seed."""
    cards = study.records.runs.set_index("id")
    names = study.points["id"].map(cards.get("batch.name", pd.Series(dtype=str)))
    best = study.points[study.points["size"] == study.points["size"].max()].groupby([names, "seed"])["capped"].min()
    if CONSTANT not in set(names.dropna()) or names.nunique() < 2:
        return ""
    changes = {
        str(name): student_t((losses.droplevel(0) - best[CONSTANT]).dropna())
        for name, losses in best.groupby(level=0)
        if name != CONSTANT
    }
    lower = {name: change for name, change in changes.items() if change.high < 0}
    higher = {name: change for name, change in changes.items() if change.low > 0}
    same = [name for name in changes if name not in {**lower, **higher}]
    parts = [_most(word, side) for word, side in (("lower", lower), ("higher", higher)) if side]
    parts += [f"not certainly otherwise with {listed(same)}"] if same else []
    against = "Against the constant batch at as many tokens, each at its best learning rate"
    return f"{against}, the loss ends {'; '.join(parts)}."


def _most(word: str, changes: Mapping[str, Interval]) -> str:
    """The schedules that end ``lower``, or ``higher``, and by how much the one that does most."""
    most = max(changes, key=lambda name: abs(changes[name].mean))
    size = -changes[most] if changes[most].mean < 0 else changes[most]
    return f"{word} with {listed(changes)}, most with {most}, by {size.mean:.3f} nats/token{_range(size)}"


def _noise(study: Study) -> str:
    points = study.points
    if points["size"].nunique() < 2 or points["arm"].nunique() > 1:
        return ""
    tenths = by_tenth(study.records).reset_index().merge(points, on="id", suffixes=("", "_final"))
    if tenths.empty:
        return ""
    return f"At the best learning rate, as the loss falls, the noise scale goes {'; '.join(_growth(tenths))}."


def _growth(tenths: pd.DataFrame) -> list[str]:
    """How far the noise scale goes at the smallest and the largest size, from the first tenth on record to the last."""
    parts = []
    for size in (tenths["size"].min(), tenths["size"].max()):
        of_size = tenths[tenths["size"] == size]
        best_lr = of_size.groupby("lr")["loss_final"].mean().idxmin()
        by_tenths = of_size[of_size["lr"] == best_lr].groupby("tenth")
        scales, losses = np.exp(by_tenths["noise_scale"].agg(lambda one: np.log(one).mean())), by_tenths["loss"].mean()
        parts.append(
            f"from {scales.iloc[0]:.3g} sequences at {losses.iloc[0]:.2f} nats/token to {scales.iloc[-1]:.3g} at "
            f"{losses.iloc[-1]:.2f} with {count(float(size))} parameters"
        )
    return parts
