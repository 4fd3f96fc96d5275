"""Reads the lines of JSON that a recorder wrote."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.core import files
from lab.core.windows import Numbers

LOSS, STEP, HEADER = "loss", "step", "recorder"
LONGEST_HEADER = 2**16  # bytes


class Recording(NamedTuple):
    """A run as it was recorded.

    Attributes:
        header: what was found in the model, of the last start of the run.
        step_m: the steps at which the model was measured, in rising order.
        columns: the numbers ``[m]`` by name and part of the model, empty for the whole; NaN where one is missing, and
            infinite where one is not finite.
        loss_step_n, loss_n: the loss at every step.
        names: by what is so of them, such as ``gradient_zero``, and the part of the model: of some rows the weights.
    """

    header: Mapping[str, Any]
    step_m: NDArray[np.int64]
    columns: Mapping[tuple[str, str], Numbers]
    loss_step_n: NDArray[np.int64]
    loss_n: Numbers
    names: Mapping[tuple[str, str], Mapping[int, list[str]]]

    def places(self, name: str) -> list[str]:
        """The parts of the model in which a quantity was measured, or the whole alone."""
        places = [place for of, place in self.columns if of == name]
        return [place for place in places if place] or places


def is_recording(path: Path) -> bool:
    """Whether a file, which gzip may have compressed, begins with what a recorder writes first."""
    try:
        if not path.is_file():
            return False
        with files.open_file(path) as file:
            return HEADER in json.loads(files.unpacked(path, file).readline(LONGEST_HEADER))
    except (OSError, EOFError, ValueError):
        return False


def read_recording(path: Path) -> Recording:
    """Read a recording; of steps that a run took again after a restart the later ones count.

    A line that is no JSON is left out.

    Raises:
        OSError, EOFError: the file cannot be read.
        ValueError: it is not UTF-8.
    """
    header, rows, losses = dict[str, Any](), dict[int, dict[str, Any]](), dict[int, float]()
    is_begun = False
    with files.open_file(path) as file:
        content = files.unpacked(path, file).read(files.LARGEST_FILE + 1)
    if len(content) > files.LARGEST_FILE:
        raise OSError(f"larger than {files.LARGEST_FILE // files.MIB} MiB")
    for line in content.decode().splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # the last one, which is being written, or was when the run was killed
            continue
        if not isinstance(row, dict) or not {HEADER, STEP} & row.keys():
            continue
        if HEADER in row:
            header, is_begun = row, True
            continue
        step = row[STEP]
        if is_begun:
            rows = {at: earlier for at, earlier in rows.items() if at < step}
            losses = {at: earlier for at, earlier in losses.items() if at < step}
            is_begun = False
        if isinstance(loss := row.get(LOSS), int | float):
            losses[step] = loss if math.isfinite(loss) else math.inf
        if not row.keys() <= {STEP, LOSS}:
            rows[step] = row
    columns = defaultdict[tuple[str, str], Numbers](lambda: np.full(len(rows), math.nan))
    names = defaultdict[tuple[str, str], dict[int, list[str]]](dict)
    for index, step in enumerate(sorted(rows)):
        for name, value in rows[step].items():
            quantity, _, place = name.partition("/")
            if isinstance(value, int | float) and name != STEP:
                columns[quantity, place][index] = value if math.isfinite(value) else math.inf
            elif isinstance(value, list) and value and isinstance(value[0], str):
                names[quantity, place][index] = value
    steps = sorted(losses)
    return Recording(
        header,
        np.array(sorted(rows), dtype=np.int64),
        dict(columns),
        np.array(steps, dtype=np.int64),
        np.array([losses[step] for step in steps], dtype=float),
        dict(names),
    )
