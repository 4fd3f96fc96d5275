"""Other ways to sort runs than by arm: along a numeric setting, and by the way their models grow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import Any, NamedTuple

import pandas as pd

from lab.analysis.curves import SHAPE, configs, differing, name_arms
from lab.analysis.text import count

MIN_RUNGS = 3
# More arms than this along a setting are lines of one panel per size, no longer panels.
MOST_ARMS = 4
# Of settings that change together this one is the cause.
CAUSES = ("batch_size", "steps")


class Ladder(NamedTuple):
    """A numeric setting with at least three values: its dotted key, the keys that change with it, and the runs.

    ``runs`` has, beside its columns, ``setting`` (a number) and ``rest`` (label of the arm but for the setting).
    """

    key: str
    others: list[str]
    runs: pd.DataFrame


def ladder(cards: pd.DataFrame, runs: pd.DataFrame) -> Ladder | None:
    """The ladder in these runs (``judge(points)`` of the ``cards``); None where no setting, or more than one, is."""
    ended = cards[cards["id"].isin(runs["id"])]
    keys, curves = configs(ended)
    settings = {key: [curve[key] for curve in curves.values()] for key in differing(list(curves.values()))}
    found = [key for key, values in settings.items() if key not in SHAPE and _climbs(values)]
    found.sort(key=lambda key: (*(key != cause for cause in CAUSES), key))
    if not found or any(not _together(settings[found[0]], settings[key]) for key in found):
        return None
    at = {run: curves[key][found[0]] for run, key in zip(ended["id"], keys, strict=True)}
    runs = runs.assign(setting=pd.to_numeric(runs["id"].map(at)), rest=runs["id"].map(regrouped(cards, found)))
    return Ladder(found[0], found[1:], runs[runs["setting"].notna()])


def _climbs(values: list[Hashable]) -> bool:
    known = set(values) - {None}
    return len(known) >= MIN_RUNGS and all(isinstance(value, float) for value in known)


def _together(one: list[Hashable], other: list[Hashable]) -> bool:
    pairs = set(zip(one, other, strict=True))
    return len(pairs) == len(set(one)) == len(set(other))


def regrouped(cards: pd.DataFrame, without: Collection[str]) -> dict[str, str]:
    """Label of each run's arm, by id, if neither its shape nor these keys were part of what sets arms apart."""
    ended = cards[cards["status"] != "failed"]
    keys, curves = configs(ended)
    reduced = {
        key: tuple((name, value) for name, value in curve.items() if name not in {*SHAPE, *without})
        for key, curve in curves.items()
    }
    kinds = list(dict.fromkeys(reduced.values()))
    labels = dict(
        zip(kinds, (arm.label for arm in name_arms([dict(kind) for kind in kinds], [0] * len(kinds))), strict=True)
    )
    return {run: labels[reduced[key]] for run, key in zip(ended["id"], keys, strict=True)}


def ways_to_grow(cards: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Runs with ``deeper``, ``wider`` and both as arms, each from the smallest model on, where shapes cross.

    Shapes that grow along one line are left as they are.  Elsewhere the smallest model takes part in every way, so its
    runs are there more than once (Wortsman et al. 2023, figs. 7 and E.3).
    """
    shape = cards.set_index("id").reindex(runs["id"])
    width, depth = shape["model.width"].to_numpy(), shape["model.depth"].to_numpy()
    frame = runs.assign(width=width, depth=depth, rest=runs["id"].map(regrouped(cards, ())))
    if frame.groupby("rest")["arm"].nunique().max() == 1:
        return runs
    ways = []
    for rest, some in frame.groupby("rest", sort=False):
        first = some[some["size"] == some["size"].min()].head(1)
        wider, deeper = (some[key] != first[key].item() for key in ("width", "depth"))
        least = ~wider & ~deeper
        for way, grown in {
            "wider": wider & ~deeper,
            "deeper": deeper & ~wider,
            "wider and deeper": wider & deeper,
        }.items():
            if grown.any():
                ways.append(some[least | grown].assign(arm=f"{rest}, {way}"))
    grown = pd.concat(ways, ignore_index=True) if ways else runs
    if not ways or (grown.groupby(["arm", "size"])["curve"].nunique() > 1).any():
        return runs
    return grown.assign(curve=grown.groupby(["arm", "curve"], sort=False).ngroup())[runs.columns]


class Facets(NamedTuple):
    """What stands in a panel of its own, with its title, and what its lines are told apart by (a column)."""

    panels: list[tuple[str, pd.DataFrame]]
    line: str
    name: str
    spell: Callable[[float], str]

    @property
    def values(self) -> Any:
        """Of all lines of all panels."""
        return pd.concat([some for _, some in self.panels])[self.line]


def facets(cards: pd.DataFrame, runs: pd.DataFrame) -> Facets:
    """A panel per arm, a line per size; of many arms along a setting a panel per size, a line per value."""
    found = ladder(cards, runs) if runs["arm"].nunique() > MOST_ARMS else None
    if found is None:
        return Facets([(str(arm), some) for arm, some in runs.groupby("arm", sort=False)], "size", "parameters", count)
    rows = found.runs.groupby(["rest", "size"], sort=False)
    titled = [(f"{some['rest'].iloc[0]}, {count(some['size'].iloc[0])}", some) for _, some in rows]
    return Facets(titled, "setting", found.key, "{:g}".format)
