"""The cause of a loss spike: data, weights, state of the optimizer, or their combination (PaLM's ablation)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pandas as pd

from lab.analysis.events.costs import spike_costs
from lab.records.store import Records

EARLIER = "earlier_state"  # the response that restores earlier weights or moments when a burst begins
WEIGHTS, MOMENTS, DATA = "response.rewind_weights", "response.rewind_moments", "burst.fraction"
MEASURES = ("peak", "final")


class Cell(NamedTuple):
    """A cell of the ablation: which of three factors are those of the spike.

    Attributes:
        weights: whether the weights are those of the spike, not earlier ones of the same run.
        moments: whether the optimizer's moments are those of the spike, not earlier ones.
        data: whether the batches are those of the burst, not ordinary ones.
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
        Columns ``burst``; ``weights``, ``moments`` and ``data``, as in ``Cell``; and ``peak`` and ``final`` of
        ``spike_costs``: the largest held-out loss from the burst on minus the usual one, and the final one, nats/token.
    """
    runs = records.runs
    ablated = runs[runs["response"] == EARLIER] if "response" in runs else runs.head(0)
    rows = [(row["burst"], *Cell.of(row)) for row in ablated.to_dict("records")]
    table = pd.DataFrame(rows, ablated["id"].to_list(), ["burst", *Cell._fields])
    return table.join(spike_costs(records)[list(MEASURES)])


def rise(loss: Mapping[Cell, Any], *, weights: bool, moments: bool) -> Any:
    """Loss with the burst's batches minus that with ordinary batches, in the same state."""
    return loss[Cell(weights, moments, data=True)] - loss[Cell(weights, moments, data=False)]


def factors(loss: Mapping[Cell, pd.Series]) -> pd.DataFrame:
    """Contributions of each factor to the rise of a loss, from its values in all eight cells.

    Returns:
        A row for each index of the losses, such as a seed. Column ``data`` is the rise in the state of the spike, d(s).
        The other columns are interactions with the data, I = d(s) - d(s'): the decrease of the rise with earlier
        ``weights`` alone, with earlier ``moments`` alone, and with both (``state``). If the data alone cause the spike,
        interactions are zero; if it also needs this state, I = d(s).
    """
    own = rise(loss, weights=True, moments=True)
    earlier = {
        "weights": rise(loss, weights=False, moments=True),
        "moments": rise(loss, weights=True, moments=False),
        "state": rise(loss, weights=False, moments=False),
    }
    return pd.DataFrame({"data": own, **{name: own - other for name, other in earlier.items()}})


def factors_by_seed(records: Records, measure: str) -> pd.DataFrame:
    """``factors`` of a measure, ``peak`` or ``final``, indexed by burst and the other columns in which runs differ.

    Seeds and settings without all eight cells are left out.
    """
    table = cells(records)
    cards = records.runs.set_index("id").loc[table.index]
    keys = ["burst", "model.width", "model.depth", "optimizer.lr", "seed"]
    by_cell = {
        Cell(*map(bool, cell)): group.set_index([group["burst"], *(cards.loc[group.index, key] for key in keys[1:])])
        for cell, group in table.groupby(list(Cell._fields))
    }
    if len(by_cell) < 8:
        return pd.DataFrame(columns=["data", "weights", "moments", "state"], dtype=float)
    return factors({cell: group[measure] for cell, group in by_cell.items()}).dropna()
