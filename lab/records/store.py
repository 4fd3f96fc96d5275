"""What a run leaves behind, and the only doorway between training and analysis.

A results folder holds::

    store.json                     the record version this folder is written in, and the engine of its steps
    commands.json                  every command that added to this folder
    plans/<digest>.json            the frozen list of points and fleets of one request, written before anything runs
    plans/<digest>.progress/<k>    how far fleet k of it is, while the request is under way
    checkpoints/<digest>/<k>...    the state of a fleet after k updates, until it has left its runs behind
    runs/<id>/metrics.parquet      what the probes heard
    runs/<id>/run.json             the run card; written last, so a run is there whole or not at all
    runs.parquet, metrics.parquet  all runs in two tables, gathered from the above

Every file appears at once under its name (written beside it, then moved), so a killed process leaves no half file.
Records hold a digest of themselves: what a disk did to them is found, and not taken for a result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lab.core import files
from lab.core.errors import RequestError
from lab.core.files import digest, write_text

RECORD_VERSION = 1
ENGINES = ("eager", "compiled")

# Columns every run has, whatever its config.  A column of the config is its dotted key (``optimizer.lr``).
RUN_COLUMNS = {
    "id": "string",  # digest of everything that can change the record
    "intervention": "string",  # names of what is switched on, sorted, joined with "+"; "none"
    "status": "string",  # finished | diverged | failed
    "diverged_at": "Int64",  # first step with a non-finite loss; null when there was none
    "reason": "string",  # why a run failed or counts as diverged
    "loss_at_init": "float64",  # on the held-out tokens, nats per token, without z-loss
    "final_val_loss": "float64",  # same tokens, after the last update
    "loss_bigram": "float64",  # same tokens under a smoothed bigram model of the training text
    "parameters": "Int64",
    "parameters_without_embeddings": "Int64",  # without input embedding and output head
    "model_steps_per_second": "float64",  # steps of all runs of the fleet, per second
    "wall_seconds": "float64",  # of the fleet, divided by its runs
    "notes": "string",  # what else came to pass: probes that failed, sizes of fleets for which memory did not do
    "versions": "string",
    "data_fingerprint": "string",
    "data_notes": "string",  # what the data says of itself: files, Python version, entropy
}
METRIC_COLUMNS = {"id": "string", "step": "int64", "probe": "string", "where": "string", "value": "float64"}
# Columns of the config that may differ in what is one run: labels, where records go, what carries its steps out.
NO_PART_OF_ID = {"out", "device", "engine", "model.name", "scale.name"}
STATUSES = ("finished", "diverged", "failed")
NAME = r"[\w-]+"  # of a run, which names its folder, here and in a tracker


class Records(NamedTuple):
    """All runs of a folder: one row per run, and one row per (run, step, probe, where)."""

    runs: pd.DataFrame
    metrics: pd.DataFrame


def run_id(card: Mapping[str, Any]) -> str:
    """Digest of a card's config, data and record version; not of ``NO_PART_OF_ID``, nor of the order of probes."""
    outcome = {*RUN_COLUMNS} - {"intervention"}
    config = {key: value for key, value in card.items() if key not in outcome | NO_PART_OF_ID}
    config["probes.names"] = "+".join(sorted(card["probes.names"].split("+")))
    return digest({"config": config, "data": card["data_fingerprint"], "version": RECORD_VERSION})


def _write_metrics(path: Path, metrics: pd.DataFrame) -> str:
    # numbers that few bits tell apart pack to half the size byte by byte
    words = [column for column in METRIC_COLUMNS if column != "value"]
    return files.write_table(path, metrics, use_dictionary=words, use_byte_stream_split=["value"])


def open_folder(folder: Path, engine: str) -> None:
    """Make ``folder`` ready to be written; its steps are carried out by this engine from the first command on.

    Raises:
        RequestError: it holds records of another version, or cannot be written.
    """
    check_version(folder)
    write_text(folder / "store.json", json.dumps({"record_version": RECORD_VERSION, "engine": engine}) + "\n")


def check_version(folder: Path) -> str | None:
    """Refuse a folder whose records were written in another version; an empty or absent folder passes.

    Returns the engine that ``open_folder`` was told, None where it was not.
    """
    card = folder / "store.json"
    if not card.exists():
        return None
    try:
        about = json.loads(card.read_text())
        version, engine = about["record_version"], about.get("engine")
        if engine not in (None, *ENGINES):
            raise ValueError(engine)
    except (OSError, ValueError, KeyError, TypeError):
        raise RequestError(f"{card} cannot be read; move the folder away or give another out=") from None
    if version != RECORD_VERSION:
        raise RequestError(
            f"{folder} holds records of version {version}, this lab writes version {RECORD_VERSION}; give another out="
        )
    return None if engine is None else str(engine)


def note_command(folder: Path, command: str) -> None:
    """Remember, once, a command that added to this folder."""
    known = commands(folder)
    if command not in known:
        write_text(folder / "commands.json", json.dumps([*known, command], indent=1) + "\n")


def results_folders(folder: Path) -> list[Path]:
    """The results folders right inside a folder that is none itself."""
    return [] if (folder / "store.json").exists() else sorted(card.parent for card in folder.glob("*/store.json"))


def commands(folder: Path) -> list[str]:
    """The commands that filled this folder, oldest first."""
    try:
        return list(map(str, json.loads((folder / "commands.json").read_text())))
    except (OSError, ValueError, TypeError):
        return []


def write_run(folder: Path, card: Mapping[str, Any], metrics: Iterable[tuple[int, str, str, float]]) -> None:
    """Leave one run behind: its metrics ``(step, probe, where, value)``, then its card, a row of ``runs.parquet``.

    An intact run of the same id that did not fail is left alone.

    Raises:
        RequestError: the id is no name, or not that of the config and data on the card; or nothing can be written.
    """
    if not re.fullmatch(NAME, card["id"]):
        raise RequestError(f"a run cannot be called {card['id']!r}")
    if "data_fingerprint" in card and card["id"] != run_id(card):
        raise RequestError(f"run {card['id']} is not a run of this config and data, which make it {run_id(card)}")
    place = folder / "runs" / card["id"]
    there = _card(place)
    if there and there["status"] != "failed":
        return
    table = pd.DataFrame([(card["id"], *row) for row in metrics], columns=list(METRIC_COLUMNS)).astype(METRIC_COLUMNS)
    seal = digest([card, _write_metrics(place / "metrics.parquet", table)])
    write_text(place / "run.json", json.dumps({**card, "digest": seal}, indent=1) + "\n")


def _card(place: Path) -> dict[str, Any] | None:
    """The card of a run that is there as it was written, its metrics with it; else ``None``."""
    try:
        card: dict[str, Any] = json.loads((place / "run.json").read_text())
        seal = card.pop("digest")
        whole = card["id"] == place.name and seal == digest([card, files.file_digest(place / "metrics.parquet")])
        return card if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def read(folder: Path) -> Records:
    """All runs of a folder: the gathered tables, with the runs left behind since then added.

    Raises:
        RequestError: no such folder, no runs in it, or records of another version.
    """
    if not folder.is_dir():
        raise RequestError(f"no results folder {folder}")
    records = find(folder)
    if records is None:
        raise RequestError(f"no runs in {folder}")
    return records


def find(folder: Path) -> Records | None:
    """``read``, but None where no runs are."""
    check_version(folder)
    left_behind = {place.name: place for place in sorted((folder / "runs").glob("*"))}
    gathered = _gathered(folder, left_behind)
    final = set[str]()
    if gathered:
        # What failed may have been trained since; all else is final.  Of two processes that gathered at once, one
        # may have left its runs and the other its metrics.
        runs, metrics = gathered
        final = set(runs.loc[runs["status"] != "failed", "id"]) & set(metrics["id"].unique())
    cards = {name: card for name, place in left_behind.items() if name not in final and (card := _card(place))}
    heard = [files.read_table(left_behind[name] / "metrics.parquet") for name in cards]
    kept = [table[~table["id"].isin(cards)] for table in gathered]
    runs = pd.concat([*kept[:1], pd.DataFrame(list(cards.values()))], ignore_index=True)
    if not len(runs):
        return None
    return Records(_declared(runs), pd.concat([*kept[1:], *heard], ignore_index=True).astype(METRIC_COLUMNS))


def _gathered(folder: Path, left_behind: Collection[str]) -> list[pd.DataFrame]:
    """The two tables, none when they are not there, or damaged and to be made again from ``runs/``.

    Raises:
        RequestError: they are damaged, and hold runs that are nowhere else.
    """
    paths, tables, faults = [folder / "runs.parquet", folder / "metrics.parquet"], [], []
    for path in paths:
        try:
            table = files.read_table(path)
            if not table["id"].drop_duplicates().str.fullmatch(NAME).all():
                raise ValueError("a run's id is no name")
            tables.append(table)
        except Exception as fault:  # a damaged file fails in many ways
            faults.append(str(fault).split("\n")[0])
    if not faults or not any(path.exists() for path in paths):
        return tables
    known = {name for table in tables for name in table["id"].unique()}
    if left_behind and known <= set(left_behind):
        return []
    raise RequestError(f"the tables in {folder} are damaged: {'; '.join(faults)}; without them their runs are missing")


def _declared(runs: pd.DataFrame) -> pd.DataFrame:
    """Fixed columns first and in their declared types, then every config column, none dropped; rows by id."""
    for column, kind in RUN_COLUMNS.items():
        runs[column] = (runs[column] if column in runs else pd.Series([None] * len(runs), runs.index)).astype(kind)  # type: ignore[call-overload]
    config = sorted(set(runs.columns) - set(RUN_COLUMNS))
    return runs[[*RUN_COLUMNS, *config]].sort_values("id", ignore_index=True)


def statuses(folder: Path) -> dict[str, str]:
    """How every run of a folder ended, by id; none in a folder that holds no runs, or is not there yet."""
    records = find(folder)
    return dict(zip(records.runs["id"], records.runs["status"], strict=True)) if records else {}


def gather(folder: Path) -> Records:
    """Write all runs of a folder as ``runs.parquet`` and ``metrics.parquet``, and return them."""
    while True:
        records = read(folder)
        # the runs last: what stands there is taken for gathered
        written = {
            "metrics.parquet": _write_metrics(folder / "metrics.parquet", records.metrics),
            "runs.parquet": files.write_table(folder / "runs.parquet", records.runs),
        }
        # another process may have put one of its own between ours
        if written == {name: files.file_digest(folder / name) for name in written}:
            return records
