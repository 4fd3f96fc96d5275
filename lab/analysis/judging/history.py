"""Readings of claims: each time that a claim was judged on fresh seeds, with its verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lab.analysis.judging.decision import DECIDED
from lab.core import files
from lab.core.errors import RequestError

FILE = "readings.csv"


class ClaimReading(NamedTuple):
    """A verdict on fresh seeds: the rule of the claim was fixed before they were seen.

    Attributes:
        seeds: the seeds as ranges, such as ``3-9``.
        date: the date of the records, as in ISO 8601.
        verdict: the verdict by the rules of that day.
        effect: that of the part with the strongest evidence against the claim; 95 % interval ``low`` to ``high``.
    """

    seeds: str
    date: str
    verdict: str
    effect: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.seeds} ({self.date}): {self.verdict}"


def number(earlier: Sequence[ClaimReading]) -> int:
    """The number of the last of these readings: one more than the undecided ones before it.

    Decided readings do not count, since a claim that was decided is tested anew; only reading on until an interval
    decides costs alpha.
    """
    return 1 + sum(reading.verdict not in DECIDED for reading in earlier[:-1])


def readings(folders: Sequence[Path]) -> Mapping[str, list[ClaimReading]]:
    """The readings of each claim, by its name and in the order of time; empty if there is no file of readings.

    The file is that of the first folder that has one, or else of the first parent of a folder that has one.

    Raises:
        RequestError: the file cannot be read.
    """
    for path in (folder / FILE for folder in [*folders, *(folder.resolve().parent for folder in folders)]):
        if path.exists():
            try:
                return {
                    str(claim): [ClaimReading(*row) for row in rows[list(ClaimReading._fields)].itertuples(index=False)]
                    for claim, rows in files.read_csv(path).groupby("claim", sort=False)
                }
            except (OSError, ValueError, KeyError):
                columns = ",".join(("claim", *ClaimReading._fields))
                raise RequestError(f"{path} cannot be read as readings: a table with columns {columns}") from None
    return {}
