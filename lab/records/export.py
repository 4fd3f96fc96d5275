"""Records handed on: the runs of a folder as two csv files, or in a tracker as if they had just been trained."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from lab.core import files
from lab.core.errors import RequestError, nearest
from lab.core.registry import TRACKERS
from lab.records import store
from lab.records.store import Records
from lab.records.trackers import Tracker, config_and_outcome, require, tag


def destinations() -> list[str]:
    """What records can be exported to."""
    return ["csv", *(name for name in TRACKERS if name != "none")]


def export_records(folder: Path, to: str, out: Path | None = None) -> str:
    """Hand on every run of ``folder``, new files into ``out`` or else ``folder``; returns a line that says so.

    Raises:
        RequestError: no such destination, its extra is not installed, no runs in the folder, or it did not work.
    """
    if to not in destinations():
        raise RequestError(f"cannot export to {to!r}; {nearest(to, destinations())}")
    if to == "trackio" and out:
        raise RequestError("trackio keeps runs where TRACKIO_DIR says; leave --out away")
    tracker: Tracker | None = None if to == "csv" else TRACKERS[to]()
    if tracker:
        require(tracker)
    records, place = store.read(folder), out or folder
    try:
        place.mkdir(parents=True, exist_ok=True)
        if tracker:
            _track(records, tracker, folder.resolve().name, place)
        else:
            _write_csv(records, place)
    except Exception as fault:  # whatever the tracker says
        raise RequestError(f"cannot export to {to}: {type(fault).__name__}: {fault}") from None
    where = f", files in {place}" if to != "trackio" else ""
    return f"exported {len(records.runs)} runs to {to}{where}"


def _write_csv(records: Records, place: Path) -> None:
    for name, table in records._asdict().items():
        files.write_text(place / f"{name}.csv", table.to_csv(index=False))


def _track(records: Records, tracker: Tracker, group: str, place: Path) -> None:
    heard = dict(list(records.metrics.groupby("id")))
    for row in records.runs.astype(object).to_dict("records"):
        config, outcome = config_and_outcome(
            {str(key): None if pd.isna(value) else value for key, value in row.items()}
        )
        run = tracker.begin(row["id"], group, config, place)
        assert run, "a destination tracks"
        try:
            mine = heard.get(row["id"], records.metrics[:0])
            for step, table in mine.groupby("step"):
                tags = map(tag, table["probe"], table["where"])
                run.log(dict(zip(tags, table["value"].tolist(), strict=True)), int(str(step)))
            run.log(outcome, int(mine["step"].max()) if len(mine) else 0)
        finally:
            run.finish()
