"""What became of arms in public runs of large models: how many of the single changes that were tried broke."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import pandas as pd

# Written by ``make results-readme`` from the public runs.
FILE = Path(__file__).with_name("public_runs.csv")


class Broken(NamedTuple):
    """How many public runs of a size broke: they end half a nat or more above the tuned base that they change."""

    size: str
    broken: int
    runs: int

    def __str__(self) -> str:
        return f"{self.broken} of {self.runs} at {self.size}"


@cache
def broken_public_runs() -> dict[str, list[Broken]]:
    """By arm the public runs that broke, for each size."""
    found: dict[str, list[Broken]] = {}
    for row in pd.read_csv(FILE).itertuples():
        found.setdefault(str(row.arm), []).append(Broken(str(row.size), int(row.broken), int(row.runs)))  # type: ignore[arg-type]
    return found
