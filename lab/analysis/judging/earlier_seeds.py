"""Effects on earlier seeds, whose records a folder no longer holds; claims are judged on these and its own seeds.

Tables ``earlier_seeds.*.csv`` in the folder hold them, one for each set of records that was replaced. A row is a part
of a claim; its columns are ``KEY``, then an effect for each seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pandas as pd

from lab.analysis.judging.effects import DIGITS, Qualified
from lab.analysis.judging.evidence import ArmTables
from lab.core import files
from lab.core.errors import RequestError

PATTERN = "earlier_seeds.*.csv"
# ``config`` is a digest of the config of the runs, see ``config_of``; ``table`` is ``EFFECT``, its control, or another
# table of the claim.
KEY = ["claim", "config", "table", "part"]
EFFECT, INSTABILITY_PART = "effect", "instability part"


def read(folder: Path) -> pd.DataFrame:
    """The effects of all earlier seeds of a folder of records, by ``KEY`` and seed; empty if there are none.

    Raises:
        RequestError: a table cannot be read, or a seed is in two of them.
    """
    tables = []
    for path in sorted(folder.glob(PATTERN)):
        try:
            table = files.read_csv(path, dtype=dict.fromkeys(KEY, str), na_filter=False)
            tables.append(table.set_index(KEY).replace("", "nan").astype(float))
        except (OSError, ValueError, KeyError):
            raise RequestError(f"{path} cannot be read as a table with columns {','.join(KEY)} and seeds") from None
    effects = pd.concat(tables or [pd.DataFrame(columns=KEY).set_index(KEY)], axis=1)
    if twice := sorted(effects.columns[effects.columns.duplicated()]):
        raise RequestError(f"{folder}: seed {twice[0]} is in two tables of earlier seeds")
    return effects


def config_of(arms: list[ArmTables]) -> str:
    """A digest of the configs of the runs of these arms, including precision and engine, but not seeds."""
    curves = arms[0].evidence.curves
    configs = [[arm.lrs, sorted(sorted(map(str, curves[number].items())) for number in arm.numbers)] for arm in arms]
    return sha256(json.dumps(configs).encode()).hexdigest()[:12]


def rows(claim: str, config: str, effects: Qualified, table: str = EFFECT) -> pd.DataFrame:
    """The effects of a claim, its controls and the steps of its grids as rows of a table of earlier seeds."""
    return pd.concat(
        {(claim, config, name): _by_part(one).round(DIGITS).T for name, one in _tables(effects, table)}, names=KEY
    )


def _tables(effects: Qualified, table: str) -> Iterator[tuple[str, pd.DataFrame | pd.Series]]:
    for name, one in ((table, effects.table), (f"{table} resolution", effects.resolution)):
        if isinstance(one, (pd.DataFrame, pd.Series)):
            yield name, one
    for name, of in (("control", effects.control), ("presumed", effects.presumed)):
        if of is not None:
            yield from _tables(of, f"{table} {name}")


def pooled(effects: Qualified, earlier: pd.DataFrame, config: str, table: str = EFFECT) -> Qualified:
    """Effects of a claim with those of earlier seeds of the same config; of a seed that both have, the new one counts.

    Args:
        earlier: the rows of ``read`` of this claim.

    Raises:
        RequestError: they have other parts than the claim has now.
    """
    alike = earlier[earlier.index.get_level_values("config") == config].dropna(axis=1, how="all")

    def both(name: str, now: pd.DataFrame | pd.Series) -> pd.DataFrame | pd.Series:
        shown, before = _by_part(now), alike[alike.index.get_level_values("table") == name].droplevel([*KEY[:3]]).T
        if list(shown) != list(before):
            claims = ", ".join(alike.index.unique("claim"))
            raise RequestError(f"earlier seeds of {claims} have other parts; results/earlier_seeds.py writes them anew")
        every = pd.concat([before[~before.index.isin(shown.index)], shown])
        if isinstance(now, pd.Series):
            return pd.Series(every.iloc[:, 0], name=now.name)
        return every.set_axis(now.columns, axis=1)

    def with_earlier(one: Qualified, name: str) -> Qualified:
        step = one.resolution
        return one._replace(
            table=both(name, one.table),
            resolution=both(f"{name} resolution", step) if isinstance(step, (pd.DataFrame, pd.Series)) else step,
            control=one.control and with_earlier(one.control, f"{name} control"),
            presumed=one.presumed and with_earlier(one.presumed, f"{name} presumed"),
        )

    return with_earlier(effects, table) if len(alike) else effects


def _by_part(table: pd.DataFrame | pd.Series) -> pd.DataFrame:
    """A table with a column per part, named as in a file."""
    shown = pd.DataFrame(table)
    return shown.set_axis([str(part) for part in ([""] if isinstance(table, pd.Series) else shown)], axis=1)
