"""`lab coordcheck`: train a few steps at several widths or depths, and judge how changes grow at each hook point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from torch import Tensor

from lab.analysis.rendering import hover, layout, marks, panels, scales, style
from lab.analysis.rendering.layout import Sheet
from lab.analysis.statistics import FEWEST_SEEDS, Interval, student_t
from lab.analysis.text import number
from lab.core import distributed, files, machine
from lab.core.axes import per_run_rms
from lab.core.errors import RequestError
from lab.core.hooks import listening
from lab.core.printing import say
from lab.sweeping import launch
from lab.sweeping.capacity import check_fits, measure_host
from lab.sweeping.dry_run import swept_values
from lab.sweeping.planner import Point, points, results_folder
from lab.training.config import RunConfig
from lab.training.fleet import Fleet

# Half the smallest power of the width that a forgotten factor of the parametrization causes; see ``slopes``.
BOUND = 0.25
BOUND_NAME = f"slope {BOUND:g}"


def size_of(changes: pd.DataFrame) -> str:
    """The column of sizes that differ, ``width`` or ``depth``."""
    return "depth" if changes["depth"].nunique() > 1 else "width"


def slopes(changes: pd.DataFrame) -> pd.DataFrame:
    """Measure how fast every coordinate grows with width or depth, and judge whether that is too fast.

    A coordinate is the tensor at one hook point; its change is the RMS of its difference between initialization and
    the last update. Its slope, one per seed, is that of log change against log size by least squares. Under muP and
    at large width no change depends on the width: the slope is 0. A forgotten factor adds a power of the width. That of
    a learning rate adds 1, since updates of one sign add up over the fan-in. That of the standard deviation of the head
    adds 1/2, since its initial weights multiply a change aligned with them. In depth, branches without CompleteP's
    factor add up to a power of 1, since their changes are aligned (Dey et al. 2025, arXiv:2505.01618, table 1). The
    bound lies halfway between 0 and 1/2.

    A coordinate ``holds`` if the whole 95 % interval of its slope over seeds lies at or below the bound; a wide
    interval proves nothing, so it does not hold. A change of zero or NaN has no slope and does not hold. Coordinates
    that shrink hold: they slow large models down but do not destabilize them.

    Args:
        changes: columns ``width``, ``depth``, ``seed``, ``step`` (updates made), ``coordinate``, ``change``.

    Returns:
        Columns ``coordinate``, ``slope`` (an ``Interval``), ``holds``; in the order of ``changes``.
    """
    last, size = changes[changes["step"] == changes["step"].max()], size_of(changes)
    rows = []
    for coordinate, runs in last.groupby("coordinate", sort=False):
        of_seeds = [_slope(seed[size].to_numpy(), seed["change"].to_numpy()) for _, seed in runs.groupby("seed")]
        slope = student_t(of_seeds)
        rows.append(
            {"coordinate": coordinate, "slope": slope, "holds": slope.n == len(of_seeds) and slope.high <= BOUND}
        )
    return pd.DataFrame(rows)


def _slope(size: np.ndarray, change: np.ndarray) -> float:
    if not (np.isfinite(change) & (change > 0)).all():
        return np.nan
    x = np.log(size) - np.log(size).mean()
    return float(x @ np.log(change) / (x @ x))


def means(changes: pd.DataFrame) -> pd.DataFrame:
    """Change after the last update as geometric mean over seeds: a row per coordinate, a column per size."""
    last = changes[changes["step"] == changes["step"].max()]
    with np.errstate(divide="ignore"):  # log 0 is -inf, and exp of that 0 again
        logs = last.assign(change=np.log(last["change"]))
    table: pd.DataFrame = logs.pivot_table("change", "coordinate", size_of(changes), "mean", dropna=False, sort=False)
    return table.map(np.exp).sort_index(axis="columns")


def lines(changes: pd.DataFrame) -> Iterator[str]:
    """Lines of a table for a terminal: change at every size, slope, and a verdict where the bound does not hold."""
    table, judged = means(changes), slopes(changes)
    longest = max(map(len, judged["coordinate"]))
    yield f"{'change of':{longest}}" + "".join(f"{size:>10}" for size in table) + f"  slope in {size_of(changes)}"
    for coordinate, slope, holds in judged.itertuples(index=False):
        values = "".join(f"{value:10.3g}" for value in table.loc[coordinate])
        yield f"{coordinate:{longest}}{values}  {slope:±}{'' if holds else f'  {_fault(slope)}'}"


def _fault(slope: Interval) -> str:
    if not slope.n or np.isnan(slope.high):
        return "NO NUMBER"
    return "GROWS" if slope.low > BOUND else "MAY GROW"


@layout.styled
def figure(changes: pd.DataFrame) -> Sheet:
    """Change against width or depth.

    The change of a tensor at a hook point is the RMS of its difference between initialization and the last update, a
    geometric mean over seeds. A panel per kind of coordinate, a line per block.
    """
    table, size = means(changes), size_of(changes)
    sizes = np.unique(changes[size])
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in table.index))
    blocks = list(dict.fromkeys(name.rpartition(".")[0] for name in table.index if "." in name))
    shades = style.shades(range(len(blocks)), style.SIZE_SHADES)
    titles = [kind.replace("_", " ") for kind in kinds]
    sheet, facet_axes = layout.facets(titles, ["RMS change\nsince initialization"], 11.0)
    for kind, (axes,) in zip(kinds, facet_axes, strict=True):
        coordinates = table[[name.rpartition(".")[2] == kind for name in table.index]]
        for name in map(str, coordinates.index):
            block = name.rpartition(".")[0]
            _line(axes, changes, name, shades[blocks.index(block)] if block else style.INK)
        limit = (sizes / sizes[0]) ** BOUND * float(coordinates.iloc[:, 0].max())
        (line,) = axes.plot(sizes, limit, ":", color=style.INK, linewidth=1)
        marks.name(line, BOUND_NAME)
        scales.x_axis(axes, size, sizes, sizes, number)
    scales.probe_axis(sheet.figure.axes[0])
    sheet.keys(("", layout.line_keys(shades, lambda index: blocks[int(index)])))
    sheet.explain(BOUND_NAME, f"The dotted line is growth at the bound, the power {BOUND:g} of the {size}.")
    return sheet


def _line(axes: Axes, changes: pd.DataFrame, coordinate: str, colour: str) -> None:
    """Draw a coordinate, with the band of its seeds."""
    last = changes[(changes["step"] == changes["step"].max()) & (changes["coordinate"] == coordinate)]
    usable = last[np.isfinite(last["change"]) & (last["change"] > 0)]
    size = size_of(changes)
    by_size = {value: group["change"].to_numpy() for value, group in usable.groupby(size)}
    if not by_size:
        return
    quantity = hover.Quantity("RMS change since initialization", log=True)
    texts = [
        "\n".join([coordinate, f"{size} {value}", quantity.text(of_seeds), f"{len(of_seeds)} seeds"])
        for value, of_seeds in by_size.items()
    ]
    panels.mean_line(axes, list(by_size), list(by_size.values()), quantity, texts, color=colour)


KINDS = ("query", "key", "scores", "block_output", "logits")
ROWS = 8  # held-out windows on which changes are measured, the same for every model, seed and step
VARIES = ("model.width", "model.depth", "seed", "data.seed")
# Overrides of a check, before the user's.  No qk-layernorm: it would hide the growth of queries and keys from the
# scores.  The learning rate is the best of the base width, without warm-up: ten updates can move a row of the embedding
# by more than its initial norm, at every width.  After fewer updates, normalization makes the first block change with
# the square root of the width under every parametrization of the paper, since none rescales the embedding; at higher
# learning rates five seeds lie too far apart to decide.
DEFAULTS = [
    *("data=synthetic", "intervention=[]", "schedule=constant", "schedule.warmup=0", "optimizer.lr=3e-2", "steps=10"),
    *("model.width=32,64,128,256", "seed=0,1,2,3,4", "probes=none", "out=runs/coordcheck"),
]


@dataclass(frozen=True)
class CoordinateCheck:
    """What a few updates changed at several widths or depths, judged by ``slopes``.

    ``changes`` holds the rows of ``changes``; ``checked`` names the parametrization, and interventions if any.
    """

    folder: Path
    checked: str
    changes: pd.DataFrame

    @cached_property
    def slopes(self) -> pd.DataFrame:
        """The slope of each coordinate with its interval, and whether it stays within the bound."""
        return slopes(self.changes)

    @property
    def passed(self) -> bool:
        """Whether no coordinate grows with the size."""
        return bool(self.slopes["holds"].all())

    def lines(self) -> Iterator[str]:
        """Yield the lines of a table, and the verdict."""
        yield from lines(self.changes)
        grown = " ".join(self.slopes.loc[~self.slopes["holds"], "coordinate"])
        verdict = "passes" if self.passed else f"fails by {grown}"
        rule = f"slopes with 95 % intervals over seeds; none may reach above {BOUND:g}"
        yield f"{self.checked} {verdict} ({rule}); {self.folder}"

    def write(self) -> None:
        """Write ``coordcheck.csv`` and ``coordcheck.svg`` into the folder."""
        files.write_csv(self.folder / "coordcheck.csv", self.changes)
        svg = layout.svg(figure(self.changes), "coordcheck")
        files.write_text(self.folder / "coordcheck.svg", svg)


def check_coordinates(trees: Sequence[Mapping[str, Any]]) -> CoordinateCheck:
    """Train a few steps at every width or depth and measure what they change.

    Raises:
        RequestError: points differ in more than one size and seed, or in too little for a slope with an interval.
    """
    configs = sorted((point.config for point in _check_points(trees)), key=_sizes)
    folder = results_folder(trees)
    machine.configure_torch()
    fleets = [list(fleet) for _, fleet in groupby(configs, key=_sizes)]
    rows = pd.DataFrame([row for fleet in fleets for row in changes(fleet)])
    if size_of(rows) == "depth":
        rows = _of_first_and_last_block(rows)
    names = list(configs[0].intervention)
    checked = configs[0].parametrization.name + (f" with {', '.join(names)}" if names else "")
    return CoordinateCheck(folder, checked, rows)


def _of_first_and_last_block(changes: pd.DataFrame) -> pd.DataFrame:
    """The rows of coordinates that models of every depth have, in blocks ``block0`` and ``last_block``."""
    block = changes["coordinate"].str.extract(r"^block(\d+)\.", expand=False).astype(float)
    is_last = block == changes["depth"] - 1
    named = changes["coordinate"].str.replace(r"^block\d+", "last_block", regex=True)
    kept = changes.assign(coordinate=changes["coordinate"].where(~is_last, named))
    return kept[block.isna() | (block == 0) | is_last]


def _check_points(trees: Sequence[Mapping[str, Any]]) -> Sequence[Point]:
    if distributed.world_size() > 1:
        raise RequestError("coordcheck trains in one process; run it without torchrun")
    requested = points(trees)
    if requested[0].config.custom_model:
        raise RequestError("coordcheck compares parametrizations, and none applies to a custom model")
    for key in swept_values(requested):
        if key not in VARIES:
            known = "model.width or model.depth, and seed"
            raise RequestError(f"coordcheck compares sizes: give {known} several values, not {key}")
    sizes, seeds = {_sizes(point.config) for point in requested}, {point.config.seed for point in requested}
    widths, depths = map(set, zip(*sizes, strict=True))
    if len(widths) > 1 and len(depths) > 1:
        raise RequestError(
            "coordcheck compares widths at one depth, or depths at one model.width, as in model.width=32"
        )
    if len(sizes) < 2:
        raise RequestError(f"a slope takes at least two widths, as in model.width=32,64, not {min(widths)} alone")
    if min(depths) < 2 and len(depths) > 1:
        raise RequestError(
            f"depths are compared by first and last block; model.depth=2 is the least, not {min(depths)}"
        )
    if len(seeds) < FEWEST_SEEDS:
        raise RequestError(f"an interval takes at least {FEWEST_SEEDS} seeds, as in seed=0,1,2, not {len(seeds)}")
    for point in requested:
        check_fits(point.config, measure_host(point.config.device, [None]))
    return requested


def _sizes(config: RunConfig) -> tuple[int, int]:
    return config.model.width, config.model.depth


def changes(configs: Sequence[RunConfig]) -> Iterator[dict[str, Any]]:
    """Train runs of one size as a fleet; yields rows after every update.

    Columns are ``width``, ``depth``, ``seed``, ``step``, ``coordinate`` and ``change``, the root mean square of a
    tensor minus the same tensor at initialization, on fixed held-out windows.
    """
    fleet = Fleet(configs)
    tokens_rbt = fleet.evaluation.held_out_nt[:ROWS, :-1].expand(fleet.runs, -1, -1)
    at_init = _observe(fleet, tokens_rbt)
    for step in range(fleet.config.steps):
        fleet.step(step)
        for coordinate, tensor_r in _observe(fleet, tokens_rbt).items():
            change_r = per_run_rms(tensor_r - at_init[coordinate]).tolist()
            for config, change in zip(configs, change_r, strict=True):
                row = {"width": config.model.width, "depth": config.model.depth, "seed": config.seed, "step": step + 1}
                yield {**row, "coordinate": coordinate, "change": change}


@torch.no_grad()
def _observe(fleet: Fleet, tokens_rbt: Tensor) -> dict[str, Tensor]:
    """The tensors at the hook points, by names such as ``block0.query``; of scores, the causal part only."""
    tensors: dict[str, Tensor] = {}

    def record(kind: str, where: str, *values: Tensor) -> None:
        if kind in KINDS:
            tensors[f"{where}.{kind}".lstrip(".")] = values[0].tril() if kind == "scores" else values[0]

    with listening(record):
        fleet.model(tokens_rbt)
    return tensors


def run(arguments: Sequence[str]) -> None:
    """Check how changes of the coordinates grow with the size.

    Raises:
        SystemExit: with status 1 if the check fails.
    """
    check = check_coordinates(launch.compose_points([*DEFAULTS, *arguments]))
    check.write()
    for line in check.lines():
        say(line)
    if not check.passed:
        raise SystemExit(1)
