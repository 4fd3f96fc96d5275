"""The leaderboard: every change of a recipe is compared with the reference that lacks it, paired by seed.

The rule is in the header of ``sweeps/leaderboard.yaml``, and was fixed before its runs:

- An arm is compared with the arm that lacks its change alone; both have qk-layernorm, or neither has.
- It makes *no difference* if the 90 % interval of the difference in the instability part of LR sensitivity lies within
  ``MARGIN``. It *helps*, or *harms*, if the Holm-adjusted p of that difference over all arms of its panel is below
  ``ALPHA``. A difference that is both significant and within the margin counts as none, as for claims.
- Otherwise, and below three seeds, it is *open*.
- Arms whose learning rate has another unit, or a shifted optimum, are *not comparable* by sensitivity. The table shows
  their best loss, the smallest unstable learning rate over the best one, and the loss at 3 and 10 times the best one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lab.analysis.curves import setting_name, setting_text
from lab.analysis.sensitivity import WINDOW, Window
from lab.analysis.statistics import FEWEST_SEEDS, Interval, difference, holm, student_t
from lab.core.errors import RequestError
from lab.core.shipped import default_recipe
from lab.records.store import ORDER
from lab.studies.leaderboard.arms import combinations
from lab.studies.leaderboard.curves import (
    GROUPS,
    MEASURES,
    PART,
    SPIKES,
    Curve,
    Keys,
    Setting,
    read_curves,
)

ALPHA, MARGIN = 0.05, 0.06  # MARGIN in nats per token
HELPS, HARMS, NO_DIFFERENCE, OPEN, NOT_COMPARABLE = "helps", "harms", "no difference", "open", "not comparable"
VERDICTS = (HELPS, NO_DIFFERENCE, OPEN, HARMS, NOT_COMPARABLE)
QK = "qk_layernorm"
WITHOUT, WITH = "without qk-layernorm", "with qk-layernorm"
# Settings that become part of a panel's title if panels differ in them.
NAMING = ("sweep", "data.name", "model.width", "model.depth")
SAME, SHIFTED, OTHER = "same", "shifted", "other"


class Pair(NamedTuple):
    """What a pair of arms is compared with.

    Attributes:
        better: the name of its better half, the member with the lower mean of the instability part on these seeds.
        interaction: the effect of the pair minus the sum of both members' effects, paired by seed, with its 95 %
            interval; above zero the pair falls short of the sum.
    """

    better: str
    interaction: Interval


class Row(NamedTuple):
    """An arm compared with its reference.

    Attributes:
        name: the change, by the names of interventions and optimizers: ``peri_ln``, ``muon``.
        panel: with or without qk-layernorm, then the text and the size if there are several.
        curve: the curve of the arm.
        reference: the curve of the arm that lacks the change.
        lr_meaning: the meaning of its learning rate beside the reference's: ``same``, ``shifted`` (the same unit,
            another optimum) or ``other`` (another unit).
        differences: the arm minus its reference, paired by seed, with 95 % intervals, by measure; empty without seeds.
        p: p of a difference in the instability part; NaN without a test.
        p_adjusted: the same, adjusted over the panel (Holm 1979).
        ranks: the best and the worst rank that pairwise 95 % intervals allow; None without a test, or if the arm is the
            reference.
        neighbour: the arm one rank below, by its mean; empty at the end.
        beats_neighbour: whether the 95 % interval of the difference from it lies below zero.
        cost: the shortest wall time of a run, over seeds, relative to the reference; NaN if it was not recorded. Other
            work on the machine only lengthens a run, so the shortest is the best estimate.
        pair: of a pair of arms, whose ``reference`` is its better half; None for a single arm.
    """

    name: str
    panel: str
    curve: Curve
    reference: Curve
    lr_meaning: str
    differences: Mapping[str, Interval]
    verdict: str = OPEN
    p: float = math.nan
    p_adjusted: float = math.nan
    ranks: tuple[int, int] | None = None
    neighbour: str = ""
    beats_neighbour: bool = False
    cost: float = math.nan
    pair: Pair | None = None

    @property
    def seeds(self) -> int:
        """Number of seeds that the arm and its reference share."""
        return len(self.curve.seeds.index.intersection(self.reference.seeds.index))

    @property
    def beats_reference(self) -> bool:
        """Whether its instability part is significantly lower than the reference's, by any amount."""
        return self.p_adjusted < ALPHA and self.differences[PART].mean < 0

    @property
    def parameters_added(self) -> int:
        """Parameters that the arm has beyond the reference."""
        return self.curve.parameters - self.reference.parameters


class Panel(NamedTuple):
    """Arms that are judged together; those that are not comparable come last.

    Attributes:
        title: the same as ``Row.panel``.
        reference: the curve with which the arms of the panel are compared.
        rank: the ranks of the reference, as ``Row.ranks``.
        rows: the arms, in rising order of the mean difference.
    """

    title: str
    reference: Curve
    rank: tuple[int, int] | None
    rows: Sequence[Row]

    @property
    def heading(self) -> str:
        """The title with a capital letter."""
        return f"{self.title[:1].upper()}{self.title[1:]}"

    @property
    def has_pairs(self) -> bool:
        """Whether its rows are pairs of arms; they have no ranks."""
        return any(row.pair for row in self.rows)


class Base(NamedTuple):
    """The reference of a panel.

    Attributes:
        title: of the panel.
        curve: the reference.
        curves: all curves of its setting.
        with_qk: the same recipe with qk-layernorm; None if there is none, or if this one has it.
    """

    title: str
    curve: Curve
    curves: Sequence[Curve]
    with_qk: Curve | None


class Reference(NamedTuple):
    """The recipe without any change.

    Attributes:
        interventions: its interventions, except qk-layernorm.
        optimizer: the name of its optimizer.
    """

    interventions: frozenset[str]
    optimizer: str


def default_reference() -> Reference:
    """The reference given by the default recipe of the lab."""
    recipe = default_recipe()
    interventions = (key.partition(".")[2] for key, value in recipe.items() if value == "on")
    return Reference(frozenset(interventions) - {QK}, str(recipe["optimizer.name"]))


class Board:
    """All panels of one or more results folders."""

    def __init__(
        self, curves: Sequence[Curve], meaning_of: Mapping[str, str], reference: Reference | None = None
    ) -> None:
        """Find the references among the curves and compare.

        Args:
            curves: the curves, as ``curves_of`` makes them.
            meaning_of: ``Row.lr_meaning`` by name of the arm; ``same`` for arms that are absent.
            reference: the reference; by default the default recipe.

        Raises:
            RequestError: no curve is the reference.
        """
        self.reference = reference or default_reference()
        self.curves, self.meaning_of = curves, meaning_of
        self._base_keys = self._find_base_keys()

    def _find_base_keys(self) -> dict[str, Hashable]:
        """Keys of the reference besides its interventions; of several candidates, those that most curves share."""
        wanted = self.reference
        fits = [curve for curve in self.curves if curve.interventions - {QK} == wanted.interventions]
        fits = [fit for fit in fits if fit.keys.get("optimizer.name") in (wanted.optimizer, None)]
        if not fits:
            names = "+".join(sorted(wanted.interventions)) or "no intervention"
            raise RequestError(
                f"the reference is missing: no run has {names} and optimizer {wanted.optimizer} alone, with which the "
                "board compares every arm; add it to the sweep, or give the folder that holds it"
            )
        others, choices = ([_recipe_keys(curve.keys) for curve in curves] for curves in (self.curves, fits))
        return max(choices, key=lambda choice: others.count(choice))

    @cached_property
    def panels(self) -> list[Panel]:
        """A panel of single arms for each setting that has a reference, with and without qk-layernorm."""
        return [panel for base in self.bases if (panel := self._panel(base)).rows]

    @cached_property
    def bases(self) -> list[Base]:
        """The references of the panels."""
        settings = list(dict.fromkeys(one.setting for one in self.curves))
        bases = []
        for setting in settings:
            inside = [one for one in self.curves if one.setting == setting]
            found = {has_qk: self._base(inside, has_qk=has_qk) for has_qk in (False, True)}
            for has_qk, curve in found.items():
                if curve is not None:
                    title = ", ".join([WITH if has_qk else WITHOUT, *_setting_parts(setting, settings)])
                    bases.append(Base(title, curve, inside, found[True] if not has_qk else None))
        return bases

    def _base(self, curves: Iterable[Curve], *, has_qk: bool) -> Curve | None:
        wanted = self.reference.interventions | ({QK} if has_qk else set())
        fits = (
            curve for curve in curves if curve.interventions == wanted and _recipe_keys(curve.keys) == self._base_keys
        )
        return next(fits, None)

    @property
    def rows(self) -> list[Row]:
        """The rows of all panels of single arms."""
        return [row for panel in self.panels for row in panel.rows]

    def find(self, added: Collection[str], setting: Setting) -> Curve | None:
        """The curve that adds these interventions and this optimizer to the reference; None if there is none."""
        for one in self.curves:
            if one.setting == setting and set(self.change(one)) == set(added):
                return one
        return None

    def change(self, curve: Curve) -> list[str]:
        """Names of what a curve adds to the reference without qk-layernorm, and ``no NAME`` for what it lacks."""
        base = self.reference.interventions
        names = sorted(curve.interventions - base) + [f"no {name}" for name in sorted(base - curve.interventions)]
        return names + self._other_changes(curve)

    def _other_changes(self, curve: Curve) -> list[str]:
        """Names of the optimizer, schedule and parametrization, if they differ from the reference's."""
        base, own = self._base_keys, _recipe_keys(curve.keys)
        names = []
        for group in GROUPS[1:]:
            keys = sorted(key for key in {*base, *own} if key.startswith(group) and base.get(key) != own.get(key))
            name = f"{group}.name"
            if name in keys:
                names.append(str(own.get(name)))
            else:
                names += [setting_text(setting_name(key, own), own.get(key)) for key in keys]
        return names

    def compared(self, curve: Curve, base: Curve) -> tuple[str, Curve, Curve] | None:
        """The name of the change between a curve and a reference, the curve that has it and the one that lacks it.

        If a curve lacks one intervention of the reference and differs in nothing else, that intervention is the change,
        and the reference has it. None for the reference itself.
        """
        added, lacking = curve.interventions - base.interventions, base.interventions - curve.interventions
        names = [*sorted(added), *self._other_changes(curve)]
        if not names and len(lacking) == 1:
            return next(iter(lacking)), base, curve
        names += [f"no {name}" for name in sorted(lacking)]
        return ("+".join(names), curve, base) if names else None

    def members(self, curve: Curve, base: Base) -> dict[str, Curve] | None:
        """Both members of a pair of arms by name: the curves that add one of its two interventions to a reference.

        None if the curve is no such pair, or is a combination that was published and so is an arm of its own. What
        qk-layernorm adds to an arm is the panel with qk-layernorm.
        """
        recipe = base.curve.interventions
        added = sorted(curve.interventions - recipe)
        if len(added) != 2 or QK in added or recipe - curve.interventions or "+".join(added) in combinations():
            return None
        wanted = {name: recipe | {name} for name in added}
        found = {
            name: one
            for one in base.curves
            for name, interventions in wanted.items()
            if one.interventions == interventions and _recipe_keys(one.keys) == self._base_keys
        }
        return found if len(found) == len(added) and _recipe_keys(curve.keys) == self._base_keys else None

    def _panel(self, base: Base) -> Panel:
        mine = [curve for curve in base.curves if (QK in curve.interventions) == (QK in base.curve.interventions)]
        mine = [curve for curve in mine if self.members(curve, base) is None]
        mine += [base.with_qk] if base.with_qk is not None else []
        changes = _distinct([change for curve in mine if (change := self.compared(curve, base.curve)) is not None])
        drafts = [self.draft(base.title, *change, grid=base.curve.lrs) for change in changes]
        ranked, rank = _ranked(judged(drafts), base.curve)
        return Panel(base.title, base.curve, rank, ranked)

    def draft(self, title: str, name: str, curve: Curve, reference: Curve, grid: tuple[float, ...]) -> Row:
        """A row that is not judged yet."""
        meaning = self.meaning(name, curve, grid)
        differences, p = paired(curve, reference), p_of(curve, reference) if meaning == SAME else math.nan
        return Row(name, title, curve, reference, meaning, differences, p=p, cost=_cost(curve, reference))

    def meaning(self, name: str, curve: Curve, grid: tuple[float, ...]) -> str:
        """``Row.lr_meaning`` of an arm; ``other`` if its grid of learning rates differs from the reference's."""
        meanings = {self.meaning_of.get(part, SAME) for part in name.split("+")}
        if OTHER in meanings or not set(curve.lrs) <= set(grid):
            return OTHER
        return SHIFTED if SHIFTED in meanings else SAME


def judged(drafts: Sequence[Row]) -> list[Row]:
    """Rows with their verdicts and with p adjusted over all of them (Holm 1979)."""
    adjusted = holm([draft.p for draft in drafts])
    return [
        draft._replace(p_adjusted=p, verdict=verdict(draft.differences.get(PART), p, draft.lr_meaning))
        for draft, p in zip(drafts, adjusted, strict=True)
    ]


def verdict(instability: Interval | None, p_adjusted: float, lr_meaning: str) -> str:
    """The verdict by the rule, from the difference in the instability part; its interval may be at any level."""
    if lr_meaning != SAME:
        return NOT_COMPARABLE
    if instability is None or instability.n < FEWEST_SEEDS:
        return OPEN
    if instability.p_outside(-MARGIN, MARGIN) < 2 * ALPHA:  # its 90 % interval lies inside
        return NO_DIFFERENCE
    if p_adjusted < ALPHA:
        return HELPS if instability.mean < 0 else HARMS
    return OPEN


def paired(curve: Curve, reference: Curve) -> dict[str, Interval]:
    """Differences of two curves by measure, over the seeds that both have, with 95 % intervals."""
    seeds = curve.seeds.index.intersection(reference.seeds.index)
    both = curve.seeds.loc[seeds, list(MEASURES)] - reference.seeds.loc[seeds, list(MEASURES)]
    counted = {SPIKES: math.hypot(curve.spikes.resolution, reference.spikes.resolution)}
    return {measure: student_t(both[measure], resolution=counted.get(measure, 0.0)) for measure in MEASURES}


def p_of(curve: Curve, reference: Curve, measure: str = PART) -> float:
    """Two-sided p of a difference, paired by seed; NaN below three seeds."""
    seeds = curve.seeds.index.intersection(reference.seeds.index)
    if len(seeds) < FEWEST_SEEDS:
        return math.nan
    return difference(reference.seeds.loc[seeds, measure], curve.seeds.loc[seeds, measure]).p()


def _cost(curve: Curve, reference: Curve) -> float:
    whole, part = reference.seconds.min(), curve.seconds.min()
    return float(part / whole) if whole > 0 else math.nan


def _ranked(rows: Sequence[Row], base: Curve) -> tuple[list[Row], tuple[int, int] | None]:
    """Comparable rows by their mean, with ranks, then the others by best loss; and the rank of the reference.

    An intervention that the reference has gets no rank of its own, since its arm is the reference.
    """
    tested = [row for row in rows if not math.isnan(row.p)]
    tested.sort(key=lambda row: (row.differences[PART].mean, row.name))
    rest = sorted((row for row in rows if math.isnan(row.p)), key=_by_best)
    apart = [row for row in tested if row.curve is not base]
    if not apart:
        return [*tested, *rest], None
    better = surely_lower([*(row.curve for row in apart), base])
    ranks = [(1 + int(better[:, index].sum()), len(better) - int(better[index].sum())) for index in range(len(better))]
    ranked = {}
    for index, row in enumerate(apart):
        is_last = index == len(apart) - 1
        neighbour, beats = ("", False) if is_last else (apart[index + 1].name, bool(better[index, index + 1]))
        ranked[row.name] = row._replace(ranks=ranks[index], neighbour=neighbour, beats_neighbour=beats)
    return [*(ranked.get(row.name, row) for row in tested), *rest], ranks[-1]


def _by_best(row: Row) -> tuple[float, str]:
    best = row.differences["best"].mean
    return math.inf if math.isnan(best) else best, row.name


def surely_lower(curves: Sequence[Curve]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Whether the instability part of one curve (row) is significantly lower than another's (column).

    By pairwise 95 % intervals, which are not corrected for the number of pairs.
    """
    seeds = sorted(set().union(*(curve.seeds.index for curve in curves)))
    values_as = np.array([curve.seeds[PART].reindex(seeds).to_numpy(dtype=float) for curve in curves])
    lower = np.zeros((len(curves), len(curves)), dtype=bool)
    for index, values_s in enumerate(values_as):
        for other, differences_s in enumerate(values_as - values_s):
            lower[other, index] = student_t(differences_s).high < 0
    return lower


def read_board(
    folders: Sequence[Path],
    meaning_of: Mapping[str, str],
    reference: Reference | None = None,
    window: Window = WINDOW,
) -> Board:
    """The board of these results folders: each has its own panels if each holds the reference, else all share them.

    Raises:
        RequestError: a folder cannot be read, holds no run that ended, or none of them holds the reference.
    """
    apart = [read_curves(folder, window=window) for folder in folders]
    if len(apart) > 1 and all(_has_reference(curves, reference) for curves in apart):
        names = [(("sweep", folder.resolve().name),) for folder in folders]
        together = [
            curve._replace(setting=curve.setting + name)
            for name, curves in zip(names, apart, strict=True)
            for curve in curves
        ]
        return Board(together, meaning_of, reference)
    return Board(apart[0] if len(apart) == 1 else read_curves(*folders, window=window), meaning_of, reference)


def _has_reference(curves: Sequence[Curve], reference: Reference | None) -> bool:
    try:
        Board(curves, {}, reference)
    except RequestError:
        return False
    return True


def _recipe_keys(keys: Keys) -> dict[str, Hashable]:
    """The keys besides interventions that have a value."""
    return {key: value for key, value in keys.items() if not key.startswith("intervention") and value is not None}


def _distinct(changes: Sequence[tuple[str, Curve, Curve]]) -> list[tuple[str, Curve, Curve]]:
    """Changes with distinct names: equal names are followed by the numbers in which their curves differ."""
    named = []
    for name, curve, reference in changes:
        twins = [other.keys for its_name, other, _ in changes if its_name == name]
        keys = sorted(
            key for key in curve.keys if key not in ("intervention", ORDER) and len({keys[key] for keys in twins}) > 1
        )
        numbers = (setting_text(setting_name(key, curve.keys), curve.keys[key]) for key in keys)
        named.append((", ".join([name, *numbers]), curve, reference))
    return named


def _setting_parts(setting: Setting, settings: Sequence[Setting]) -> list[str]:
    """The parts of a title that distinguish a setting from the others."""
    others = [dict(other) for other in settings]
    differing = [key for key, value in setting if len({other.get(key) for other in others}) > 1]
    shown = [key for key in NAMING if key in differing] or [key for key in differing if key != "data_fingerprint"]
    return [setting_text(setting_name(key, dict(setting)), dict(setting)[key]) for key in shown]
