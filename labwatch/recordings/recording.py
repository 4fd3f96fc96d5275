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

LOSS, STEP, HEADER, SETTINGS, WRITTEN = "loss", "step", "recorder", "settings", "written"
OF_LOSS = "loss"  # beside the parts of the model, for what is computed of its outputs
OF_PROBABILITIES = "probabilities for logits"  # beside the functions of a loss, if it takes these
OF_PARTS = "of"  # of a group of weights the parts of the model that they are of
MAX_NORM = "max_norm"  # the norm to which gradients are clipped, a setting beside those of the groups
# Of each group: settings that are true or false, how many of its weights lost their state, and updates since the loss
# before.
SWITCHES, STATES_LOST, UPDATES = ("maximize", "amsgrad", "nesterov"), "weights_without_their_state", "updates_in_a_step"
DECAYS = ("beta", "momentum", "alpha", "rho")  # how settings begin that say what a mean keeps of what it was
LONGEST_HEADER = 2**16  # bytes


class Setting(NamedTuple):
    """A number that an optimizer was told for a group of weights, or the norm to which gradients are clipped.

    Attributes:
        name: such as ``lr``, ``beta2`` or ``max_norm``.
        parts: of the model, of which the weights of the group are; none for gradients of all.
        step_n, value_n: its values, and from which steps on they hold; slow changes are known at measured steps.
    """

    name: str
    parts: list[str]
    step_n: list[int]
    value_n: list[float]

    def at(self, step_m: Any) -> Numbers:
        """Its values at steps; before the first one that is known, that one."""
        known_m = np.searchsorted(self.step_n, step_m, side="right") - 1
        values: Numbers = np.array(self.value_n, dtype=float)[np.maximum(known_m, 0)]
        return values


class Recording(NamedTuple):
    """A run as it was recorded.

    Attributes:
        header: what was found in the model, of the last start of the run.
        step_m: the steps at which the model was measured, in rising order.
        columns: the numbers ``[m]`` by name and part of the model, empty for the whole; NaN where one is missing, and
            infinite where one is not finite.
        loss_step_n, loss_n: the loss at every step.
        names: by what is so of them, such as ``gradient_zero``, and the part of the model: of some rows the weights.
        settings: of each group of weights of each optimizer.
        written: by step and part weights that something else than an optimizer wrote before the update of the step; of
            several such steps in a row the first one has them, and the one after the last has none.
    """

    header: Mapping[str, Any]
    step_m: NDArray[np.int64]
    columns: Mapping[tuple[str, str], Numbers]
    loss_step_n: NDArray[np.int64]
    loss_n: Numbers
    names: Mapping[tuple[str, str], Mapping[int, list[str]]]
    settings: list[Setting]
    written: Mapping[int, Mapping[str, list[str]]]

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
    header, rows = dict[str, Any](), dict[int, dict[str, Any]]()
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
            is_begun = False
        rows[step] = rows.get(step, {}) | row
    rows = dict(sorted(rows.items()))
    losses = {step: row[LOSS] for step, row in rows.items() if isinstance(row.get(LOSS), int | float)}
    measured = {step: row for step, row in rows.items() if not row.keys() <= {STEP, LOSS, SETTINGS, WRITTEN}}
    columns = defaultdict[tuple[str, str], Numbers](lambda: np.full(len(measured), math.nan))
    names = defaultdict[tuple[str, str], dict[int, list[str]]](dict)
    for index, row in enumerate(measured.values()):
        for name, value in row.items():
            quantity, _, place = name.partition("/")
            if isinstance(value, int | float) and name != STEP:
                columns[quantity, place][index] = value if math.isfinite(value) else math.inf
            elif isinstance(value, list) and value and isinstance(value[0], str):
                names[quantity, place][index] = value
    return Recording(
        header,
        np.array([*measured], dtype=np.int64),
        dict(columns),
        np.array([*losses], dtype=np.int64),
        np.array([loss if math.isfinite(loss) else math.inf for loss in losses.values()], dtype=float),
        dict(names),
        _settings({step: row[SETTINGS] for step, row in rows.items() if SETTINGS in row}),
        {step: row[WRITTEN] for step, row in rows.items() if WRITTEN in row},
    )


def _settings(told: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> list[Setting]:
    found, parts = dict[tuple[str, str], Setting](), dict[str, list[str]]()
    for step, groups in told.items():
        for group, numbers in groups.items():
            parts[group] = numbers.get(OF_PARTS, parts.get(group, []))
            for name, value in numbers.items():
                if name != OF_PARTS:
                    setting = found.setdefault((group, name), Setting(name, parts[group], [], []))
                    if isinstance(value, list) and setting.step_n[-1:] != [step - 1]:  # what was before a jump
                        setting.step_n.append(step - 1)
                        setting.value_n.append(value[0])
                    setting.step_n.append(step)
                    setting.value_n.append(value[-1] if isinstance(value, list) else value)
    return list(found.values())
