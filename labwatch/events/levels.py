"""Levels of logged columns beyond which a user wants an alarm: the file of ``lab watch --thresholds``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.core import files
from lab.core.errors import RequestError, nearest
from lab.core.windows import Numbers
from labwatch.events.log_names import NAMES, STEP

LEVEL = "level_"  # before the name of a column, the kind of an alarm
# What is measured in a log, or follows from it.
COLUMNS = [*(name for name in NAMES if name != STEP), "output_logit"]


class Level(NamedTuple):
    """A level of a column, and whether the alarm is raised above it or below."""

    value: float
    is_above: bool

    def passed(self, value_n: Numbers) -> NDArray[np.bool_]:
        """Where values lie beyond it; NaN lies nowhere."""
        with np.errstate(invalid="ignore"):
            return value_n > self.value if self.is_above else value_n < self.value


def read_levels(path: Path, measured: Iterable[str] = ()) -> dict[str, Level]:
    """The levels in a file of JSON such as ``{"attention_logit_max": {"above": 293}}``, by column.

    Args:
        path: the file.
        measured: what a recording measures beside the columns of logs.

    Raises:
        RequestError: the file cannot be read, or an entry names no column of logs or no level.
    """
    if not path.is_file():
        raise RequestError(f"no thresholds {path}; lab predict --params 7e9 lr=3e-4 --thresholds FILE writes some")
    try:
        content = files.read_json(path, dict)
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} cannot be read as thresholds: {error}") from None
    known = [*COLUMNS, *(name for name in measured if name not in COLUMNS)]
    for column, entry in content.items():
        if column not in known:
            raise RequestError(f"{path}: a log has no column {column!r}; {nearest(column, known)}")
        is_level = isinstance(entry, Mapping) and len(entry) == 1 and {*entry} <= {"above", "below"}
        if not is_level or not all(type(value) in (int, float) and math.isfinite(value) for value in entry.values()):
            raise RequestError(f'{path}: {column} takes {{"above": NUMBER}} or {{"below": NUMBER}}, not {entry!r}')
    pairs = {column: next(iter(entry.items())) for column, entry in content.items()}
    return {column: Level(float(value), side == "above") for column, (side, value) in pairs.items()}
