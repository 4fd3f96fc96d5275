"""Which column of a table of runs is what: the quantities, the settings that set arms apart, and why others do not."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lab.core import shipped
from lab.core.errors import RequestError, nearest

# What columns are called; the file says which.
_NAMES: dict[str, Any] = shipped.load(Path(__file__).with_name("columns.yaml"))
USUAL_NAMES: dict[str, list[str]] = _NAMES["usual"]
LOGGED_STEPS, ARM_NAMES, RUN_NAMES = _NAMES["logged_steps"], _NAMES["arms"], _NAMES["runs"]
PLANNED_STEPS = [name for name in USUAL_NAMES["steps"] if name not in LOGGED_STEPS]
BOOKKEEPING = {*_NAMES["bookkeeping"], *LOGGED_STEPS}
# Nats in a unit of losses; a perplexity is their exponential.
LN2 = math.log(2)
LOSS_UNITS = {"nats": 1.0, "bits": LN2, "bits_per_byte": LN2, "perplexity": math.nan}
UNIT_NAMES = {"ppl": "perplexity", "perplexity": "perplexity", "bpb": "bits_per_byte", "bits_per_byte": "bits_per_byte"}
SIZE_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
MANY_LRS = 3  # at which each value of a column occurs that sets arms apart
# What a column is that holds none of the quantities: a setting that sets arms apart, or that all runs share; or else
# why it is no setting.
BEST = "column "  # before the name of a column of which the best is taken, among those of the design
DESIGN_NAMES = {"lr": "learning rate"}
ARM, SHARED, NAME = "arm", "same in all runs", "a name for each run"
EMPTY, NOTED, MEASURED, CUT = "empty", "bookkeeping", "measured", "cut short where a run diverged"
NOT_NAMED, NOT_NEEDED = "not named by --arm", "tells no runs apart"


class Columns(NamedTuple):
    """Which column holds what; ``None`` looks for a usual name, a number holds for all runs.

    Attributes:
        lr: peak learning rates; a table may have none.
        loss: final losses; what is empty or not finite is a diverged run.
        size: numbers of parameters, or any other whole number above 0 that grows with the model.
        seed: seeds; all runs are of one seed without it.
        arm: columns of settings that set arms apart; see ``roles_of``.
        initial_loss: losses at initialization, at which diverged runs count.
        steps: numbers of training steps.
        axis: the numeric setting along which curves run, instead of the learning rate.
        best_over: settings over which the best run is taken, so that they set no runs apart.
        unit: of the losses, one of ``LOSS_UNITS``; None takes what the name of the column says, or else nats.
        keep: which row of a run counts that has several: ``last``, ``best``, or ``error`` if none may have.
    """

    lr: str | None = None
    loss: str | None = None
    size: str | None = None
    seed: str | None = None
    arm: Sequence[str] | None = None
    initial_loss: str | None = None
    steps: str | None = None
    axis: str | None = None
    best_over: Sequence[str] | None = None
    unit: str | None = None
    keep: str | None = None


def column_of(table: pd.DataFrame, key: str, given: str | None) -> str | float | None:
    """The column of a quantity, or the number that holds for all runs; None if there is neither.

    ``key`` is a field of ``Columns``, and ``given`` its value there.

    Raises:
        RequestError: there is no such column, or none of losses.
    """
    option = f"--{key.replace('_', '-')}"
    if given is not None:
        if given in table:
            return given
        try:
            number = float(spelled_out(given)) if key in ("size", "steps", "initial_loss") else math.nan
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
        raise RequestError(f"{option}: no column {given!r}; {nearest(given, map(str, table))}")
    paths = {str(name): plain_name(str(name)).replace(".", "/") for name in table}
    for usual in (name.replace(".", "/") for name in USUAL_NAMES.get(key, ())):
        same = [name for name, path in paths.items() if path == usual]
        ends = [name for name, path in paths.items() if path.endswith(f"/{usual}")]
        if same or len(ends) == 1:
            return (same or ends)[0]
    if key == "loss":
        usual_names = " or ".join(USUAL_NAMES[key][1:4])
        raise RequestError(f"no column is called {usual_names}; {option} COLUMN says which it is")
    return None


def spelled_out(cell: Any) -> Any:
    """A number with a unit as a whole number, ``124M -> 124000000``; anything else as it is."""
    parts = re.fullmatch(r"([\d.]+)\s*([kmbt])", str(cell).strip().lower())
    return round(float(parts[1]) * SIZE_UNITS[parts[2]]) if parts else cell


def plain_name(name: str) -> str:
    """``Learning Rate -> learning_rate``; of Optuna, ``params_lr -> params/lr``."""
    name = name.strip().lower().replace(" ", "_").replace("-", "_")
    return re.sub(r"^(params|user_attrs)_", r"\1/", name)


def end_of(name: str) -> str:
    """``config/LR -> lr``."""
    return re.split(r"[/.]", plain_name(name))[-1]


def is_word(column: pd.Series[Any]) -> bool:
    """Whether the values are words or booleans, and no numbers."""
    return pd.api.types.is_bool_dtype(column) or not pd.api.types.is_numeric_dtype(column)


def is_arm(name: str) -> bool:
    """Whether a column is called as one of arms."""
    return end_of(name) in ARM_NAMES


def roles_of(
    others: pd.DataFrame,
    design: pd.DataFrame,
    is_cut: pd.Series[bool],
    arm: Sequence[str] | None = None,
    measured: Collection[str] = (),
) -> dict[str, str]:
    """What each of these columns is, or why it is no setting.

    A column sets arms apart if ``arm`` names it. Where that is ``None``, it does so if each of its values occurs with
    three learning rates or more, or if it is needed to tell runs apart; unless it is bookkeeping, or a column of the
    ``design`` determines it, or it only says where a diverged run was cut short.

    Args:
        others: the columns that hold none of the quantities.
        design: ``lr``, or the axis in its place, ``seed``, ``size`` and other columns in which runs differ.
        is_cut: the runs that ended early.
        arm: as in ``Columns``.
        measured: columns that set no arms apart.

    Raises:
        RequestError: there is no column that ``arm`` names.
    """
    for name in arm or ():
        if name not in others:
            raise RequestError(f"--arm: no column {name!r}; {nearest(name, map(str, others))}")
    if arm is not None:
        return {str(name): ARM if name in arm else NOT_NAMED for name in others}
    roles = {str(name): _role(others[name], design, is_cut, name in measured) for name in others}
    runs = design.astype(str).assign(**{name: others[name].astype(str) for name, role in roles.items() if role == ARM})
    while (same := runs.duplicated(keep=False)).any() and (needed := _splitting(others[same], roles, runs[same])):
        roles[needed] = ARM
        runs[needed] = others[needed].astype(str)
    for name in _by_best([others[name] for name, role in roles.items() if role == ARM], design):
        roles[name] = "follows from what the best is taken over"
    if ARM not in roles.values():  # arms whose seeds differ need no column to be told apart
        words = [name for name, role in roles.items() if role == NOT_NEEDED and is_word(others[name])]
        words = [name for name in words if others[name].astype(str).value_counts().min() > 1]
        roles |= dict.fromkeys([name for name in words if is_arm(name)][:1] or words[:1], ARM)
    return roles


def _by_best(arms: Sequence[pd.Series[Any]], design: pd.DataFrame) -> Iterator[str]:
    """Yield the numbers that follow from a column of which the best is taken, such as steps from the batch size."""
    best = [design[name].astype(str) for name in design if str(name).startswith(BEST)]
    kept = {str(column.name): column.astype(str) for column in arms}
    for column in sorted(arms, key=lambda column: -column.nunique()) if best else ():
        others = [values for name, values in kept.items() if name != column.name]
        if not is_word(column) and kept[str(column.name)].groupby([*others, *best]).nunique().max() == 1:
            del kept[str(column.name)]
            yield str(column.name)


def _role(column: pd.Series[Any], design: pd.DataFrame, is_cut: pd.Series[bool], is_measured: bool) -> str:
    name, values = str(column.name), column.astype(str)
    if column.isna().all():
        return EMPTY
    if end_of(name) in BOOKKEEPING:
        return NOTED
    if is_measured or re.match(r"(summary|metrics?)[/.]", plain_name(name)):
        return MEASURED
    if values.nunique() == 1:
        return SHARED
    if is_word(column):  # of a machine with a seed of its own; arms have several, and these may differ
        seeds = design["seed"].groupby(values).nunique()
        if seeds.min() == 1 and values.groupby(design["seed"]).nunique().max() == 1:
            return "follows from the seed"
    else:
        # a switch may add gains, and so determine the exact size; a width or a depth follows from it
        for key in design:
            is_fixed = values.groupby(design[key].astype(str)).nunique().max() == 1
            if is_fixed and (key != "lr" or values.nunique() == design[key].nunique()):
                return f"follows from the {DESIGN_NAMES.get(str(key), str(key))}"
        if _is_cut_short(column, design["size"], is_cut):
            return CUT
    if (design["lr"].groupby(values).nunique() >= MANY_LRS).all():
        return ARM
    return NAME if end_of(name) in RUN_NAMES and values.is_unique else NOT_NEEDED


def _is_cut_short(column: pd.Series[Any], size: pd.Series[float], is_cut: pd.Series[bool]) -> bool:
    """Whether a number is the same for all runs of a size, but lower for those that were cut short."""
    whole = column.where(~is_cut).groupby(size).transform("max")
    same = (column == whole) | (is_cut & ~(column > whole))
    return bool(is_cut.any() and same.all())


def _splitting(others: pd.DataFrame, roles: Mapping[str, str], runs: pd.DataFrame) -> str | None:
    """The column that tells most of these runs apart, which are alike in all settings so far; None without one.

    A number must repeat as a setting does; of columns that do as well, words come first, and those with few values.
    """
    best: tuple[Any, ...] = ()
    for position, name in enumerate(roles):
        values = others[name].astype(str)
        repeats = 2 * values.nunique() <= len(values) if is_word(others[name]) else values.value_counts().min() > 1
        if roles[name] not in (NOT_NEEDED, CUT) or not (repeats or is_arm(name)):
            continue
        told = int(runs.duplicated().sum() - runs.assign(**{name: values}).duplicated().sum())
        rank = (told, is_arm(name), is_word(others[name]), -values.nunique(), -position, name)
        best = max(best, rank) if told else best
    return str(best[-1]) if best else None
