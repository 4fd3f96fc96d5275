"""Logs: the lab's own records and anybody's CSV or JSON lines, as detectors read them."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lab.analysis.events.detectors import Log
from lab.analysis.logit_rounding import BF16, mantissa_bits_by_run, rounding_cost
from lab.core import files
from lab.core.errors import RequestError
from lab.records import store

STEP = "step"
LARGEST_STEP = 2**53  # beyond which floats skip integers
MOST_ROWS = 1_000_000  # of JSON, which take up to 2 GB
# Columns by what other programs call them, without case, in lower words joined by "_"; the first that is there counts.
NAMES = {
    STEP: (
        "step",
        "_step",
        "steps",
        "global_step",
        "iteration",
        "iter",
        "iterations",
        "update",
        "updates",
        "num_updates",
    ),
    "loss": ("loss", "train_loss", "training_loss", "lm_loss", "train_lm_loss", "loss_train", "train_inner_loss"),
    "grad_norm": ("grad_norm", "gnorm", "gradient_norm", "global_grad_norm", "train_grad_norm", "train_gnorm"),
    "lr": ("lr", "learning_rate", "train_lr", "train_learning_rate"),
    "loss_scale": ("loss_scale", "scale", "train_loss_scale", "grad_scale"),
    "attention_logit_max": ("attention_logit_max", "max_attention_logit"),
    "update_rms": ("update_rms",),
    "eps_ratio": ("eps_ratio",),
    "update_curvature": ("update_curvature",),
    "parts_error": ("parts_error",),
    "log_z": ("log_z", "train_log_z"),
    "log_z_square": ("log_z_square", "log_z_squared", "train_log_z_square", "z_loss", "train_z_loss"),
    "output_logit_mean": ("output_logit_mean", "mean_logit", "train_output_logit_mean", "train_mean_logit"),
}
# Columns that tell the level of output logits: log Z, the mean of its square, the mean logit.
OUTPUT_LOGITS = ["log_z", "log_z_square", "output_logit_mean"]
# Columns of this name and a number are gradient norms of the micro-batches of a step.
MICRO_BATCH = "micro_batch_norm_"
# Probes of the lab by the column they fill; of several places the largest value counts.
PROBES = {
    "train_loss": "loss",
    **{name: name for name in ("grad_norm", "attention_logit_max", "update_rms", "eps_ratio", "update_curvature")},
    **{name: name for name in ("log_z", "log_z_square")},
}


def read_logs(path: Path, mantissa_bits: int | None = None) -> list[Log]:
    """Read the runs of a results folder, or one log of another program.

    Args:
        path: the folder or the log.
        mantissa_bits: of the format that rounds output logits; None for what the records tell, and else bf16.

    Raises:
        RequestError: there is no such file or folder, it holds no runs, cannot be read as CSV or JSON lines, or lacks a
            column of steps or of losses.
    """
    if path.is_dir():
        return list(logs_of(store.read(path), mantissa_bits))
    if not path.is_file():
        raise RequestError(f"no results folder or log {path}")
    return [_log(path, BF16 if mantissa_bits is None else mantissa_bits)]


def logs_of(records: store.Records, mantissa_bits: int | None = None) -> Iterator[Log]:
    """The runs of records that recorded a training loss, as logs; ``mantissa_bits`` as in ``read_logs``."""
    bits = mantissa_bits_by_run(records.runs)
    wanted = records.metrics[records.metrics["probe"].isin(PROBES)]
    table = wanted.assign(column=wanted["probe"].map(PROBES)).sort_values("value", kind="stable", na_position="last")
    # the largest value, NaN where one is: a part of the model that broke is not hidden by another
    largest = table.drop_duplicates(["id", "step", "column"], keep="last")
    for name, rows in largest.groupby("id"):
        values = rows.pivot(index="step", columns="column", values="value").sort_index()
        if "loss" in values:
            yield _made_log(str(name), values, float(bits[name]) if mantissa_bits is None else mantissa_bits)


def _made_log(name: str, values: pd.DataFrame, mantissa_bits: float, note: str = "") -> Log:
    """A log of measurements, indexed by step; of output logits it has the level and what rounding it costs."""
    columns = {str(column): values[column].to_numpy(dtype=float) for column in values if column not in OUTPUT_LOGITS}
    level_n = _output_logits(values)
    if not np.isnan(level_n).all():
        columns |= {"output_logit": level_n, "logit_rounding": rounding_cost(level_n, mantissa_bits)}
    return Log(name, values.index.to_numpy(dtype=np.int64), columns, note, mantissa_bits)


def _output_logits(values: pd.DataFrame) -> NDArray[np.float64]:
    """Level ``[n]``: that of log Z, or of the mean logit where no log Z is known; NaN without either."""
    log_z_n, square_n, mean_n = values.reindex(columns=OUTPUT_LOGITS).to_numpy(dtype=float).T
    with np.errstate(invalid="ignore"):
        level_n = np.fmax(np.abs(log_z_n), np.sqrt(square_n))
    return np.asarray(np.abs(mean_n) if np.isnan(level_n).all() else level_n)


def _log(path: Path, mantissa_bits: int) -> Log:
    try:
        text = files.read_bytes(path).decode("utf-8", errors="replace")
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None
    rows = _json_rows(path, text)
    table = pd.DataFrame(rows) if rows else _csv(path, text)
    found = {name: column for name, aliases in NAMES.items() if (column := _named(aliases, list(table))) is not None}
    found |= {str(column): column for column in table if re.fullmatch(rf"{MICRO_BATCH}\d+", str(column))}
    for name, plural in ((STEP, "steps"), ("loss", "losses")):
        if name not in found:
            raise RequestError(f"{path} has no column of {plural} among {', '.join(map(str, table)) or 'none'}")
    numbers = pd.DataFrame({name: pd.to_numeric(table[column], errors="coerce") for name, column in found.items()})
    missing = table[found["loss"]].isna() | (table[found["loss"]].astype(str).str.strip() == "")
    # a loss that says NaN counts, an absent one does not
    numbers = numbers[numbers[STEP].between(0, LARGEST_STEP) & ~missing]
    if numbers.empty:
        raise RequestError(f"{path} has no row with a step and a loss")
    kept = numbers.sort_values(STEP, kind="stable").drop_duplicates(STEP, keep="last")
    is_as_written = kept.index.equals(numbers.index)
    note = "" if is_as_written else f"sorted by step, the last row of each kept: {len(kept)} of {len(numbers)} rows"
    return _made_log(path.name, kept.astype({STEP: np.int64}).set_index(STEP), mantissa_bits, note)


def _json_rows(path: Path, text: str) -> list[dict[str, Any]]:
    """Objects of the lines that hold one, whatever stands before it; NaN and infinities stay what they are."""
    rows = []
    for line in text.splitlines():
        start = line.find("{")
        if start >= 0 and line.rstrip().endswith("}"):
            try:
                row = files.parse_json(line[start:].encode(), dict)
            except ValueError:
                continue
            plain = {key: value for key, value in row.items() if not isinstance(value, (dict, list))}
            rows.append({key: str(value) if isinstance(value, float) else value for key, value in plain.items()})
            if len(rows) > MOST_ROWS:
                raise RequestError(f"{path} has more than {MOST_ROWS:,} lines; watch a part of it")
    return rows


def _csv(path: Path, text: str) -> pd.DataFrame:
    """A table; the separator is the most frequent one of the first line."""
    head = text.partition("\n")[0]
    separator = max(",;\t|", key=head.count)
    try:
        return pd.read_csv(io.StringIO(text), sep=separator, dtype=str, keep_default_na=False, on_bad_lines="skip")
    except (ValueError, pd.errors.ParserError) as error:
        raise RequestError(f"{path} is neither CSV nor JSON lines: {str(error).splitlines()[0]}") from None


def _named(aliases: Sequence[str], columns: Sequence[object]) -> object | None:
    words = {re.sub(r"[^0-9a-z_]+", "_", str(column).strip().lower()).strip(): column for column in reversed(columns)}
    return next((words[alias] for alias in aliases if alias in words), None)
