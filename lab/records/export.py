"""Export of records: the runs of a folder as two csv files, or logged to a tracker as if just trained."""

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
    """The names of all destinations."""
    return ["csv", *(name for name in TRACKERS if name != "none")]


def export_records(folder: Path, to: str, out: Path | None = None) -> str:
    """Export every run of ``folder``, with files in ``out`` or else ``folder``; returns a line that says so.

    Raises:
        RequestError: unknown destination, its extra is not installed, no runs in the folder, or the export failed.
    """
    if to not in destinations():
        raise RequestError(f"cannot export to {to!r}; {nearest(to, destinations())}")
    if to == "trackio" and out:
        raise RequestError("trackio keeps runs where TRACKIO_DIR says; leave --out away")
    tracker: Tracker | None = None if to == "csv" else TRACKERS[to]()
    if tracker:
        require(tracker)
    records, target = store.read(folder), out or folder
    try:
        target.mkdir(parents=True, exist_ok=True)
        if tracker:
            _track(records, tracker, folder.resolve().name, target)
        else:
            for name, table in records._asdict().items():
                files.write_csv(target / f"{name}.csv", table)
    except Exception as fault:  # trackers raise exceptions of any type
        raise RequestError(f"cannot export to {to}: {type(fault).__name__}: {fault}") from None
    files_in = f", files in {target}" if to != "trackio" else ""
    return f"exported {len(records.runs)} runs to {to}{files_in}"


def _track(records: Records, tracker: Tracker, group: str, target: Path) -> None:
    metrics_of = dict(list(records.metrics.groupby("id")))
    for row in records.runs.astype(object).to_dict("records"):
        config, outcome = config_and_outcome(
            {str(key): None if pd.isna(value) else value for key, value in row.items()}
        )
        run = tracker.begin(row["id"], group, config, target)
        assert run, "every destination opens a run"
        try:
            metrics = metrics_of.get(row["id"], records.metrics[:0])
            for step, table in metrics.groupby("step"):
                tags = map(tag, table["probe"], table["where"])
                run.log(dict(zip(tags, table["value"].tolist(), strict=True)), int(str(step)))
            run.log(outcome, int(metrics["step"].max()) if len(metrics) else 0)
        finally:
            run.finish()
