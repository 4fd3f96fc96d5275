"""Group runs other than by arm: along a numeric setting, by the way their models grow, into facets of a figure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from lab.analysis.curves import SHAPE, configs, differing, name_arms, setting_name
from lab.analysis.rendering import layout, panels, style
from lab.analysis.text import count
from lab.records.imported import UNKNOWN_SIZE

MIN_VALUES = 3
# With more arms than this along a setting, each value is a line in the panel of its size instead of a panel.
MOST_ARM_FACETS = 4
MOST_ARM_LINES = len(style.ARM_COLOURS)
# Among settings that change together, the first one of these counts as the one that was swept.
CAUSES = ("batch_size", "steps")


class SweptSetting(NamedTuple):
    """A numeric setting with at least three values.

    Attributes:
        key: its dotted key.
        name: its name for readers, with the settings that change together with it.
        runs: runs with the columns ``setting`` (its value) and ``rest`` (label of the arm without the setting).
    """

    key: str
    name: str
    runs: pd.DataFrame


def swept_setting(cards: pd.DataFrame, runs: pd.DataFrame) -> SweptSetting | None:
    """The numeric setting in which runs (``judge(points)`` of the ``cards``) differ; None if there is none, or several.

    It has three values or more in some arm, with all other settings equal.
    """
    ended = cards[cards["id"].isin(runs["id"])]
    curve_of_run, curves = configs(ended)
    settings = {key: [curve[key] for curve in curves.values()] for key in differing(list(curves.values()))}
    keys = [key for key, values in settings.items() if key not in SHAPE and _is_swept(values)]
    keys.sort(key=lambda key: (*(key != cause for cause in CAUSES), key))
    if not keys or any(not _one_to_one(settings[keys[0]], settings[key]) for key in keys):
        return None
    value_of_run = {run: curves[curve][keys[0]] for run, curve in zip(ended["id"], curve_of_run, strict=True)}
    setting, rest = pd.to_numeric(runs["id"].map(value_of_run)), runs["id"].map(arm_labels(cards, keys))
    runs = runs.assign(setting=setting, rest=rest)
    if runs.groupby(["rest", "size"])["setting"].nunique().max() < MIN_VALUES:
        return None
    name = " with ".join(setting_name(key, next(iter(curves.values()))) for key in keys)
    return SweptSetting(keys[0], name, runs[runs["setting"].notna()])


def _is_swept(values: list[Hashable]) -> bool:
    present = set(values) - {None}
    return len(present) >= MIN_VALUES and all(isinstance(value, float) for value in present)


def _one_to_one(values: list[Hashable], other_values: list[Hashable]) -> bool:
    pairs = set(zip(values, other_values, strict=True))
    return len(pairs) == len(set(values)) == len(set(other_values))


def arm_labels(cards: pd.DataFrame, without: Collection[str]) -> dict[str, str]:
    """Label of each run's arm, by run id, if neither the shape nor the keys ``without`` distinguish arms."""
    ended = cards[cards["status"] != "failed"]
    curve_of_run, curves = configs(ended)
    reduced = {
        key: tuple((name, value) for name, value in curve.items() if name not in {*SHAPE, *without})
        for key, curve in curves.items()
    }
    arms = list(dict.fromkeys(reduced.values()))
    named = name_arms([dict(arm) for arm in arms], [0] * len(arms))
    labels = {arm: name.label for arm, name in zip(arms, named, strict=True)}
    return {run: labels[reduced[curve]] for run, curve in zip(ended["id"], curve_of_run, strict=True)}


def ways_to_grow(cards: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Regroup runs whose shapes cross: growing wider, deeper, and both become arms that start at the smallest model.

    Runs of one line of shapes are returned unchanged. Otherwise the smallest model belongs to every arm, so its runs
    appear more than once (Wortsman et al. 2023, figs. 7 and E.3).
    """
    if sum(cards[key].nunique() > 1 for key in SHAPE if key in cards) < 2:  # one line, by far the most frequent case
        return runs
    shape = cards.set_index("id").reindex(runs["id"], columns=["model.width", "model.depth"])
    width, depth = shape["model.width"].to_numpy(), shape["model.depth"].to_numpy()
    frame = runs.assign(width=width, depth=depth, rest=runs["id"].map(arm_labels(cards, ())))
    if frame.groupby("rest")["arm"].nunique().max() == 1:
        return runs
    ways = []
    for rest, group in frame.groupby("rest", sort=False):
        smallest = group[group["size"] == group["size"].min()].head(1)
        wider, deeper = (group[key] != smallest[key].item() for key in ("width", "depth"))
        way = np.select([wider & deeper, wider, deeper], ["wider and deeper", "wider", "deeper"], "")
        for name in ("wider", "deeper", "wider and deeper"):
            if name in way:
                ways.append(group[(way == name) | (way == "")].assign(arm=f"{rest}, {name}"))
    grown = pd.concat(ways, ignore_index=True) if ways else runs
    if not ways or (grown.groupby(["arm", "size"])["curve"].nunique() > 1).any():
        return runs
    return grown.assign(curve=grown.groupby(["arm", "curve"], sort=False).ngroup())[runs.columns]


class Facets(NamedTuple):
    """How a figure splits its runs.

    Attributes:
        panels: title and runs of each panel.
        line: the column with one line of a panel per value.
        name: the name of this column in the key.
        spell: writes a value of it as text for the key.
    """

    panels: list[tuple[str, pd.DataFrame]]
    line: str
    name: str
    spell: Callable[[Any], str]

    @property
    def looks(self) -> dict[Any, dict[str, Any]]:
        """The look of the lines of each value of ``line``: that of its arm, or a shade."""
        values = pd.concat([panel_runs for _, panel_runs in self.panels]).sort_index()[self.line]  # arms in their order
        if self.line == "arm":
            return panels.arm_looks(values.unique())
        return {value: {"color": shade} for value, shade in style.shades(values, style.SIZE_SHADES).items()}

    @property
    def keys(self) -> list[Line2D]:
        """Key entries of the lines."""
        if self.line == "arm":
            return panels.arm_keys(self.looks)
        return layout.line_keys({value: look["color"] for value, look in self.looks.items()}, self.spell)


def facets(cards: pd.DataFrame, runs: pd.DataFrame) -> Facets:
    """A panel per size and a line per arm; with many arms along a setting, a line per value of it.

    One arm is a panel with a line per size, and each of more arms than there are colours a panel of its own.
    """
    arms = [(str(arm), group) for arm, group in runs.groupby("arm", sort=False)]
    swept = swept_setting(cards, runs) if len(arms) > MOST_ARM_FACETS else None
    if swept is None and 1 < len(arms) <= MOST_ARM_LINES:
        sizes = [
            (f"{count(group['size'].iloc[0])} parameters" if size != UNKNOWN_SIZE else "", group)
            for size, group in runs.groupby("size")
        ]
        return Facets(sizes, "arm", "arm", str)
    if swept is None:
        return Facets(arms, "size", "parameters", count)
    groups = swept.runs.groupby(["rest", "size"], sort=False)
    titled = [(f"{group['rest'].iloc[0]}, {count(group['size'].iloc[0])}", group) for _, group in groups]
    return Facets(titled, "setting", swept.name, "{:g}".format)
