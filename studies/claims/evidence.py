"""Evidence: the runs of a folder, in the form in which claims use them: tables of one number per seed and size."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import copy
from functools import cache, cached_property
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

import lab.analysis.probe_values as probe_values
from lab.analysis.curves import Curve, configs, interventions, points
from lab.analysis.sensitivity import HIGH, LOST, judge
from lab.analysis.text import count, first_to_last
from lab.core import files
from lab.core.schema import first_key
from lab.records import store
from lab.records.store import Records
from lab.report.judged import trained_sweeps
from studies.claims.costs import NONE
from studies.claims.curve_summaries import CURVE_QUANTITIES, CurveSummary, summarize_curves

# Quantities in which under-training counts as sensitivity, and their instability parts.
SENSITIVITIES = {"total": "above", "coupled": "coupled_above"}
FEWEST_LRS = 4
COUPLED = "adamw_coupled"
BURST = "bad_batches"
# A table beside results folders: a row each time that a claim was judged on fresh seeds, in the order of time.
READINGS_FILE = "readings.csv"
# Tables in a results folder with effects on seeds whose records it no longer holds: a row for each part of a claim, a
# column for each seed. ``config`` is ``config_digest`` of the runs; ``table`` names a table of ``Qualified``.
EARLIER_SEEDS, EARLIER_KEY = "earlier_seeds.*.csv", ("claim", "config", "table", "part")

Config = Mapping[str, Any]
Choice = Config | Callable[[Config], bool]


class MissingRunsError(Exception):
    """Runs that a claim needs are missing; ``arms_exist`` says whether its arms exist, but with too few of them."""

    def __init__(self, message: str, *, arms_exist: bool = True) -> None:
        super().__init__(message)
        self.arms_exist = arms_exist


class Evidence:
    """The runs of a folder, read once for all claims."""

    def __init__(
        self,
        name: str,
        records: Records,
        commands: Iterable[str] = (),
        earlier_seeds: Mapping[tuple[str, str], pd.DataFrame] = MappingProxyType({}),
        readings: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        """Group the runs into curves.

        Args:
            commands: the commands that filled the folder.
            earlier_seeds: effects on seeds whose records the folder no longer holds, by claim and ``config_digest``; a
                table has a row for each table and part of ``Qualified``, and a column for each seed.
            readings: the verdicts on each claim so far, one for each time that it was judged on fresh seeds.
        """
        self.name, self.records = name, records
        self.earlier_seeds, self.readings = earlier_seeds, readings
        self.sweeps = trained_sweeps(name, commands)
        self.runs = judge(points(records.runs))
        first = self.runs.drop_duplicates("curve")
        keys, curves = configs(records.runs.set_index("id").loc[first["id"]].reset_index())
        self.curves = {n: _present(curves[key]) for n, key in zip(first["curve"], keys, strict=True)}
        self._groups: dict[tuple[str, ...], list[ComparisonGroup]] = {}
        self._probe_values: dict[Any, dict[str, float]] = {}
        self._run_tables: dict[Callable[[Records], pd.DataFrame], pd.DataFrame] = {}

    @cached_property
    def summaries(self) -> list[CurveSummary]:
        """The summary of each curve and seed."""
        return summarize_curves(self.runs)

    def groups(self, frees: Iterable[str]) -> list[ComparisonGroup]:
        """Groups of curves that agree in everything except the keys ``frees`` and those below them; computed once."""
        key = tuple(frees)
        if key not in self._groups:
            groups: dict[Hashable, dict[int, Config]] = {}
            freed = {name for name in set().union(*self.curves.values()) if _below(name, key)}
            for number, curve in self.curves.items():
                fixed = frozenset((name, value) for name, value in curve.items() if name not in freed)
                groups.setdefault(fixed, {})[number] = curve
            self._groups[key] = [ComparisonGroup(self, curves) for curves in groups.values()]
        return self._groups[key]

    def probe_values(
        self, reduce: Callable[..., pd.Series], probe: str, where: str, **options: float
    ) -> dict[str, float]:
        """A value per run id, computed once; ``reduce`` is called like a function of ``lab.analysis.probe_values``.

        Raises:
            MissingRunsError: no run recorded this probe there.
        """
        key = (reduce, probe, where, *options.items())
        if key not in self._probe_values:
            values = reduce(self.records, probe, where, **options)
            self._probe_values[key] = dict(zip(values.index, values, strict=True))
        if not self._probe_values[key]:
            raise MissingRunsError(f"no run recorded {probe} {where}".rstrip())
        return self._probe_values[key]

    def run_table(self, tabulate: Callable[[Records], pd.DataFrame]) -> pd.DataFrame:
        """The table that a function such as ``spike_costs`` makes of the records, indexed by run id; computed once."""
        if tabulate not in self._run_tables:
            self._run_tables[tabulate] = tabulate(self.records)
        return self._run_tables[tabulate]


def read_evidence(folder: Path, records: Records, commands: Iterable[str] | None = None) -> Evidence:
    """The evidence of a results folder: its records, effects on earlier seeds, and the readings beside the folder."""
    tables = [
        files.read_csv(path, dtype=dict.fromkeys(EARLIER_KEY, str), na_filter=False)
        .set_index(list(EARLIER_KEY))
        .replace("", math.nan)
        .astype(float)
        for path in sorted(folder.glob(EARLIER_SEEDS))
    ]
    earlier_seeds = {
        (str(claim), str(config)): effects.droplevel(["claim", "config"]).dropna(axis=1, how="all")
        for table in tables and [pd.concat(tables, axis=1, verify_integrity=True)]
        for (claim, config), effects in table.groupby(["claim", "config"], sort=False)
    }
    readings = folder.resolve().parent / READINGS_FILE
    verdicts = _readings_in(files.read_bytes(readings)) if readings.exists() else {}
    return Evidence(str(folder), records, commands or store.commands(folder), earlier_seeds, verdicts)


@cache
def _readings_in(content: bytes) -> dict[str, list[str]]:
    """The verdicts on each claim in a file of readings, which many folders share."""
    table = pd.read_csv(BytesIO(content))
    return {str(claim): list(of_claim) for claim, of_claim in table.groupby("claim")["verdict"]}


class ComparisonGroup:
    """Curves that differ only in the keys that a claim frees."""

    def __init__(self, evidence: Evidence, curves: dict[int, Config]) -> None:
        self.evidence, self.curves = evidence, curves

    def holds(self, config: Config) -> bool:
        """Whether all its curves have these values; ``None`` means that a key is absent."""
        return all(curve.get(key) == value for key, value in config.items() for curve in self.curves.values())

    def values(self, key: str) -> list[Any]:
        """The values of a freed key in rising order; curves without the key are skipped."""
        return sorted({value for curve in self.curves.values() if (value := curve.get(key)) is not None})

    def arms(self, *choices: Choice) -> list[ArmTables]:
        """One arm for each choice, all at the learning rates that any of them has.

        Raises:
            MissingRunsError: a choice matches no curve, or two of one size.
        """
        arms = [tuple(n for n, curve in self.curves.items() if _chosen(curve, choice)) for choice in choices]
        if not all(arms):
            raise MissingRunsError("an arm has no curve", arms_exist=False)
        chosen = {number for numbers in arms for number in numbers}
        lrs = sorted({lr for summary in self.evidence.summaries if summary.curve in chosen for lr in summary.runs})
        return [ArmTables(self.evidence, numbers, tuple(lrs)) for numbers in arms]


def each_value_of(group: ComparisonGroup, key: str, above: float = -math.inf) -> list[ArmTables]:
    """An arm for each value of a key above a number, in rising order."""
    values = [value for value in group.values(key) if value > above]
    if len(values) < 2:
        raise MissingRunsError(f"one {key}", arms_exist=False)
    return group.arms(*({key: value} for value in values))


def at_one_rate(group: ComparisonGroup, lr: float, of: Sequence[Config]) -> list[ArmTables]:
    """The arms ``of`` these configs at one learning rate, whichever others some of them have."""
    return [ArmTables(arm.evidence, arm.numbers, (lr,)) for arm in group.arms(*of)]


def ends_of(group: ComparisonGroup, key: str) -> list[ArmTables]:
    """The arms with the lowest and the highest value of a key."""
    arms = each_value_of(group, key)
    return [arms[0], arms[-1]]


def bursts_of(group: ComparisonGroup) -> list[str]:
    """The kinds of bursts of bad data that were injected into runs.

    Raises:
        MissingRunsError: no run has a burst.
    """
    bursts = [burst for burst in group.values(BURST) if burst != NONE]
    if not bursts:
        raise MissingRunsError("no run has a burst", arms_exist=False)
    return bursts


class ArmTables:
    """Curves of one arm, one per size, at the learning rates ``lrs`` of all arms with which it is compared.

    Its tables have a row per seed and a column per size; NaN where a seed lacks a learning rate or every loss is NaN.

    Attributes:
        reads_sensitivity: whether some table was one of ``SENSITIVITIES``, on which the verdict then depends.
    """

    def __init__(self, evidence: Evidence, numbers: tuple[int, ...], lrs: tuple[float, ...]) -> None:
        self.evidence, self.numbers, self.lrs = evidence, numbers, lrs
        self.reads_sensitivity = False
        self.summaries = [summary for summary in evidence.summaries if summary.curve in numbers]
        if len({(summary.size, summary.seed) for summary in self.summaries}) < len(self.summaries):
            raise MissingRunsError("two curves of one size in an arm", arms_exist=False)
        self.sizes = sorted({summary.size for summary in self.summaries})
        self.seeds = sorted({summary.seed for summary in self.summaries})
        self.complete = [summary for summary in self.summaries if summary.alive and summary.runs.keys() >= set(lrs)]

    @property
    def ids(self) -> set[str]:
        """Ids of the runs in its tables."""
        return {run.id for summary in self.complete for run in summary.runs.values()}

    def without_undertraining(self) -> ArmTables:
        """The same arm, with the instability part of each S in place of S."""
        arm = copy(self)
        arm.complete = [
            summary._replace(values=summary.values | {s: summary.values[part] for s, part in SENSITIVITIES.items()})
            for summary in self.complete
        ]
        return arm

    def setting(self, key: str) -> Any:
        """The value of a config key, which all its curves share."""
        (value,) = {self.evidence.curves[number].get(key) for number in self.numbers}
        return value

    def table(self, quantity: str, largest: int = 0) -> pd.DataFrame:
        """A quantity of ``CurveSummary.values``.

        Args:
            largest: restricts the table to this many of the largest sizes; 0 keeps all.

        Raises:
            MissingRunsError: the quantity needs a curve, and there are too few learning rates for one.
        """
        if quantity in CURVE_QUANTITIES and len(self.lrs) < FEWEST_LRS:
            raise MissingRunsError(f"{len(self.lrs)} learning rates, a curve takes {FEWEST_LRS}")
        self.reads_sensitivity |= quantity in SENSITIVITIES
        return self._tabulate(lambda summary: summary.values[quantity])[self.sizes[-largest:]]

    def resolution(self, quantity: str) -> pd.DataFrame:
        """The step of the grid off which each value of ``table`` was read, in decades; zero if no grid limits it."""
        return self._tabulate(lambda summary: summary.resolutions.get(quantity, 0.0))

    def loss(self, lr: float) -> pd.DataFrame:
        """Final held-out loss at a learning rate, at most that at initialization, nats/token."""
        return self._tabulate(lambda summary: summary.runs[lr].loss)

    def margin_over_costly_loss(self, lr: float) -> pd.DataFrame:
        """Final loss minus the curve's best one + ``LOST``, nats/token: above zero the learning rate is costly.

        NaN if no learning rate of the curve beat the bigram model.
        """

        def margin(summary: CurveSummary) -> float:
            return summary.runs[lr].loss - summary.values["best"] - LOST if summary.learned else math.nan

        return self._tabulate(margin)

    def lost(self, lr: float) -> pd.DataFrame:
        """1 if the learning rate lies above eta_div, else 0; NaN if no learning rate beat the bigram model."""
        first = self.table("log_lost")
        return (math.log10(lr) > first).where(first.notna()).astype(float)

    def probe(
        self, lr: float, probe: str, where: str, reduce: Callable[..., pd.Series], **options: float
    ) -> pd.DataFrame:
        """Values of a probe at a learning rate; ``reduce`` as in ``Evidence.probe_values``."""
        return self._at_rate(lr, self.evidence.probe_values(reduce, probe, where, **options))

    def column(self, lr: float, tabulate: Callable[[Records], pd.DataFrame], column: str) -> pd.DataFrame:
        """A column of ``Evidence.run_table`` at a learning rate.

        Raises:
            MissingRunsError: the table has no row, or no such column.
        """
        table = self.evidence.run_table(tabulate)
        if table.empty or column not in table:
            raise MissingRunsError(f"no run recorded its {column}")
        return self._at_rate(lr, table[column])

    @property
    def top(self) -> float:
        """The largest learning rate of the paper's window."""
        return max((lr for lr in self.lrs if lr <= HIGH), default=self.lrs[0])

    def nearest(self, lr: float) -> float:
        """The learning rate nearest to ``lr``.

        Raises:
            MissingRunsError: none is within a factor of two.
        """
        nearest = min(self.lrs, key=lambda other: abs(math.log(other / lr)))
        if not 0.5 <= nearest / lr <= 2:
            raise MissingRunsError(f"no learning rate near {lr:g}")
        return nearest

    def locations(self, probe: str, ending: str = "") -> list[str]:
        """The parts of the model, with this ending of their names, where a probe was recorded, in the order of blocks.

        Raises:
            MissingRunsError: there is none.
        """
        places = [where for where in probe_values.places(self.evidence.records, probe) if where.endswith(ending)]
        if not places:
            raise MissingRunsError(f"no run recorded {probe} of {ending.removeprefix('.') or 'any part'}")
        return places

    def _at_rate(self, lr: float, values: Mapping[str, float] | pd.Series) -> pd.DataFrame:
        """Values by run id, at a learning rate."""
        return self._tabulate(lambda summary: float(values.get(summary.runs[lr].id, math.nan)))

    def _tabulate(self, value: Callable[[CurveSummary], float]) -> pd.DataFrame:
        table = np.full((len(self.seeds), len(self.sizes)), math.nan)
        for summary in self.complete:
            table[self.seeds.index(summary.seed), self.sizes.index(summary.size)] = value(summary)
        return pd.DataFrame(table, self.seeds, self.sizes)


def config_digest(arms: list[ArmTables]) -> str:
    """A digest of the configs of the runs of these arms, including precision and engine, but not seeds.

    Like ids, it digests the first name of a key, so that a new name parts no effects from those on earlier seeds.
    """
    curves = {
        number: sorted(str((first_key(key), value)) for key, value in curve.items())
        for number, curve in arms[0].evidence.curves.items()
    }
    configs = [[arm.lrs, sorted(curves[number] for number in arm.numbers)] for arm in arms]
    return sha256(json.dumps(configs).encode()).hexdigest()[:12]


def sizes_of(arms: list[ArmTables]) -> list[int]:
    """Numbers of parameters in rising order."""
    return sorted({size for arm in arms for size in arm.sizes})


def steps_of(arms: list[ArmTables]) -> list[int]:
    """Numbers of training steps in rising order."""
    return sorted(map(int, probe_values.updates(_runs_of(arms)).unique()))


def decay_times_steps_of(arms: list[ArmTables]) -> list[float]:
    """Weight decay times steps in rising order, of runs whose decay does not depend on the learning rate."""
    runs = _runs_of(arms)
    products = (runs["optimizer.weight_decay"] * runs["steps"])[~runs["optimizer.name"].eq(COUPLED)]
    return sorted({float(f"{product:.6g}") for product in products})


def _runs_of(arms: list[ArmTables]) -> pd.DataFrame:
    runs = arms[0].evidence.records.runs
    return runs[runs["id"].isin(set().union(*(arm.ids for arm in arms)))]


def extent(arms: list[ArmTables]) -> str:
    """Sizes, learning rates and steps that were tried, in words."""
    lrs = sorted({lr for arm in arms for lr in arm.lrs})
    sizes, rates = first_to_last(map(count, sizes_of(arms))), first_to_last(map("{:g}".format, lrs))
    return f"{sizes} parameters, learning rates {rates}, {first_to_last(map(str, steps_of(arms)))} steps"


def _present(curve: Curve) -> dict[str, Hashable]:
    """The config of a curve without absent keys; each intervention is a key of its own."""
    named = ("intervention", store.ORDER)
    present = {key: value for key, value in curve.items() if value is not None and key not in named}
    return {**present, **{f"intervention.{name}": "on" for name in interventions(curve)}}


def _below(key: str, keys: Iterable[str]) -> bool:
    return any(key == above or key.startswith(f"{above}.") for above in keys)


def _chosen(curve: Config, choice: Choice) -> bool:
    return choice(curve) if callable(choice) else all(curve.get(key) == value for key, value in choice.items())
