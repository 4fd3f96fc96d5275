"""The results folder: training writes the records of its runs here, and analysis reads them.

A results folder holds::

    store.json                     the record version this folder is written in, and the engine of its steps
    commands.json                  every command that added to this folder
    requests.json                  of each of these commands the day it was first given, and the question it asks
    plans/<digest>.jsonl           the frozen list of points and fleets of one request, written before anything runs
    plans/<digest>.progress/<k>    how far fleet k of it is, while the request is under way
    plans/leases/                  which process trains which runs, see ``lab.records.leases``
    checkpoints/<digest>/<k>...    the state of a fleet after k updates, until its runs are written
    runs/<id>/metrics.parquet      the values of the probes
    runs/<id>/events.parquet       what happened to a run that was watched, if anything did
    runs/<id>/run.json             the run card; written last, so that a run is complete or absent
    runs.parquet, metrics.parquet  all runs in two tables, gathered from the above
    events.parquet                 the events of all runs, if there are any
    runs.2.parquet ...             the next part of these tables: runs added after ``runs/`` was removed

Every file is written atomically, so a killed process leaves no partial file.  Records hold their own digest, by which
damage is detected.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lab.core import files, shipped
from lab.core.errors import RequestError
from lab.core.files import digest, write_text
from lab.core.schema import first_key, key_now
from lab.records import parts

RECORD_VERSION = 1
ENGINES = ("eager", "captured", "compiled")

# Columns every run has, whatever its config.  A column of the config is its dotted key (``optimizer.lr``).
RUN_COLUMNS = {
    "id": "string",  # digest of everything that can change the record
    "intervention": "string",  # names of the interventions, sorted, joined with "+"; or "none"
    "bad_batches": "string",  # name of the burst, or "none"
    "response": "string",  # name of the response to loss spikes, or "none"
    "restarts": "string",  # name of the restart schedule, or "none"
    "status": "string",  # finished | diverged | failed
    "diverged_at": "Int64",  # first step with a non-finite loss; null when there was none
    "reason": "string",  # why a run failed or counts as diverged
    # Null for a run that was not watched, one without a burst, a response or restarts:
    "ending": "string",  # of its last loss spike: none | recovered | stuck | diverged; or stalled
    "spikes": "Int64",  # loss spikes, those included from which it went back
    "rewound_steps": "Int64",  # updates from which it went back
    "skipped_batches": "Int64",  # batches left out, and those whose update was left out
    "updates": "Int64",  # that a run made which chose its own batches, fewer than its steps; null for any other
    "loss_at_init": "float64",  # on the held-out tokens, nats per token, without z-loss
    "final_val_loss": "float64",  # same tokens, after the last update
    "loss_bigram": "float64",  # same tokens under a smoothed bigram model of the training text
    "loss_unigram": "float64",  # same tokens if they were drawn with the frequencies of the training text
    "parameters": "Int64",
    "parameters_without_embeddings": "Int64",  # without the token embedding and the head, but with positions
    "model_steps_per_second": "float64",  # steps of all runs of the fleet, per second
    "wall_seconds": "float64",  # of the fleet, divided by its runs
    "notes": "string",  # probes that failed, and sizes of fleets that ran out of memory
    "versions": "string",
    "data_fingerprint": "string",
    "data_notes": "string",  # properties of the data: files, Python version, entropy
}
# What tables hold where they have no value for a setting, since records leave it out at its default: so readers take an
# older run, and a newer one with the default, for one arm. ``schema.recorded`` decides what is left out.
DEFAULTS: dict[str, Any] = shipped.load(Path(__file__).with_name("defaults.yaml"))
# The order in which interventions act, where they do not act by their names, as they did in older records.
ORDER = "intervention.order"
SPIKE_LAB = ("bad_batches", "response", "restarts")  # columns that are part of an id unless they are "none"
ENTRIES = "restarts.entries"  # the column with what restarts change, as ``STEP: KEY=VALUE ...``
TABLE = "table"  # the column of imported runs with the name of their table, whose settings have the user's names
METRIC_COLUMNS = {"id": "string", "step": "int64", "probe": "string", "where": "string", "value": "float64"}
# Columns of the config that do not change the run: labels, the folder of its records, device and engine; and its
# tokens, which follow from steps and batches.
EXCLUDED_FROM_ID = {"out", "device", "engine", "model.name", "scale.name", "tokens"}
# Columns of what observes a run, and changes nothing in it.
OBSERVES = ("probes.name", "probes.every", "probes.names")
# The lists of ``conf/probes`` as they were when ids were made; ids do not digest what was added to them.
PROBES = {
    "all": "train_loss val_loss attention_logit_max attention_entropy output_logit_mean output_logit_rms log_z "
    "log_z_square query_norm key_norm query_key_cosine grad_norm grad_norm_clipped grad_rms update_rms param_rms "
    "block_rms eps_ratio",
    "experts": "train_loss val_loss grad_norm attention_logit_max router_logit_max router_log_z router_entropy "
    "router_balance router_flips router_bias_max expert_load_max expert_load_cv expert_load_cv_batch dead_experts",
}
EVENT_COLUMNS = {
    "id": "string",
    "step": "int64",  # updates made so far, those not counted from which the run went back
    "batch": "int64",  # index of the batch of the data that comes next
    "kind": "string",  # burst | spike | recovered | stuck | diverged | stalled | rewind | skip_batches | restart | ...
    "value": "float64",
    "note": "string",  # what the value is
}
# Within which the numbers of a run make sense, so that they can be counted, added and drawn.
BOUNDS = {
    "optimizer.lr": (math.ulp(0.0), sys.float_info.max),  # as a config may have it
    "wall_seconds": (0, 1e12),
    **dict.fromkeys(
        ("steps", "batch_size", "seq_len", *(name for name, kind in RUN_COLUMNS.items() if kind == "Int64")), (0, 2**53)
    ),
}
EVENTS = "events.parquet"
UNIGRAM_LOSSES = Path(__file__).with_name("unigram_losses.yaml")
STATUSES = ("finished", "diverged", "failed")


def _empty(columns: Mapping[str, str]) -> pd.DataFrame:
    """A table without rows."""
    return pd.DataFrame(columns=list(columns)).astype(columns)


class _Tables(NamedTuple):
    runs: pd.DataFrame
    metrics: pd.DataFrame
    events: pd.DataFrame


class Records(_Tables):
    """All runs of a folder: one row per run, one row per (run, step, probe, where), and one row per event."""

    def __new__(cls, runs: pd.DataFrame, metrics: pd.DataFrame, events: pd.DataFrame | None = None) -> Records:
        # no default that is made where the module is loaded, which would load pandas
        return super().__new__(cls, runs, metrics, _empty(EVENT_COLUMNS) if events is None else events)

    def of(self, ids: Collection[str]) -> Records:
        """Those of runs with these ids."""
        return Records(*(table[table["id"].isin(ids)].reset_index(drop=True) for table in self))


def run_id(card: Mapping[str, Any]) -> str:
    """Digest of a card's config, data and record version, without ``EXCLUDED_FROM_ID`` and the order of probes.

    Keys count under their first names, so that a run keeps its id when they are renamed.

    Probes are no part of what a run is, but were digested when the first ids were made. They still are, since records
    keep their ids, with one exception: what a list has besides those of ``PROBES`` changes no id. So a probe that is
    added to ``conf/probes`` does not orphan any record. A run that is recorded with another list is found by
    ``planner.as_recorded``.
    """
    outcome = {*RUN_COLUMNS} - {"intervention", *SPIKE_LAB}
    absent = {key for key in SPIKE_LAB if card.get(key) == "none"}
    config = {key: value for key, value in card.items() if key not in outcome | EXCLUDED_FROM_ID | absent}
    config["probes.names"] = "+".join(sorted(_first_probes(card["probes.name"], card["probes.names"].split("+"))))
    if "intervention" in config:
        config["intervention"] = _names(first_key, config["intervention"])
    if ENTRIES in config:
        config[ENTRIES] = _in_entries(first_key, config[ENTRIES])
    config = {first_key(key): value for key, value in config.items()}
    return digest({"config": config, "data": card["data_fingerprint"], "version": RECORD_VERSION})


def _first_probes(name: str, probes: Sequence[str]) -> Sequence[str]:
    """Those that the list of this name held first, if all of them are among the probes; else the probes."""
    first = PROBES.get(name, "").split()
    return first if first and {*first} <= {*probes} else probes


def _names(name: Callable[[str], str], joined: str) -> str:
    """Names of interventions joined with ``+``, each as its keys are called."""
    keys = (name(f"intervention.{each}") for each in joined.split("+"))
    return "+".join(sorted(key.removeprefix("intervention.") for key in keys))


def _in_entries(name: Callable[[str], str], entries: str) -> str:
    """The entries of a restart schedule with other names of keys."""
    return re.sub(r"[\w.]+(?==)", lambda key: name(key[0]), entries)


def write_metrics(path: Path, metrics: pd.DataFrame, within: Path | None = None, level: int | None = None) -> str:
    """Write a table of metrics; returns the digest of the file.  See ``files.atomic_write``.

    Args:
        level: the compression level of zstd, 1 to 22; by default pyarrow's.
    """
    # similar numbers compress to half the size byte by byte, and steps to almost nothing as differences
    encoding = {"step": "DELTA_BINARY_PACKED", "value": "BYTE_STREAM_SPLIT"}
    words = [column for column in METRIC_COLUMNS if column not in encoding]
    packing: dict[str, Any] = {"use_dictionary": words, "column_encoding": encoding, "compression_level": level}
    return files.write_table(path, metrics, within=within, **packing)


def open_folder(folder: Path, engine: str | None) -> None:
    """Prepare ``folder`` for writing; all its runs use this engine, or none of the lab's.

    Raises:
        RequestError: it holds records of another version, or cannot be written.
    """
    card = folder / "store.json"
    if check_version(folder) != engine or not card.exists():  # a folder that may only be read is left as it is
        _write_header(card, engine)


def _write_header(card: Path, engine: str | None) -> None:
    write_text(card, json.dumps({"record_version": RECORD_VERSION, "engine": engine}) + "\n")


def _recorded_engines(folder: Path) -> set[str | None]:
    """The engines with which intact runs of a folder were made; None of an imported run, and no engine without runs."""
    engines = set[str | None]()
    for part in parts.written(folder):
        try:
            runs = files.read_table(part.runs)
        except Exception:  # a damaged file fails in many ways
            return set()
        column = runs["engine"] if "engine" in runs else pd.Series(None, runs.index, dtype=object)
        engines |= {engine if engine in ENGINES else None for engine in column.unique()}
    cards = filter(None, map(_card, _run_folders(folder).values()))
    return engines | {card.get("engine") for card in cards}


def check_version(folder: Path) -> str | None:
    """Refuse a folder whose records have another version; an empty or absent folder passes.

    A ``store.json`` that was cut short is written anew, if the records say with which engine they were made.

    Returns:
        The engine given to ``open_folder``; None without one.

    Raises:
        RequestError: another version, or a file that cannot be read.
    """
    card = folder / "store.json"
    if not card.exists():
        return None
    try:
        header = files.read_json(card, dict)
        version, engine = header["record_version"], header.get("engine")
        if engine not in (None, *ENGINES):
            raise ValueError(engine)
    except (OSError, ValueError, KeyError, TypeError):
        version, engines = RECORD_VERSION, _recorded_engines(folder)
        if len(engines) != 1:
            raise RequestError(f"{card} cannot be read; move the folder away or give another out=") from None
        (engine,) = engines
        with suppress(RequestError):  # of a folder that may only be read
            _write_header(card, engine)
    if version != RECORD_VERSION:
        raise RequestError(
            f"{folder} holds records of version {version}, this lab writes version {RECORD_VERSION}; give another out="
        )
    return None if engine is None else str(engine)


def note_command(folder: Path, command: str, question: str = "", recipe_lrs: Mapping[str, float] | None = None) -> None:
    """Record a command that adds to this folder, and what ``RecordedCommand`` holds: the day and the question once.

    One with learning rates of recipes comes last, since these may have changed since it was given before.
    """
    earlier, before = commands(folder), requests(folder)
    recorded = dict(before)
    day = "" if command in earlier else datetime.date.today().isoformat()
    now = recorded.get(command) or RecordedCommand(day, question)
    if recipe_lrs:
        recorded.pop(command, None)
        now = now._replace(recipe_lrs=dict(recipe_lrs))
    recorded[command] = now
    if [*recorded.items()] != [*before.items()]:
        content = {
            key: {name: value for name, value in request._asdict().items() if name != "recipe_lrs" or value}
            for key, request in recorded.items()
        }
        write_text(folder / "requests.json", json.dumps(content, indent=1) + "\n")
    if command not in earlier:
        write_text(folder / "commands.json", json.dumps([*earlier, command], indent=1) + "\n")


class RecordedCommand(NamedTuple):
    """The record of a command.

    Attributes:
        day: when it was first given, as in ``2026-01-31``; empty if it is older than this record.
        question: the question of its sweep; empty if it asks none.
        recipe_lrs: of each arm that it swept over learning rates the id of its first run, and the learning rate of the
            recipe itself, which the swept ones replace.
    """

    day: str
    question: str
    recipe_lrs: dict[str, float] = {}  # noqa: RUF012


def requests(folder: Path) -> dict[str, RecordedCommand]:
    """By command what is on record of it; empty for folders without such a record."""
    try:
        content = files.read_json(folder / "requests.json", dict)
        return {
            command: RecordedCommand(
                str(entry["day"]),
                str(entry["question"]),
                {run: float(lr) for run, lr in entry.get("recipe_lrs", {}).items() if 0 < float(lr) < math.inf},
            )
            for command, entry in content.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def recipe_lrs(folder: Path) -> dict[str, float]:
    """The learning rates of recipes by run, as in ``RecordedCommand``; the newest command comes last."""
    return {run: lr for request in requests(folder).values() for run, lr in request.recipe_lrs.items()}


def is_results_folder(path: Path) -> bool:
    """Whether a folder holds records of the lab."""
    return path.is_dir() and any((path / part).exists() for part in ("store.json", "runs", "runs.parquet"))


def results_folders(folder: Path) -> list[Path]:
    """The results folders directly inside a folder that is not one itself."""
    return [] if (folder / "store.json").exists() else sorted(card.parent for card in folder.glob("*/store.json"))


def commands(folder: Path) -> list[str]:
    """The commands that added to this folder, oldest first."""
    try:
        return list(map(str, files.read_json(folder / "commands.json", list)))
    except (OSError, ValueError, TypeError):
        return []


def write_run(
    folder: Path,
    card: Mapping[str, Any],
    metrics: Iterable[tuple[int, str, str, float]],
    events: Iterable[tuple[int, int, str, float, str]] = (),
) -> None:
    """Write one run: metrics ``(step, probe, where, value)``, events, then its card, a row of ``runs.parquet``.

    An event is ``(step, batch, kind, value, note)``.

    Do nothing if the folder holds an intact run of the same id that did not fail.

    Raises:
        RequestError: the id is not a valid name, or not the id of the config and data on the card; or the folder cannot
            be written.
    """
    if not re.fullmatch(parts.NAME, card["id"]):
        raise RequestError(f"a run cannot be called {card['id']!r}")
    if "data_fingerprint" in card and card["id"] != run_id(card):
        raise RequestError(f"run {card['id']} is not a run of this config and data, which make it {run_id(card)}")
    run_folder = folder / "runs" / card["id"]
    existing = _card(run_folder)
    if existing and existing["status"] != "failed":
        return
    table = pd.DataFrame([(card["id"], *row) for row in metrics], columns=list(METRIC_COLUMNS)).astype(METRIC_COLUMNS)
    digests = [write_metrics(run_folder / "metrics.parquet", table, folder)]
    files.remove(run_folder / EVENTS, within=folder)  # of an attempt that failed
    if happened := [(card["id"], *event) for event in events]:
        table = pd.DataFrame(happened, columns=list(EVENT_COLUMNS)).astype(EVENT_COLUMNS)
        digests.append(files.write_table(run_folder / EVENTS, table, within=folder))
    sealed = {**card, "digest": digest([card, *digests])}
    write_text(run_folder / "run.json", json.dumps(sealed, indent=1) + "\n", within=folder)


def _card(run_folder: Path) -> dict[str, Any] | None:
    """The card of a run if card and metrics are intact; else ``None``."""
    try:
        card = files.read_json(run_folder / "run.json", dict)
        seal = card.pop("digest")
        tables = [run_folder / "metrics.parquet", *run_folder.glob(EVENTS)]
        intact = card["id"] == run_folder.name and seal == digest([card, *map(files.file_digest, tables)])
        return card if intact else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def is_recorded(folder: Path, run: str) -> bool:
    """Whether a run of this id has an intact record in ``runs/`` and did not fail."""
    card = _card(folder / "runs" / run)
    return card is not None and card["status"] != "failed"


def read(folder: Path) -> Records:
    """Read all runs of a folder: the gathered tables, and the runs written since.

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
    """As ``read``, but None if there are no runs.

    Raises:
        RequestError: records of another version, or damaged tables.
    """
    with _refusing_nonsense(folder):
        records = joined(*_in_parts(folder))
    return records if len(records.runs) else None


@contextmanager
def _refusing_nonsense(folder: Path) -> Iterator[None]:
    """Refuse records with a column, or a value in one, that no record has."""
    try:
        yield
    except RequestError:
        raise
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as fault:
        reason = " ".join(str(fault).split())
        raise RequestError(f"the records in {folder} make no sense: {type(fault).__name__}: {reason}") from None


def _in_parts(folder: Path) -> list[Records]:
    """The runs of each part, and at last those written since, whose columns are not declared yet."""
    check_version(folder)
    run_folders, final = _run_folders(folder), set[str]()
    gathered = [Records(_columns_now(runs), *others) for runs, *others in parts.read(folder, run_folders)]
    for runs, metrics, _ in gathered:
        # Failed runs may have been trained since; all others are final.  Of two processes that gathered at once, one
        # may have written the runs and the other the metrics.
        final |= set(runs.loc[runs["status"] != "failed", "id"]) & set(metrics["id"].unique())
    cards = {name: card for name, path in run_folders.items() if name not in final and (card := _card(path))}
    if len(settings := set[str]().union(*cards.values())) > files.MOST_COLUMNS:
        raise ValueError(f"cards with {len(settings):,} keys")
    metric_files = [run_folders[name] / "metrics.parquet" for name in cards]
    event_files = [path for name in cards for path in run_folders[name].glob(EVENTS)]
    runs = pd.DataFrame(map(_with_keys_now, cards.values())) if cards else pd.DataFrame(columns=list(RUN_COLUMNS))
    metrics = files.read_tables(metric_files) if cards else _empty(METRIC_COLUMNS)
    events = files.read_tables(event_files) if event_files else _empty(EVENT_COLUMNS)
    return [*gathered, Records(runs, metrics, events)]


def _with_keys_now(card: dict[str, Any]) -> dict[str, Any]:
    """A card whose keys, and those in the entries of a restart schedule, have the names of now."""
    named = {key_now(key): value for key, value in card.items()}
    if "intervention" in named:
        named["intervention"] = _names(key_now, named["intervention"])
    return named | ({ENTRIES: _in_entries(key_now, named[ENTRIES])} if ENTRIES in named else {})


def _columns_now(runs: pd.DataFrame) -> pd.DataFrame:
    """``_with_keys_now`` of the cards in a table; settings of an imported one keep the names of the user."""
    is_imported = TABLE in runs
    named = {str(column): key_now(str(column)) for column in runs}
    runs = runs.rename(columns={key: now for key, now in named.items() if now in RUN_COLUMNS or not is_imported})
    if "intervention" in runs:
        runs["intervention"] = runs["intervention"].map(partial(_names, key_now), na_action="ignore")
    if ENTRIES in runs and not is_imported:
        runs[ENTRIES] = runs[ENTRIES].map(partial(_in_entries, key_now), na_action="ignore")
    return runs


def joined(*in_parts: Records) -> Records:
    """Parts as one; a run that failed and was trained again counts where it stands last."""
    counted, seen = list[Records](), set[str]()
    for part in reversed(in_parts):
        counted.insert(0, Records(*(table[~table["id"].isin(seen)] for table in part)))
        seen |= set(part.runs["id"])
    filled = ([table for table in tables if len(table)] or tables[:1] for tables in zip(*counted, strict=True))
    runs, metrics, events = (pd.concat(tables, ignore_index=True) for tables in filled)
    return Records(declared(runs), metrics.astype(METRIC_COLUMNS), events.astype(EVENT_COLUMNS))


def declared(runs: pd.DataFrame) -> pd.DataFrame:
    """Order and type the columns: the fixed ones as declared, then every config column; rows sorted by id."""
    for column, bounds in BOUNDS.items():
        if column in runs:
            _refuse_out_of_bounds(runs[column], *bounds)
    fixed = runs.reindex(columns=list(RUN_COLUMNS)).astype(RUN_COLUMNS)
    if strange := set(fixed["status"].dropna()) - set(STATUSES) or fixed["status"].isna().any():
        raise ValueError(f"a run has the status {strange}")
    fixed[list(SPIKE_LAB)] = fixed[list(SPIKE_LAB)].fillna("none")
    known = fixed["data_fingerprint"].astype(object).map(_unigram_losses()).astype("float64")
    fixed["loss_unigram"] = fixed["loss_unigram"].fillna(known)
    config = sorted(set(runs.columns) - set(RUN_COLUMNS))
    return pd.concat([fixed, runs[config]], axis=1).sort_values("id", ignore_index=True)


@cache
def _unigram_losses() -> dict[str, float]:
    """The loss of a unigram model by the fingerprint of the data, for runs that are older than its column."""
    losses: dict[str, float] = shipped.load(UNIGRAM_LOSSES)
    return losses


def _refuse_out_of_bounds(column: pd.Series[Any], least: float, most: float) -> None:
    """Refuse what is no number within bounds; null is none in columns of settings."""
    values = column.dropna() if column.name in RUN_COLUMNS else column
    numbers = pd.to_numeric(values).to_numpy(dtype=float)
    are_plain = isinstance(values.dtype, np.dtype) and values.dtype.kind in "iuf"
    if not ((numbers >= least) & (numbers <= most)).all() or (
        not are_plain and any(isinstance(value, bool | np.bool_) for value in values)
    ):
        raise ValueError(f"{column.name} is not a number from {least:g} to {most:g}")


def statuses(folder: Path) -> dict[str, str]:
    """The status of every run of a folder, by id; empty without runs or without the folder.

    Raises:
        RequestError: records of another version, or damaged tables.
    """
    check_version(folder)
    run_folders = _run_folders(folder)
    gathered = parts.statuses(folder)
    if gathered is None:  # what is left of the tables is only found by reading them whole
        records = find(folder)
        return dict(zip(records.runs["id"], records.runs["status"], strict=True)) if records else {}
    final, failed = gathered
    cards = {name: card for name, path in run_folders.items() if name not in final and (card := _card(path))}
    return final | failed | {name: card["status"] for name, card in cards.items()}


def observed(folder: Path) -> dict[str, tuple[Any, ...]]:
    """By id the values of ``OBSERVES`` of every run of a folder, but of damaged and of imported tables."""
    found = dict[str, tuple[Any, ...]]()
    for part in parts.written(folder):
        with suppress(OSError, ValueError, KeyError):
            runs = _columns_now(files.read_table(part.runs))
            found |= dict(zip(runs["id"], zip(*(runs[column] for column in OBSERVES), strict=True), strict=True))
    for name, path in _run_folders(folder).items():
        if name not in found:
            with suppress(OSError, ValueError, KeyError):
                card = _with_keys_now(files.read_json(path / "run.json", dict))
                found[name] = tuple(card[column] for column in OBSERVES)
    return found


def digest_of_tables(folder: Path) -> str | None:
    """Digest of the gathered tables; None unless they hold every run there is, finished or diverged."""
    gathered = parts.statuses(folder)
    if not gathered or not gathered[0] or gathered[1] or not set(_run_folders(folder)) <= set(gathered[0]):
        return None
    return digest([files.file_digest(path) for part in parts.written(folder) for path in part if path.exists()])


def damaged(folder: Path) -> list[str]:
    """The runs in ``runs/`` whose record is damaged, and which no table of the folder holds."""
    gathered = parts.statuses(folder)
    known = set().union(*gathered) if gathered else set()
    return [
        name
        for name, path in _run_folders(folder).items()
        if name not in known and (path / "run.json").exists() and _card(path) is None
    ]


def _run_folders(folder: Path) -> dict[str, Path]:
    runs = folder / "runs"
    return {name: runs / name for name in sorted(os.listdir(runs))} if runs.is_dir() else {}


def gather(folder: Path) -> Records:
    """Write the runs that have a folder in ``runs/`` into the newest part of the tables, and return all runs.

    A part without any run in ``runs/`` stays as it is, and another one follows it.  Rows are sorted, so that equal runs
    give equal bytes: runs by id; metrics by id, step, probe and where; events by id, each run's as they happened.

    Raises:
        RequestError: as ``read``, or the folder cannot be written.
    """
    while True:
        with _refusing_nonsense(folder):
            *before, newest = _in_parts(folder)
            goes_on = before and {*before[-1].runs["id"]} & {*_run_folders(folder)}
            newest = joined(before.pop(), newest) if goes_on else joined(newest)
        written = _write(parts.part(folder, len(before) + 1), newest) if len(newest.runs) else {}
        # another process may have replaced one of the files meanwhile
        if written == {path: files.file_digest(path) for path in written}:
            return read(folder)


def write_imported(folder: Path, records: Records) -> None:
    """Write records that no engine of the lab trained as the only part of the tables of a folder.

    Raises:
        RequestError: the folder cannot be written.
    """
    open_folder(folder, None)
    _write(parts.part(folder, 1), joined(records))


def _write(part: parts.Part, records: Records) -> dict[Path, str]:
    """Write the tables of a part, and return the digest of each file; no file without events."""
    runs, metrics, events = records
    metrics = metrics.sort_values(["id", "step", "probe", "where"], kind="stable")
    written = {part.metrics: write_metrics(part.metrics, metrics)}
    if len(events):
        written[part.events] = files.write_table(part.events, events.sort_values("id", kind="stable"))
    else:
        part.events.unlink(missing_ok=True)  # of attempts that failed
    # the runs last: a run in that table counts as gathered
    return {**written, part.runs: write_runs(part, runs)}


def write_runs(part: parts.Part, runs: pd.DataFrame) -> str:
    """Write the table of the runs of a part, with the number of rows of its other tables; returns the file's digest."""
    return files.write_table(part.runs, runs, note=json.dumps(parts.counts(part)))
