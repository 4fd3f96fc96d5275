"""Refinement: which learning rates a sweep trains besides those asked for, so that crossings are known finely."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from lab.analysis.crossings import halving_lrs
from lab.analysis.curves import LR, points
from lab.analysis.runaway import HALF, crossings
from lab.core.errors import RequestError
from lab.records.store import Records
from lab.sweeping.compose import Word, parse

REFINED = (HALF, "attention_logits")  # the crossings that are refined, as ``runaway.crossings`` calls them
MOST = 12  # learning rates more for a curve
NARROWEST, WIDEST = 0.01, 1.0  # decades; learning rates have three digits, so that closer ones would coincide

Key = tuple[str, ...]


def width_of(text: object) -> float | None:
    """The width of brackets (decades) that a request asks for; None without one.

    Raises:
        RequestError: it is no number of decades from ``NARROWEST`` to ``WIDEST``.
    """
    if text is None:
        return None
    try:
        width = float(str(text))
    except ValueError:
        width = math.nan
    if not NARROWEST <= width <= WIDEST:
        raise RequestError(f"--refine takes decades from {NARROWEST:g} to {WIDEST:g}, such as 0.05, not {text}")
    return width


def key_of(point: Sequence[Word]) -> Key:
    """What tells the runs of a curve and seed from others: the words of a point but its learning rate."""
    return tuple(word.text for word in point if word.key != LR)


def _lrs(points: Iterable[Sequence[Word]]) -> set[float]:
    """The learning rates of points whose words give one as a number."""
    return {
        float(word.value) for point in points for word in point if word.key == LR and not isinstance(word.value, str)
    }


def lrs_of(asked: Sequence[Sequence[Word]]) -> dict[Key, set[float]]:
    """The learning rates that were asked for, by ``key_of``.

    Raises:
        RequestError: no key has two, so that there is no curve.
    """
    lrs: dict[Key, set[float]] = {}
    for point in asked:
        lrs.setdefault(key_of(point), set()).update(_lrs([point]))
    if not any(len(of_key) > 1 for of_key in lrs.values()):
        raise RequestError("--refine takes several learning rates, as in lab train -m optimizer.lr=1e-3,1e-2,1e-1")
    return lrs


def finer_points(
    records: Records, trained: Mapping[str, Sequence[Word]], asked: Mapping[Key, Collection[float]], width: float
) -> list[list[Word]]:
    """The points to train next: for each curve the middles of the brackets in which some seed crosses, for all seeds.

    Args:
        records: of the folder.
        trained: the words of each run that was asked for or trained since, by id.
        asked: by ``key_of`` the learning rates that were asked for.
        width: of the widest bracket that stays, decades.
    """
    runs = records.of(trained)
    ended, found = points(runs.runs), list[list[Word]]()
    crossed = crossings(runs, ended)
    for curve, rows in crossed[crossed["quantity"].isin(REFINED)].groupby("curve", sort=False):
        of_curve = {key_of(trained[run]): trained[run] for run in ended.loc[ended["curve"] == curve, "id"]}
        tried = _lrs(point for point in trained.values() if key_of(point) in of_curve)
        left = MOST - len(tried.difference(*(asked[key] for key in of_curve)))
        lrs = [lr for lr in halving_lrs(rows["crossing"], width) if lr not in tried]  # as where a run failed
        for lr in lrs[: max(left, 0)]:
            (word,) = parse([f"{LR}={lr!r}"])
            found += [[*(other for other in point if other.key != LR), word] for point in of_curve.values()]
    return found
