"""How often a claim has been judged on fresh seeds, and how it came out each time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from lab.analysis.judging.decision import DECIDED
from lab.core.errors import RequestError

FILE = "readings.csv"


class ClaimReading(NamedTuple):
    """A verdict on seeds on which no rule had been made.

    Attributes:
        seeds: as ranges, ``3-9``.
        date: of the records, as in ISO 8601.
        verdict: by the rules of that day.
        effect: of the part that spoke loudest against the claim, with its 95 % interval from ``low`` to ``high``.
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
    """Which reading this is, whose record is the last of these: the first, and one more for each left undecided before.

    A claim that was decided and is read again is tested anew; only reading on until an interval decides costs alpha.
    """
    return 1 + sum(reading.verdict not in DECIDED for reading in earlier[:-1])


def readings(folders: Sequence[Path]) -> Mapping[str, list[ClaimReading]]:
    """By name of the claim, earliest first; none where no folder has any.

    Those of the first folder that has any count; where none of these has, those of the first folder around one.

    Raises:
        RequestError: the file cannot be read.
    """
    for path in (folder / FILE for folder in [*folders, *(folder.resolve().parent for folder in folders)]):
        if path.exists():
            try:
                return {
                    str(claim): [ClaimReading(*row) for row in rows[list(ClaimReading._fields)].itertuples(index=False)]
                    for claim, rows in pd.read_csv(path).groupby("claim", sort=False)
                }
            except (OSError, ValueError, KeyError):
                columns = ",".join(("claim", *ClaimReading._fields))
                raise RequestError(f"{path} cannot be read as readings: a table with columns {columns}") from None
    return {}
