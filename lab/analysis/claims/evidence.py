"""Evidence: the runs of a folder as a claim sees them, in tables of a number per seed and size."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

import lab.analysis.probe_values as probe_values
from lab.analysis.curves import Curve, configs, points
from lab.analysis.sensitivity import HIGH, PARTS, judge, regret, vertex
from lab.analysis.text import count
from lab.records.store import Records

# They say nothing of a curve on which no learning rate beat the bigram model (Wortsman et al. 2023, app. B).
OF_A_CURVE = (*PARTS, "coupled", "log_best", "log_lost", "border")
COUPLED_WINDOWS = ((1e-4, 1e-1), (3e-4, 3e-1))


class RunSummary(NamedTuple):
    """A run: its final loss, at most that at initialization, how far that is above the bigram model's, its fate."""

    id: str
    loss: float
    over_bigram: float
    lost: bool


class CurveSummary(NamedTuple):
    """One curve and seed; ``runs`` by learning rate, rising.

    Attributes:
        alive: some final loss is a number.
        learned: some run beat the bigram model.
        known: ``best`` loss; ``total``, ``below``, ``above`` as in ``sensitivity.split``; ``coupled``, the smaller of S
            over the two windows that the paper uses for coupled decay (sec. 3.2.2); ``log_best``, log10 of the fine
            eta*; ``log_lost``, log10 of eta_div, one step above the grid where nothing is lost; ``border``, the middle
            between that and the learning rate below it.  What cannot be known is NaN.
    """

    curve: int
    size: int
    seed: str
    runs: dict[float, RunSummary]
    alive: bool
    learned: bool
    known: dict[str, float]


def curve_summaries(runs: pd.DataFrame) -> list[CurveSummary]:
    """One for each curve and seed of ``runs``, a table as made by ``sensitivity.judge``."""
    rows: dict[tuple[int, str], list[Any]] = {}
    for row in runs.sort_values("lr").itertuples():
        rows.setdefault((row.curve, row.seed), []).append(row)  # type: ignore[arg-type]
    return [_summarize(some) for some in rows.values()]


def _summarize(rows: list[Any]) -> CurveSummary:
    lr, loss = np.array([row.lr for row in rows]), np.array([row.capped for row in rows])
    runs = {row.lr: RunSummary(row.id, row.capped, row.capped - row.loss_bigram, row.outcome != "") for row in rows}
    alive = any(math.isfinite(row.loss) for row in rows)
    learned = bool(loss.min() < np.fmin(rows[0].loss_at_init, rows[0].loss_bigram))
    known = {"best": float(loss.min()) if alive else math.nan, **dict.fromkeys(OF_A_CURVE, math.nan)}
    if alive and learned:
        known |= regret(lr, loss)._asdict() | _stability(lr, [run.lost for run in runs.values()])
        known["coupled"] = min(regret(lr, loss, *window).total for window in COUPLED_WINDOWS)
        known["log_best"] = math.log10(vertex(lr, loss))
    return CurveSummary(rows[0].curve, rows[0].size, rows[0].seed, runs, alive, learned, known)


def _stability(lr: np.ndarray, lost: list[bool]) -> dict[str, float]:
    """Log10 of the smallest lost learning rate, one step above the grid where none is, and the middle below it."""
    lrs = np.log10(lr)
    step = float(np.diff(lrs).min()) if len(lrs) > 1 else 0.5
    first = float(lrs[lost.index(True)]) if True in lost else float(lrs[-1]) + step
    return {"log_lost": first, "border": first - step / 2}


FEWEST_LRS = 4

Config = Mapping[str, Any]
Choice = Config | Callable[[Config], bool]


class MissingRunsError(Exception):
    """The runs that a claim needs are not there; ``near`` when its arms are, but too little of them."""

    def __init__(self, what: str, *, near: bool = True) -> None:
        super().__init__(what)
        self.near = near


class Evidence:
    """A folder's runs, read once for all claims."""

    def __init__(self, name: str, records: Records) -> None:
        self.name, self.records = name, records
        self.runs = judge(points(records.runs))
        first = self.runs.drop_duplicates("curve")
        keys, curves = configs(records.runs.set_index("id").loc[first["id"]].reset_index())
        self.curves = {n: _spelled(curves[key]) for n, key in zip(first["curve"], keys, strict=True)}
        self._measures: dict[Any, dict[str, float]] = {}
        self._arms: dict[Any, ArmTables] = {}

    @cached_property
    def outlines(self) -> list[CurveSummary]:
        """One for each curve and seed."""
        return curve_summaries(self.runs)

    def settings(self, frees: Iterable[str]) -> list[ComparisonGroup]:
        """Curves that agree in everything but these keys and those below them, one setting for each agreement."""
        groups: dict[Hashable, dict[int, Config]] = {}
        for number, curve in self.curves.items():
            fixed = frozenset((key, value) for key, value in curve.items() if not _below(key, frees))
            groups.setdefault(fixed, {})[number] = curve
        return [ComparisonGroup(self, curves) for curves in groups.values()]

    def arm(self, numbers: tuple[int, ...], lrs: tuple[float, ...]) -> ArmTables:
        """The arm of these curves, made once."""
        if (numbers, lrs) not in self._arms:
            self._arms[numbers, lrs] = ArmTables(self, numbers, lrs)
        return self._arms[numbers, lrs]

    def measure(self, how: Callable[..., pd.Series], probe: str, where: str, **more: float) -> dict[str, float]:
        """A value per run id; ``how`` as in ``measured``."""
        key = (how.__name__, probe, where, *more.items())
        if key not in self._measures:
            heard = how(self.records, probe, where, **more)
            self._measures[key] = dict(zip(heard.index, heard, strict=True))
        if not self._measures[key]:
            raise MissingRunsError(f"no run recorded {probe} {where}".rstrip())
        return self._measures[key]


class ComparisonGroup:
    """Curves that differ in what a claim frees; remembers which of them the claim has used."""

    def __init__(self, evidence: Evidence, curves: dict[int, Config]) -> None:
        self.evidence, self.curves = evidence, curves
        self.used: list[ArmTables] = []
        self.caution = ""

    def holds(self, wanted: Config) -> bool:
        """Whether all its curves have these values; ``None`` is absent."""
        return all(curve.get(key) == value for curve in self.curves.values() for key, value in wanted.items())

    def values(self, key: str) -> list[Any]:
        """What a freed key takes, in order, without absent."""
        return sorted({value for curve in self.curves.values() if (value := curve.get(key)) is not None})

    def arms(self, *choices: Choice) -> list[ArmTables]:
        """An arm for each choice; a curve counts at seeds where it has every learning rate that any of them has.

        Raises:
            LackingError: no curve is chosen, or two of one size.
        """
        numbers = [[n for n, curve in self.curves.items() if _chosen(curve, choice)] for choice in choices]
        if not all(numbers):
            raise MissingRunsError("an arm is not there", near=False)
        chosen = {number for some in numbers for number in some}
        lrs = sorted({lr for outline in self.evidence.outlines if outline.curve in chosen for lr in outline.runs})
        arms = [self.evidence.arm(tuple(some), tuple(lrs)) for some in numbers]
        self.used += arms
        return arms


class ArmTables:
    """Curves of one arm, one per size, at the learning rates ``lrs`` of all arms it stands beside.

    Its tables have a row per seed and a column per size, NaN where a seed lacks a learning rate or every loss is NaN.
    """

    def __init__(self, evidence: Evidence, numbers: tuple[int, ...], lrs: tuple[float, ...]) -> None:
        self.evidence, self.lrs = evidence, lrs
        self.known = [outline for outline in evidence.outlines if outline.curve in numbers]
        if len({(outline.size, outline.seed) for outline in self.known}) < len(self.known):
            raise MissingRunsError("two curves of one size in an arm", near=False)
        self.sizes = sorted({outline.size for outline in self.known})
        self.seeds = sorted({outline.seed for outline in self.known})
        self.whole = [outline for outline in self.known if outline.alive and tuple(outline.runs) == lrs]

    @property
    def ids(self) -> set[str]:
        """The runs that count."""
        return {run.id for outline in self.whole for run in outline.runs.values()}

    def table(self, column: str) -> pd.DataFrame:
        """What ``Outline.known`` has under this name."""
        if column in OF_A_CURVE and len(self.lrs) < FEWEST_LRS:
            raise MissingRunsError(f"{len(self.lrs)} learning rates, a curve takes {FEWEST_LRS}")
        return self._square(lambda outline: outline.known[column])

    def loss(self, lr: float) -> pd.DataFrame:
        """Final held-out loss at a learning rate, at most that at initialization."""
        return self._square(lambda outline: outline.runs[lr].loss)

    def above_bigram(self, lr: float) -> pd.DataFrame:
        """By how much the final loss exceeds that of the bigram model: above zero is lost."""
        return self._square(lambda outline: outline.runs[lr].over_bigram)

    def lost(self, lr: float) -> pd.DataFrame:
        """1 where the run diverged or was unstable, as ``sensitivity.judge`` has it, else 0."""
        return self._square(lambda outline: outline.runs[lr].lost)

    def heard(self, lr: float, probe: str, where: str, how: Callable[..., pd.Series], **more: float) -> pd.DataFrame:
        """What a probe heard at a learning rate; ``how`` as in ``measured``."""
        told = self.evidence.measure(how, probe, where, **more)
        return self._square(lambda outline: told.get(outline.runs[lr].id, math.nan))

    @property
    def top(self) -> float:
        """The largest learning rate of the paper's window."""
        return max((lr for lr in self.lrs if lr <= HIGH), default=self.lrs[0])

    def nearest(self, lr: float) -> float:
        """The learning rate nearest to this one, at most a factor of two away."""
        near = min(self.lrs, key=lambda other: abs(math.log(other / lr)))
        if not 0.5 <= near / lr <= 2:
            raise MissingRunsError(f"no learning rate near {lr:g}")
        return near

    def places(self, probe: str) -> list[str]:
        """Where this probe listened, in order."""
        return probe_values.places(self.evidence.records, probe)

    def _square(self, value: Callable[[CurveSummary], float]) -> pd.DataFrame:
        table = np.full((len(self.seeds), len(self.sizes)), math.nan)
        for outline in self.whole:
            table[self.seeds.index(outline.seed), self.sizes.index(outline.size)] = value(outline)
        return pd.DataFrame(table, self.seeds, self.sizes)


def extent(arms: list[ArmTables]) -> str:
    """What was tried, for the reader of a claim that did not come out."""
    sizes = sorted({size for arm in arms for size in arm.sizes})
    lrs = sorted({lr for arm in arms for lr in arm.lrs})
    runs = arms[0].evidence.records.runs
    some = sorted(runs.loc[runs["id"].isin(set().union(*(arm.ids for arm in arms))), "steps"].unique())
    steps = " or ".join(map("{:g}".format, some))
    ends = [" to ".join(dict.fromkeys([say(of[0]), say(of[-1])])) for say, of in ((count, sizes), ("{:g}".format, lrs))]
    return f"{ends[0]} parameters, learning rates {ends[1]}, {steps} steps"


def _spelled(curve: Curve) -> dict[str, Hashable]:
    """A curve's config without absent keys; an intervention is the presence of a key of its own."""
    names = [name for name in str(curve["intervention"]).split("+") if name != "none"]
    known = {key: value for key, value in curve.items() if value is not None and key != "intervention"}
    return {**known, **{f"intervention.{name}": "on" for name in names}}


def _below(key: str, keys: Iterable[str]) -> bool:
    return any(key == above or key.startswith(f"{above}.") for above in keys)


def _chosen(curve: Config, choice: Choice) -> bool:
    return choice(curve) if callable(choice) else all(curve.get(key) == value for key, value in choice.items())
