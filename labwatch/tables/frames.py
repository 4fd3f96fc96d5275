"""A study of a table in memory, as a notebook has it."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from lab.analysis.sensitivity import WINDOW, Study, study_of
from labwatch.tables import run_table
from labwatch.tables.columns import Columns


def from_frame(
    table: pd.DataFrame,
    *,
    lr: str | None = None,
    loss: str | None = None,
    size: str | float | None = None,
    seed: str | None = None,
    arm: str | Sequence[str] | None = None,
    initial_loss: str | float | None = None,
    steps: str | float | None = None,
    axis: str | None = None,
    best_over: str | Sequence[str] | None = None,
    unit: str | None = None,
    keep: str | None = None,
    window: Sequence[float] = WINDOW,
) -> Study:
    """Compute all tables, as ``study`` does, from a table with a row per run of any trainer.

    Columns that are not named are found by their usual names.

    Args:
        table: one row per run.
        lr: column of peak learning rates.
        loss: column of final losses; an empty or non-finite one is a diverged run, which counts at its initial loss.
        size: column of numbers of parameters, or the number for all runs.
        seed: column of seeds; without one all runs have the same seed.
        arm: columns that distinguish arms; by default those that a sweep crosses with learning rates or seeds.
        initial_loss: column of losses at initialization, or the loss for all runs.
        steps: column of numbers of training steps, or the number for all runs.
        axis: column along which curves run, instead of the learning rate.
        best_over: columns over which the best run is taken.
        unit: of the losses: ``nats``, ``bits``, ``bits_per_byte`` or ``perplexity``.
        keep: which row of a run counts that has several: ``last`` or ``best``.
        window: as for ``study``.

    Raises:
        RequestError: a column is absent, or a row or the window is invalid.
    """
    size, initial_loss, steps = (None if given is None else str(given) for given in (size, initial_loss, steps))
    arms, best = ([names] if isinstance(names, str) else names for names in (arm, best_over))
    columns = Columns(lr, loss, size, seed, arms, initial_loss, steps, axis, best, unit, keep)
    return study_of(run_table.records_of(table, columns).records, window)
