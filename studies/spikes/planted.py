"""Measures of runs with planted bursts: arms of the optimizer, repeated bursts, state against data, Adam's updates."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from lab.analysis.curves import arm_factors, points, setting_name, setting_text
from lab.analysis.probe_values import recorded
from lab.core.schema import batches_of_bursts
from lab.core.shipped import default_recipe
from lab.records.store import Records
from labwatch.events.scores import REPEATS, repeats_of
from studies.claims.costs import HELD_OUT, NONE, first_onsets, spike_costs

RMS, DESCENT, LAG = "update_rms", "update_descent_cosine", "grad_lag_cosine"
EMBEDDING, ALL_WEIGHTS = "embedding", ""
# An update is large if its RMS is at least this many times the usual one.
LARGE = 1.5
TRAITS = ("lag", "rms", "embedding_rms", "largest_rms", "cosine", "rising_cosine", "large_cosine")


def update_traits(records: Records) -> pd.DataFrame:
    """Traits of the updates of each run that has a burst and recorded both cosines, indexed by its id.

    An RMS is a mean over tensors; a cosine is taken over all weights together. A usual value is one over the second
    half of the updates before the burst.

    Returns:
        A row per run, NaN where nothing was recorded, with the columns

        - ``lag``: usual mean cosine of successive gradients.
        - ``rms`` and ``embedding_rms``: usual median RMS of the update; ``largest_rms``: the largest from the burst on.
        - ``cosine``: usual median cosine of the update with the descent.
        - ``rising_cosine``: mean cosine from the burst to the highest held-out loss.
        - ``large_cosine``: mean cosine over the large updates from the burst on, or at the largest if none is
          large.
    """
    onsets = first_onsets(records)
    planted = records.of(onsets.index)
    places = {
        "embedding_rms": (RMS, EMBEDDING),
        "cosine": (DESCENT, ALL_WEIGHTS),
        "lag": (LAG, ALL_WEIGHTS),
        "loss": (HELD_OUT, ""),
    }
    series = {name: recorded(planted, *place).set_index(["id", "step"])["value"] for name, place in places.items()}
    rms = planted.metrics[planted.metrics["probe"] == RMS].groupby(["id", "step"])["value"].mean()
    table = pd.DataFrame({"rms": rms, **series})
    of_updates = table[table["cosine"].notna()]
    by_run = {str(run): of_run.droplevel("id") for run, of_run in of_updates.groupby(level="id")}
    rows = {run: _traits(of_run, int(onsets[run])) for run, of_run in by_run.items()}
    return pd.DataFrame.from_dict(rows, orient="index", columns=list(TRAITS), dtype=float)


def _traits(updates: pd.DataFrame, onset: int) -> tuple[float, ...]:
    """The traits of a run from the columns ``rms``, ``embedding_rms``, ``cosine``, ``lag``, ``loss`` by step."""
    usual, after = updates.loc[onset / 2 : onset - 1], updates.loc[onset:]
    rms = usual["rms"].median()
    losses = after["loss"].iloc[:-1]  # the last one is on all held-out text
    # the held-out loss of a step is measured before its update
    rising = after[after.index < losses.idxmax()] if losses.notna().any() else after.head(0)
    large = after[after["rms"] >= min(LARGE * rms, after["rms"].max())] if not after.empty else after
    return (
        usual["lag"].mean(),
        rms,
        usual["embedding_rms"].median(),
        after["rms"].max() if not after.empty else math.nan,
        usual["cosine"].median(),
        rising["cosine"].mean(),
        large["cosine"].mean(),
    )


RECIPE = "recipe"  # the name of the arm that is the default recipe
ON = "on"  # the value of an intervention that is present


def arm_costs(records: Records) -> pd.DataFrame:
    """``spike_costs`` of runs with a burst but no response or restart log; with ``id``, ``bad_batches`` and ``name``.

    The name holds the settings in which an arm differs from the default recipe: ``beta2 0.98``.
    """
    cards = records.runs.reindex(columns=["id", "bad_batches", "response", "restarts", "status"])
    is_plain = (cards[["response", "restarts"]].fillna(NONE) == NONE).all(axis=1)
    plain = cards[(cards["bad_batches"].fillna(NONE) != NONE) & is_plain]
    names: dict[str, str] = {}
    for _, of_burst in plain[plain["status"] != "failed"].groupby("bad_batches"):
        names |= _names(records.runs[records.runs["id"].isin(of_burst["id"])])
    costs = spike_costs(records)
    costs = costs[costs.index.isin(list(names))]
    burst = plain.set_index("id")["bad_batches"].reindex(costs.index)
    return costs.assign(id=costs.index, bad_batches=burst, name=costs.index.map(names))


def _names(runs: pd.DataFrame) -> dict[str, str]:
    """The name of each run's arm, by run id."""
    names = {label: _arm_name(factors) for label, factors in arm_factors(runs).items()}
    labelled = points(runs)
    return dict(zip(labelled["id"], labelled["arm"].map(names), strict=True))


def _arm_name(factors: Mapping[str, Hashable]) -> str:
    recipe = default_recipe()
    unusual = {key: value for key, value in factors.items() if value != recipe.get(key)}
    named = [key for key, value in unusual.items() if value is not None or recipe.get(key) == ON]
    return " + ".join(_setting(key, unusual[key], recipe.get(key)) for key in named) or RECIPE


def _setting(key: str, value: Hashable, usual: Hashable) -> str:
    """``beta2 0.98``, ``no clip``, ``embedding gradient shrink``; of a variant's name the part after the usual one."""
    name = setting_name(key, [key]).replace("_", " ")
    if ON in (value, usual):
        return name if value == ON else f"no {name}"
    if isinstance(value, str):
        return value.removeprefix(f"{usual}_").replace("_", " ")
    return f"no {name}" if value == math.inf else setting_text(name, value)


START, FRACTION, STEPS = "bad_batches.start", "bad_batches.fraction", "steps"
CLEAN = "no burst"
PAIR = ("bad_batches", "size", "lr", "seed")  # columns in which two runs agree whose costs are compared


def repeated_costs(records: Records) -> pd.DataFrame:
    """``spike_costs`` of runs with a burst, if it comes several times in some of them; else no rows.

    Returns:
        These columns with ``id``, ``number`` of bursts, and ``name``. The name contains the first step if it is not
        that of the earliest burst, and the number of batches by which the run is shorter than the longest.
    """
    cards = records.runs[records.runs.get("bad_batches", pd.Series(NONE, records.runs.index)).fillna(NONE) != NONE]
    if cards.empty or REPEATS not in cards or cards[REPEATS].isna().all():
        return spike_costs(records).head(0).assign(id="", number=0, name="")
    first, longest = cards[START].min(), int(cards[STEPS].max())
    rows = {
        card["id"]: (_number(card), _bursts_name(card, card[START] == first, longest))
        for card in cards.to_dict("records")
    }
    names = pd.DataFrame.from_dict(rows, orient="index", columns=["number", "name"])
    return spike_costs(records).join(names, how="inner").rename_axis("id").reset_index()


def change(costs: pd.DataFrame, column: str, reference: str, pair: Sequence[str] = PAIR) -> pd.Series:
    """A cost minus that of the run with this name that agrees in the columns ``pair``; NaN if there is none."""
    usual = costs[costs["name"] == reference].drop_duplicates(pair).set_index(list(pair))[column]
    return costs[column].sub(usual.reindex(pd.MultiIndex.from_frame(costs[list(pair)])).to_numpy())


def _number(card: Mapping[Hashable, Any]) -> int:
    return repeats_of(card) if card[FRACTION] else 0


def _bursts_name(card: Mapping[Hashable, Any], is_first: bool, longest: int) -> str:
    number, fewer = _number(card), longest - int(card[STEPS])
    name = f"{number} burst{'s' * (number > 1)}" if number else CLEAN
    if number and not is_first:
        start = batches_of_bursts(float(card[START]), 0, int(card[STEPS]))[0].start
        name += f" from step {start}"
    return name + (f" and {fewer} batches fewer" if fewer else "")


EARLIER = "earlier_state"  # the response that restores earlier weights or moments when a burst begins
WEIGHTS, MOMENTS, DATA = "response.rewind_weights", "response.rewind_moments", "bad_batches.fraction"
MEASURES = ("peak", "final")


class Cell(NamedTuple):
    """A cell of the ablation: which of three factors are the spike's own.

    Attributes:
        weights: whether the weights are the ones at the spike, not earlier ones of the same run.
        moments: whether the optimizer's moments are the ones at the spike, not earlier ones.
        data: whether the batches are the burst's, not ordinary ones.
    """

    weights: bool
    moments: bool
    data: bool

    @classmethod
    def of(cls, config: Mapping[Any, Any]) -> Cell:
        """The cell of a run with these columns."""
        return cls(not config[WEIGHTS], not config[MOMENTS], config[DATA] > 0)


SPIKE = Cell(weights=True, moments=True, data=True)


def cells(records: Records) -> pd.DataFrame:
    """The runs of the ablation, indexed by run id.

    Returns:
        Columns ``bad_batches``; ``weights``, ``moments`` and ``data``, as in ``Cell``; and ``peak`` and ``final`` of
        ``spike_costs``: the largest held-out loss from the burst on minus the usual one, and the final one, nats/token.
    """
    runs = records.runs
    ablated = runs[runs["response"] == EARLIER] if "response" in runs else runs.head(0)
    rows = [(row["bad_batches"], *Cell.of(row)) for row in ablated.to_dict("records")]
    table = pd.DataFrame(rows, ablated["id"].to_list(), ["bad_batches", *Cell._fields])
    return table.join(spike_costs(records)[list(MEASURES)])


def factors(loss: Mapping[Cell, pd.Series] | pd.DataFrame) -> pd.DataFrame:
    """Contributions of each factor to the rise of a loss, from its values in all eight cells.

    Returns:
        A row for each index of the losses, such as a seed. Column ``data`` is the rise in the state of the spike, d(s).
        The other columns are interactions with the data, I = d(s) - d(s'): the decrease of the rise with earlier
        ``weights`` alone, with earlier ``moments`` alone, and with both (``state``). If the data alone cause the spike,
        interactions are zero; if it also needs this state, I = d(s).
    """

    def rise(weights: bool, moments: bool) -> Any:
        return loss[Cell(weights, moments, data=True)] - loss[Cell(weights, moments, data=False)]

    own = rise(weights=True, moments=True)
    earlier = {
        "weights": rise(weights=False, moments=True),
        "moments": rise(weights=True, moments=False),
        "state": rise(weights=False, moments=False),
    }
    return pd.DataFrame({"data": own, **{name: own - other for name, other in earlier.items()}})


def factors_by_seed(records: Records, measure: str) -> pd.DataFrame:
    """``factors`` of a measure, ``peak`` or ``final``, indexed by burst and the other columns in which runs differ.

    Seeds and settings without all eight cells are left out.
    """
    table = cells(records)
    keys = ["model.width", "model.depth", "optimizer.lr", "seed"]
    table = table.join(records.runs.set_index("id")[keys])
    by_cell = table.pivot_table(measure, ["bad_batches", *keys], list(Cell._fields))
    if by_cell.shape[1] < 8:
        return pd.DataFrame(columns=["data", "weights", "moments", "state"], dtype=float)
    return factors(by_cell).dropna()
