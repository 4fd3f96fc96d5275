"""A study: the records of some results folders and everything the report says about them, as data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from lab.analysis.curves import load, points
from lab.analysis.sensitivity import all_pairs, by_curve, judge, per_seed
from lab.core.errors import RequestError
from lab.records.store import Records


class Study(NamedTuple):
    """Tables as made by ``judge(points)``, ``per_seed``, ``by_curve`` and ``all_pairs``."""

    records: Records
    points: pd.DataFrame
    seeds: pd.DataFrame
    curves: pd.DataFrame
    pairs: pd.DataFrame

    @property
    def failed(self) -> pd.DataFrame:
        """Runs without a result."""
        return self.records.runs[self.records.runs["status"] == "failed"]


def study(folders: Sequence[str | Path]) -> Study:
    """Read the folders and reckon.

    Raises:
        RequestError: a folder cannot be read, or none of its runs ended.
    """
    records = load(*folders)
    where = points(records.runs)
    if where.empty:
        raise RequestError(f"all {len(records.runs)} runs failed, the first with: {records.runs['reason'].iloc[0]}")
    seeds = per_seed(where)
    return Study(records, judge(where), seeds, by_curve(seeds), all_pairs(where))
