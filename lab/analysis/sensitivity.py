"""Learning-rate sensitivity per seed and in two parts; optima; differences between arms; all tables of a study."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.curves import LR, axis_of, load, named_axis, points, significant, without_single_changes
from lab.analysis.statistics import student_t
from lab.analysis.text import LEARNING_RATE, NO_AXIS, UNDEFINED, Axis, count, first_to_last, format_value, span
from lab.core.errors import RequestError, nearest
from lab.records.imported import TRIAL, is_imported
from lab.records.store import Records


class Window(NamedTuple):
    """The learning rates over which sensitivity is a mean, both ends included."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{format_value(float(self.low))} to {format_value(float(self.high))}"


# The window of Wortsman et al. 2023, sec. 2.2, for AdamW.
WINDOW = Window(3e-4, 3e-1)
LOW, HIGH = WINDOW
# A learning rate above the best one is costly if the loss ends further than this above the best loss, nats/token.
LOST = 0.3
# Arms of an imported table that are compared, which takes a minute; and up to which number each is with each other one.
MOST_ARMS, MOST_PAIRED = 500, 200
MOST_CURVES = 20_000  # of one seed each, in an imported table, whose report takes a minute
FEWEST_LRS = 3  # learning rates inside a window for a sensitivity; with fewer, arms are compared by their best losses
PARTS = ("total", "below", "above")
# Parametrizations in which every tensor has the peak learning rate.
UNSCALED = ("standard", "inverse_head_width")
MOST_ROWS = 60  # of a study that a notebook displays
ABOUT_LOSSES = "Nats per token, mean over seeds with its 95 % interval."
ABOUT_CURVES = (
    "Sensitivity is over the {axis.values} from {window}. An unstable {axis.name} is above the best one and ends worse "
    "than a bigram model of the text, or diverges. Where the loss of such a model is not known, it ends more than "
    f"{LOST:g} above the best loss, or above that at initialization."
)


class Sensitivity(NamedTuple):
    """LR sensitivity in nats per token; ``total = below + above``.

    Attributes:
        below: the part from learning rates below the best one, too slow for the steps given (under-training).
        above: the part from learning rates above the best one (instability).
    """

    total: float
    below: float
    above: float


def window_of(ends: Sequence[float | str]) -> Window:
    """Make a window from its two ends, numbers or text.

    Raises:
        RequestError: an end is not a number above 0, or the first is not below the second.
    """
    try:
        low, high = map(float, ends)
    except ValueError:
        raise RequestError(f"a window is two learning rates, LOW HIGH, not {' '.join(map(str, ends))}") from None
    if not 0 < low < high < math.inf:
        raise RequestError(f"a window takes 0 < LOW < HIGH, not {low:g} {high:g}")
    return Window(low, high)


def check_window(points: pd.DataFrame, window: Window) -> None:
    """Check that some curve of ``points`` has three learning rates in a window other than the paper's.

    Raises:
        RequestError: none has.
    """
    most = _most_lrs(points, window)
    if window != WINDOW and most < FEWEST_LRS:
        lrs = ", ".join(map(format_value, sorted(points["lr"].unique().tolist())))
        raise RequestError(f"the window {window} holds {most} learning rates of a curve, and takes {FEWEST_LRS}: {lrs}")


def _most_lrs(points: pd.DataFrame, window: Window) -> int:
    """The number of learning rates inside a window of the curve that has the most there."""
    inside = points[points["lr"].between(*significant(window))]
    return int(inside.groupby("curve")["lr"].nunique().max()) if len(inside) else 0


def split(curve: pd.DataFrame, low: float = LOW, high: float = HIGH) -> Sensitivity:
    """LR sensitivity: mean regret over the learning rates inside ``[low, high]`` (Wortsman et al. 2023, sec. 2.2).

    Of equally good learning rates the smallest counts as the best, which separates the two parts.

    Args:
        curve: columns ``lr``, ``loss``, ``loss_at_init``; one row per learning rate, in any order.

    Returns:
        The sensitivity and its parts, nats per token; NaN with fewer than two learning rates inside.

    Raises:
        ValueError: a learning rate has two rows.
    """
    return regret(significant(curve["lr"]), capped(curve), low, high)


def regret(lr: np.ndarray, loss: np.ndarray, low: float = LOW, high: float = HIGH) -> Sensitivity:
    """``split`` of learning rates as rounded by ``significant`` and their losses as made by ``capped``."""
    if len(set(lr)) < len(lr):
        raise ValueError(f"a learning rate has more than one row in {sorted(lr)}")
    floor, ceiling = significant([low, high])
    inside = np.flatnonzero((lr >= floor) & (lr <= ceiling))
    if len(inside) < 2:
        return Sensitivity(math.nan, math.nan, math.nan)
    loss = loss[inside[np.argsort(lr[inside])]]
    share, best = (loss - loss.min()) / len(loss), int(loss.argmin())
    below, above = float(share[:best].sum()), float(share[best:].sum())
    return Sensitivity(below + above, below, above)


def capped(runs: pd.DataFrame) -> np.ndarray:
    """Final loss, at most the loss at initialization, which replaces NaN (Wortsman et al. 2023, sec. 2.2)."""
    loss, at_init = runs["loss"].to_numpy(dtype=float), runs["loss_at_init"].to_numpy(dtype=float)
    return np.where(np.isfinite(loss), np.fmin(loss, at_init), at_init)


def judge(points: pd.DataFrame) -> pd.DataFrame:
    """Add to ``points`` the columns ``capped`` (loss), ``best_lr`` (of the seed's curve) and ``outcome``.

    If all runs of a seed's curve diverged, ``best_lr`` is NaN. The outcome is ``diverged``, ``unstable`` or empty. A
    run is unstable if its learning rate is above the best one of its seed's curve and it ended worse than a bigram
    model of the text. Small models seldom reach NaN: their loss stays high instead. Where nobody knows the loss of a
    bigram model, as of runs imported from a table, such a run ended more than ``LOST`` above the best loss of its
    curve, or above the loss at initialization.
    """
    loss, at_init, bigram, lr = (points[name].to_numpy(float) for name in ("loss", "loss_at_init", "loss_bigram", "lr"))
    capped_loss = capped(points)
    diverged = (points["status"] == "diverged").to_numpy(dtype=bool) | ~np.isfinite(loss)
    runs = points[["curve", "seed", "lr"]].assign(capped=capped_loss)
    best = runs[~diverged].sort_values(["capped", "lr"]).drop_duplicates(["curve", "seed"])
    of_run = runs[["curve", "seed"]].merge(best, how="left", on=["curve", "seed"])
    best_lr, best_loss = of_run["lr"].to_numpy(float), of_run["capped"].to_numpy(float)
    lost = np.where(np.isnan(bigram), (loss > best_loss + LOST) | (loss > at_init), loss > bigram)
    outcome = np.select([diverged, lost & (lr > best_lr)], ["diverged", "unstable"], "")
    return points.assign(capped=capped_loss, best_lr=best_lr, outcome=outcome)


def per_seed(points: pd.DataFrame, low: float = LOW, high: float = HIGH) -> pd.DataFrame:
    """Sensitivity, one row per curve and seed.

    Returns:
        Columns ``arm``, ``size``, ``parameters``, ``curve``, ``seed``; ``total``, ``below``, ``above``; ``best_lr``;
        ``eta_div``, the smallest learning rate that diverged or was unstable, NaN if none was; and ``lrs``, how many
        learning rates lie inside the window.
    """
    floor, ceiling = significant([low, high])
    frame = judge(points)
    columns = {name: frame[name].tolist() for name in ("arm", "size", "parameters", "curve", "seed")}
    best_lr, lr, loss = frame["best_lr"].tolist(), significant(frame["lr"]), frame["capped"].to_numpy()
    lost_lr, is_inside = np.where(frame["outcome"] != "", lr, math.nan), (lr >= floor) & (lr <= ceiling)
    rows = []
    for indices in frame.groupby(["curve", "seed"], sort=False).indices.values():
        row: dict[str, Any] = {name: values[indices[0]] for name, values in columns.items()}
        row |= regret(lr[indices], loss[indices], low, high)._asdict()
        row |= {"best_lr": best_lr[indices[0]], "eta_div": np.fmin.reduce(lost_lr[indices])}
        rows.append({**row, "lrs": int(is_inside[indices].sum())})
    return pd.DataFrame(rows)


def untrained(points: pd.DataFrame) -> pd.MultiIndex:
    """Arms and sizes of ``judge(points)`` where no run ended better than the bigram model, so that none is stable."""
    best = points.groupby(["arm", "size"])[["capped", "loss_bigram"]].min()
    return pd.MultiIndex.from_tuples(best.index[best["capped"] > best["loss_bigram"]], names=["arm", "size"])


def by_curve(seeds: pd.DataFrame) -> pd.DataFrame:
    """A row per arm and size, from ``per_seed``: an ``Interval`` per part; ``best_lr`` and ``eta_div`` as lists."""
    rows = []
    for _, curve in seeds.groupby("curve", sort=False):
        row = {column: curve[column].iloc[0] for column in ("arm", "size", "parameters")}
        row |= {part: student_t(curve[part]) for part in PARTS}
        rows.append({**row, "best_lr": curve["best_lr"].tolist(), "eta_div": curve["eta_div"].tolist()})
    return pd.DataFrame(rows)


def has_sensitivity(curves: pd.DataFrame) -> bool:
    """Whether any row of ``by_curve`` has a sensitivity, which takes two learning rates."""
    return any(interval.n for interval in curves["total"])


def paired(points: pd.DataFrame, first: str, second: str, low: float = LOW, high: float = HIGH) -> pd.DataFrame:
    """Sensitivity of arm ``first`` minus sensitivity of arm ``second``, one row per size that both have.

    Differences are taken per seed, over the learning rates that both arms ran. Equal seeds have the same order of data,
    and the same initial values of the weights that both arms have.

    Returns:
        Columns ``first``, ``second``, ``size``, and an ``Interval`` over seeds for ``total``, ``below``, ``above``.

    Raises:
        RequestError: there is no such arm.
    """
    arms = list(points["arm"].unique())
    for arm in (first, second):
        if arm not in arms:
            raise RequestError(f"no arm {arm!r}; {nearest(arm, arms)}")
    return _differences(points, [(first, second)], low, high)


def all_pairs(points: pd.DataFrame, low: float = LOW, high: float = HIGH) -> pd.DataFrame:
    """``paired`` for every pair of arms, in the order of the arms."""
    return _differences(points, combinations(points["arm"].unique(), 2), low, high)


def _differences(points: pd.DataFrame, pairs: Iterable[tuple[str, str]], low: float, high: float) -> pd.DataFrame:
    """Rows of ``paired`` for these pairs; an arm is measured once for all pairs that use the same runs of it."""
    lrs, losses = significant(points["lr"]), capped(points)
    sizes, seeds = points["size"].tolist(), points["seed"].tolist()
    places = points.groupby(["size", "seed", "lr"], sort=False).ngroup().tolist()  # that runs of two arms share
    rows_by_place = {
        arm: {places[row]: row for row in rows} for arm, rows in points.groupby("arm", sort=False).indices.items()
    }
    places_of = {arm: frozenset(rows) for arm, rows in rows_by_place.items()}

    @cache
    def measure(arm: str, shared: frozenset[int]) -> dict[Any, dict[Any, Sensitivity]]:
        """The parts of sensitivity by size and seed, over the runs that are shared."""
        by_size: dict[Any, dict[Any, list[int]]] = {}
        for place, row in rows_by_place[arm].items():
            if place in shared:
                by_size.setdefault(sizes[row], {}).setdefault(seeds[row], []).append(row)
        return {
            size: {seed: regret(lrs[rows], losses[rows], low, high) for seed, rows in by_seed.items()}
            for size, by_seed in by_size.items()
        }

    rows = []
    for first, second in pairs:
        shared = places_of[first] & places_of[second]
        left, right = measure(first, shared), measure(second, shared)
        for size in sorted(left):
            by_seed = [np.subtract(parts, right[size][seed]) for seed, parts in left[size].items()]
            intervals = [student_t(values) for values in zip(*by_seed, strict=True)]
            rows.append([first, second, size, *intervals])
    return pd.DataFrame(rows, columns=["first", "second", "size", *PARTS])


def vertex(lr: np.ndarray, loss: np.ndarray) -> float:
    """The best learning rate between grid points: vertex of a parabola through the best and its neighbours, in log LR.

    Learning rates are sorted. At the edge of the grid it is the best learning rate itself.
    """
    best = int(loss.argmin())
    if not 0 < best < len(lr) - 1 or lr[best - 1] <= 0:  # an axis other than the learning rate may have zero
        return float(lr[best])
    x, y = np.log(lr[best - 1 : best + 2] / lr[best]), loss[best - 1 : best + 2] - loss[best]
    # y = a x^2 + b x, with the middle point as the origin
    a = (y[0] / x[0] - y[2] / x[2]) / (x[0] - x[2])
    b = y[2] / x[2] - a * x[2]
    return float(lr[best] * math.exp(-b / (2 * a))) if a > 0 else float(lr[best])


def shifted(best_lr: float, low: float = LOW, high: float = HIGH) -> tuple[float, float]:
    """The window ``[low, high]`` moved so that its geometric middle is ``best_lr`` (Wortsman et al. 2023, app. B)."""
    factor = best_lr / math.sqrt(low * high) if low else 1.0
    return low * factor, high * factor


def optima(points: pd.DataFrame, window: Window = WINDOW) -> pd.DataFrame:
    """Optimum and shifted sensitivity, one row per curve and seed.

    Returns:
        Columns ``arm``, ``parameters``, ``seed``, ``best_lr_fine``, ``spread``; ``window_low`` and ``window_high``, the
        ends of the window ``shifted`` to the optimum; ``sensitivity`` over the learning rates that ran in that window.
    """
    lr, loss = significant(points["lr"]), capped(points)
    # true if the initial loss is NaN, which means unknown
    ended_below_init = np.isfinite(loss) & ~(loss >= points["loss_at_init"].to_numpy(dtype=float))
    names = {column: points[column].to_numpy() for column in ("arm", "parameters", "seed")}
    rows = []
    for curve in points.groupby(["curve", "seed"], sort=False).indices.values():
        by_lr = curve[np.argsort(lr[curve])]
        fine = vertex(lr[by_lr], loss[by_lr]) if ended_below_init[curve].any() else math.nan
        low, high = shifted(fine, *window)
        row = {column: values[curve[0]] for column, values in names.items()}
        row |= {"best_lr_fine": fine, "spread": float(np.ptp(loss[curve])), "window_low": low, "window_high": high}
        rows.append({**row, "sensitivity": regret(lr[curve], loss[curve], low, high).total})
    return pd.DataFrame(rows)


class Study(NamedTuple):
    """All tables of one or more results folders.

    Attributes:
        records: run cards and probe records.
        points: ``judge(points(records.runs))``.
        seeds: ``per_seed(points, *window)``.
        curves: ``by_curve(seeds)``.
        pairs: ``all_pairs(points, *window)``; no rows if an imported table has more than ``MOST_PAIRED`` arms.
        window: the learning rates over which sensitivity is a mean.
        changes: cards of the single changes of a base that an imported table has, which are not in ``records``.
    """

    records: Records
    points: pd.DataFrame
    seeds: pd.DataFrame
    curves: pd.DataFrame
    pairs: pd.DataFrame
    window: Window = WINDOW
    changes: pd.DataFrame = pd.DataFrame()

    @property
    def runs(self) -> pd.DataFrame:
        """Run cards, as in ``records``: what reads records takes a study, too."""
        return self.records.runs

    @property
    def metrics(self) -> pd.DataFrame:
        """Probe values, as in ``records``."""
        return self.records.metrics

    @property
    def events(self) -> pd.DataFrame:
        """What happened to watched runs, as in ``records``."""
        return self.records.events

    @property
    def failed(self) -> pd.DataFrame:
        """Cards of runs that failed and have no result."""
        return self.records.runs[self.records.runs["status"] == "failed"]

    @property
    def along(self) -> Axis:
        """What varies along a curve, in words: the learning rate, unless a table has another axis."""
        return named_axis(self.runs)

    @property
    def axis(self) -> str:
        """The name of what varies along a curve; empty where curves have one point."""
        return "" if self.along == NO_AXIS else self.along.name

    def __repr__(self) -> str:
        return f"<Study: {self._extent()}>"

    def _extent(self) -> str:
        status, lr = self.runs["status"].value_counts(), self.points["lr"]
        numbers = {"run": len(self.runs), **{name: self.points[name].nunique() for name in ("arm", "size", "seed")}}
        counts = [f"{number} {name}{'s' * (number != 1)}" for name, number in numbers.items()]
        lost = [f"{status[name]} {name}" for name in ("diverged", "failed") if name in status]
        ends = f"{self.along.name} {first_to_last(map(format_value, (lr.min(), lr.max())))}"
        return ", ".join([counts[0], *lost, *counts[1:], *[ends] * (self.along != NO_AXIS)])

    def _repr_html_(self) -> str:
        """What notebooks display: a row per arm and size."""
        axis, curves = self.along, [curve for _, curve in self.points.groupby("curve", sort=False)]
        columns = {
            "arm": self.curves["arm"],
            "parameters": self.curves["size"].map(count),
            "best loss": [f"{student_t(curve.groupby('seed')['capped'].min()):±}" for curve in curves],
        }
        about = ABOUT_LOSSES
        if axis != NO_AXIS:
            columns |= {
                f"best {axis.short}": self.curves["best_lr"].map(span),
                "sensitivity": self.curves["total"].map("{:±}".format),
                axis.above: self.curves["above"].map("{:±}".format),
                f"unstable {axis.short}{'s' * (axis == LEARNING_RATE)}": list(map(_unstable_lrs, curves)),
            }
            about += f" {ABOUT_CURVES.format(axis=axis, window=self.window)}"
        columns["seeds"] = [curve["seed"].nunique() for curve in curves]
        table = pd.DataFrame(columns).to_html(index=False, border=0, max_rows=MOST_ROWS)
        return f"<p>{html.escape(self._extent())}</p>\n{table}\n<p>{html.escape(about)}</p>"


def _unstable_lrs(curve: pd.DataFrame) -> str:
    """The learning rates at which runs were unstable or diverged, with the number of seeds if not all did."""
    if len(untrained(curve)):
        return UNDEFINED
    outcomes = curve["outcome"].ne("").groupby(curve["lr"]).agg(["sum", "size"])
    lost = [(format_value(lr), n, seeds) for lr, n, seeds in outcomes.itertuples() if n]
    return ", ".join(lr if n == seeds else f"{lr} ({n} of {seeds} seeds)" for lr, n, seeds in lost) or "none"


def study(folders: str | Path | Sequence[str | Path], window: Sequence[float] = WINDOW) -> Study:
    """Read a results folder, or several as one, and compute all tables.

    Args:
        folders: one or more results folders.
        window: the lowest and the highest learning rate over which sensitivity is a mean.

    Raises:
        RequestError: a folder cannot be read, all runs failed, or the window is invalid.
    """
    return study_of(load(*([folders] if isinstance(folders, str | Path) else folders)), window)


def study_of(records: Records, window: Sequence[float] = WINDOW) -> Study:
    """Compute all tables, as ``study`` does, from records that were read.

    Raises:
        RequestError: all runs failed, a table has too many arms, or the window is invalid.
    """
    window, axis = window_of(window), axis_of(records.runs)
    changes = records.runs.drop(without_single_changes(records.runs).index)
    records = records.of(set(records.runs["id"]) - set(changes["id"])) if len(changes) else records
    ended = points(records.runs)
    if ended.empty:
        raise RequestError(f"all {len(records.runs)} runs failed, the first with: {records.runs['reason'].iloc[0]}")
    arms, is_table = ended["arm"].nunique(), is_imported(records)
    if is_table and arms > MOST_ARMS and f"{TRIAL}.kept" not in records.runs:
        raise RequestError(
            f"{len(ended):,} runs make {arms:,} arms, and at most {MOST_ARMS} are compared; lab import makes fewer if "
            "--arm names fewer columns, or --best-over more"
        )
    if is_table and (seeds_of := len(ended[["curve", "seed"]].drop_duplicates())) > MOST_CURVES:
        raise RequestError(
            f"{len(ended):,} runs make {seeds_of:,} curves of one seed each, and at most {MOST_CURVES:,} are compared; "
            "import a part of the table, or take the best run over a setting with --best-over"
        )
    if axis not in (LR, "") and window == WINDOW:
        window = Window(ended["lr"].min(), ended["lr"].max())
    else:
        check_window(ended, window)
    seeds = per_seed(ended, *window)
    paired_runs = ended if not is_table or arms <= MOST_PAIRED else ended.head(0)
    return Study(records, judge(ended), seeds, by_curve(seeds), all_pairs(paired_runs, *window), window, changes)


def with_scaled_steps(study: Study) -> pd.MultiIndex:
    """Arms and sizes whose steps are scaled by tensor, if other arms have unscaled ones (Wortsman et al., app. B)."""
    cards = study.records.runs.set_index("id").loc[study.points["id"]]
    scaled = ~cards["parametrization.name"].isin(UNSCALED) | (cards["optimizer.name"] == "adamw_rms_scaled")
    unlike_others = study.points[scaled.to_numpy(dtype=bool)] if not scaled.all() else study.points.iloc[:0]
    return pd.MultiIndex.from_frame(unlike_others[["arm", "size"]])


def compares_sensitivity(study: Study) -> bool:
    """Whether arms can be compared by sensitivity: with enough learning rates, which mean the same in all arms."""
    return _most_lrs(study.points, study.window) >= FEWEST_LRS and with_scaled_steps(study).empty
