"""Measures in the committed records the limits that come with the package, as ``risks.yaml`` describes them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import lab.analysis.laws.fits as fits
import lab.analysis.probe_values as probe_values
import public_limits
from lab.analysis.curves import load
from lab.analysis.laws.brackets import PowerLaw
from lab.analysis.laws.fits import Crossing, Line, Prediction
from lab.analysis.statistics import student_t
from lab.analysis.text import listed
from lab.core import shipped
from lab.features.numbers.limits import FILE, Limit
from lab.features.predict.forecasts import GRADIENT, LOGIT, make_forecasts
from lab.records import store
from lab.studies.batch_size.effects import critical_batches
from lab.studies.claims.evidence import ArmTables, Evidence, each_value_of, read_evidence, sizes_of, steps_of
from lab.studies.claims.quantities import log10, quantity
from lab.studies.claims.registry import CLAIMS
from lab.studies.claims.verdicts import effects_of
from lab.studies.precision.effects import in_formats

FORECASTS = {"early_logits": LOGIT, "gradients": GRADIENT}
MOST_BLOCKS = 1000  # up to which a depth is searched
# What runs in one format and another may differ in, and what an arm of such a comparison may have.
FORMATS = ("precision", "attention_precision", "norm_gains", "stochastic_rounding", "intervention")


def limits_text(results: Path) -> str:
    """The content of the file of limits, computed from the records in a folder of results."""
    found = {
        name: measure(entry, results) for name, entry in shipped.load(FILE.with_name("risks.yaml"))["limits"].items()
    }
    lines = [f"{name}: {_flow(_known(limit))}" for name, limit in found.items()]
    return "\n".join(["# Written by `make results-readme` from the committed records.", *lines, ""])


def public_text() -> str:
    """The content of the file on public runs."""
    content = public_limits.public_content()
    lines = ["# Written by `make results-readme` from lab/studies/real_runs.", f"ranges: {_flow(content['ranges'])}"]
    lines.append("# By optimizer, how many runs a single change of a tuned recipe broke, and how many were tried.")
    lines += ["changes:", *(f"  {optimizer}: {_flow(counts)}" for optimizer, counts in content["changes"].items())]
    return "\n".join([*lines, ""])


def _known(limit: Limit) -> dict[str, Any]:
    """Its fields but for those that are empty or NaN."""
    firsts = {name: value[0] if isinstance(value, tuple) else value for name, value in vars(limit).items()}
    empty = [name for name, first in firsts.items() if first in (None, {}) or first != first]
    return {name: value for name, value in vars(limit).items() if name not in empty}


def _flow(value: Any) -> str:
    """A value in the flow style of YAML, which takes a number with an exponent for text unless it has a point."""
    if isinstance(value, Line | PowerLaw):
        value = value._asdict()
    if isinstance(value, Mapping):
        keys = (key if isinstance(key, str) else f"{key:g}" for key in value)
        return f"{{{', '.join(f'{key}: {_flow(each)}' for key, each in zip(keys, value.values(), strict=True))}}}"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_flow, value))}]"
    if not math.isfinite(value):
        return f"{'-' * (value < 0)}.{'inf' if math.isinf(value) else 'nan'}"
    text = f"{value:.6g}"
    return text if "." in text else text.replace("e", ".0e")


def measure(entry: Mapping[str, Any], results: Path) -> Limit:
    """The limit that an entry of ``risks.yaml`` describes.

    Its first key names how it is measured, a key of ``KINDS``; the others are arguments of that function.

    Raises:
        MissingRunsError: the records do not hold it.
    """
    kind, *_ = entry
    arguments = dict(entry)
    of = arguments.pop(kind)
    return KINDS[kind](of, **arguments) if kind in PUBLIC_KINDS else KINDS[kind](results, of, **arguments)


def _forecast(results: Path, name: str, *, sweep: str, arm: str) -> Limit:
    """A measurement over size by learning rate, as ``lab predict`` makes it of a sweep; of logits with their limit."""
    chosen, records = FORECASTS[name], load(results / sweep)
    (found,) = (forecast for forecast in make_forecasts(records, chosen) if forecast.arm == arm)
    lines = {lr: found.lines[lr] for lr in sorted(found.scored)}
    steps = probe_values.updates(records.runs).loc[found.runs["id"]]
    return Limit(
        sweep,
        _recipe(records.runs),
        found.runs["seed"].nunique(),
        (float(found.sizes[0]), float(found.sizes[-1])),
        (int(steps.min()), int(steps.max())),
        tried=(min(lines), max(lines)),
        lines=lines,
        beyond=float(f"{found.limit:.4g}") if chosen is LOGIT else math.nan,
    )


def _cost_of_rate(
    results: Path, of: str | Mapping[str, Any], *, claim: str, least: float, arms: Sequence[int]
) -> Limit:
    """The learning rate from which a cost stays above ``least``.

    The cost is a quantity of an arm of a claim at each learning rate, minus that of a second one if two are named.
    """
    chosen = [_arms(results, claim)[arm] for arm in arms]
    return _over_rates(chosen, CLAIMS[claim].sweep, of, least)


def _cost_of_format(results: Path, of: str, *, sweep: str, formats: Sequence[str], least: float) -> Limit:
    """The learning rate from which a cost of one format stays above ``least``, beside another one on the same seeds.

    The formats are named as ``in_formats`` takes them.
    """
    (group,) = _evidence(results / sweep).groups(FORMATS)
    return _over_rates(in_formats(group, *formats), sweep, of, least)


def _over_rates(chosen: Sequence[ArmTables], sweep: str, of: str | Mapping[str, Any], least: float) -> Limit:
    lrs = chosen[0].lrs
    costs = []
    for lr in lrs:
        named = {of: lr} if isinstance(of, str) else {**of, "at": lr}
        cost, *base = (_largest(quantity(arm, named)) for arm in chosen)
        costs.append(cost - base[0] if base else cost)
    return _limit(chosen[0], sweep, level=_crossing(lrs, costs, least, 1), tried=(lrs[0], lrs[-1]))


def _cost_of_value(
    results: Path,
    of: str | Mapping[str, Any],
    *,
    claim: str,
    each: str,
    harmless: str,
    least: float,
    times: float,
) -> Limit:
    """The value of a key from which a cost stays above ``least``, above it if the ``smallest`` one is harmless.

    The cost is a quantity of the arms of a claim, minus that of the arm with the ``smallest`` or ``largest`` value.

    Args:
        times: what values are multiplied by, to be in the unit of the user's number.
    """
    arm = _arms(results, claim)[0]
    groups = arm.evidence.groups(CLAIMS[claim].frees)
    (group,) = (group for group in groups if set(arm.numbers) <= set(group.curves))
    arms = each_value_of(group, each, 0.0)
    values = [float(other.setting(each)) * times for other in arms]
    losses = [_largest(quantity(other, of)) for other in arms]
    base, sign = (losses[0], 1) if harmless == "smallest" else (losses[-1], -1)
    found = _crossing(values, [loss - base for loss in losses], least, sign)
    return _limit(arms[0], CLAIMS[claim].sweep, level=found, tried=(values[0], values[-1]))


def _crossing(x: Sequence[float], costs: Sequence[pd.Series[float]], least: float, sign: int) -> Crossing:
    """Where the mean over seeds of a cost crosses ``least``, and where the ends of its 95 % interval do.

    For ``sign`` 1 the cost stays above it from there on, for -1 below it.
    """
    intervals = [student_t(cost) for cost in costs]
    middle, low, high = (np.array([interval[place] for interval in intervals]) for place in range(3))
    return fits.crossing(np.array(x), Prediction(middle, low, high), least, sign)


def _critical_batch(results: Path, of: str, *, claim: str) -> Limit:
    """The critical batch (tokens) of an optimizer."""
    arms = _arms(results, claim)
    batches = np.log10(critical_batches(arms)[of] * float(arms[0].setting("seq_len")))
    interval = student_t(batches)
    sizes = [float(arm.setting("batch_size")) * float(arm.setting("seq_len")) for arm in arms]
    level = Crossing(*(10**end for end in interval[:3]))
    return _limit(arms[0], CLAIMS[claim].sweep, level=level, tried=(min(sizes), max(sizes)))


def _growth(results: Path, of: str, *, claim: str, arm: Mapping[str, Any], lr: float, beyond: float) -> Limit:
    """The number of blocks after which log10 of a probe crosses a level, from its line over the blocks of an arm."""
    (evidence,) = {chosen.evidence for chosen in _arms(results, claim)}
    group = max(evidence.groups(["model", *arm]), key=lambda group: len(group.curves))
    (chosen,) = group.arms(arm)
    blocks = [place for place in chosen.locations(of) if place.startswith("block")]
    values = pd.concat([log10(chosen.probe(lr, of, place, probe_values.late)).iloc[:, -1] for place in blocks], axis=1)
    numbers = np.arange(1, len(blocks) + 1)
    line = fits.fit(np.tile(numbers, len(values)), (10**values).to_numpy().ravel())
    searched = np.geomspace(1, MOST_BLOCKS, fits.SEARCHED_SIZES)
    found = fits.beyond(searched, line.predict(searched), 10**beyond, 1)
    return _limit(chosen, CLAIMS[claim].sweep, level=found, tried=(1, len(blocks)))


PUBLIC_KINDS = ("failing_rate", "shortest_warm_up", "rounding_cost")
KINDS: Mapping[str, Callable[..., Limit]] = {
    "forecast": _forecast,
    "failing_rate": public_limits.failing_rate,
    "shortest_warm_up": public_limits.shortest_warm_up,
    "rounding_cost": public_limits.rounding_cost,
    "cost_over_rates": _cost_of_rate,
    "cost_of_format": _cost_of_format,
    "cost_over_values": _cost_of_value,
    "critical_batch": _critical_batch,
    "growth": _growth,
}


def _recipe(runs: pd.DataFrame) -> str:
    """The optimizers and the schedules of runs."""
    optimizers, schedules = (listed(sorted(set(runs[key]))) for key in ("optimizer.name", "schedule.name"))
    return f"{optimizers} with a {schedules} schedule"


@cache
def _evidence(folder: Path) -> Evidence:
    return read_evidence(folder, store.read(folder))


def _arms(results: Path, claim: str) -> list[ArmTables]:
    """The arms of a claim in the records of its own sweep."""
    arms, _ = effects_of(CLAIMS[claim], [_evidence(results / CLAIMS[claim].sweep)])
    return arms


def _largest(table: pd.DataFrame | pd.Series[float]) -> pd.Series[float]:
    """A quantity per seed, of the largest model."""
    return table.iloc[:, -1] if isinstance(table, pd.DataFrame) else table


def _limit(arm: ArmTables, sweep: str, **found: Any) -> Limit:
    """A limit that was found in an arm of a sweep."""
    sizes, steps = sizes_of([arm]), steps_of([arm])
    ends = float(sizes[0]), float(sizes[-1])
    return Limit(sweep, _recipe(arm.evidence.records.runs), len(arm.seeds), ends, (steps[0], steps[-1]), **found)
