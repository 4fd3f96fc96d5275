"""Figures and tables of notebooks: figures with their captions as in the report, and the board of interventions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from lab.analysis.sensitivity import WINDOW, Study, window_of
from lab.core import shelf
from lab.core.errors import RequestError, nearest
from lab.records.store import Records
from lab.report.pictures import Shown, shown

if TYPE_CHECKING:
    from lab.features.stress.card import Card


def show(records: Records | Study | Card | Any, name: str = "", window: Sequence[float] | None = None) -> Shown:
    """Draw a figure of the report or of `lab predict`, the card of a crash test, or the board.

    Args:
        records: the records, as ``load`` reads them, a study, as ``lab.sweep`` returns it, a card, or a board.
        name: a name from ``lab list figures``, or ``logit_forecast`` or ``gradient_forecast``; nothing for a card or a
            board.
        window: the lowest and the highest learning rate over which sensitivity is a mean; that of the study, or the
            paper's.

    Raises:
        RequestError: there is no figure of that name, these records hold nothing that it shows, or the window is
            invalid.
    """
    # here, since matplotlib is slow to import
    from lab.features.predict.figures import gradient_forecast, logit_forecast
    from lab.features.stress.card import Card
    from lab.report.all_figures import FIGURES

    if isinstance(records, Card):
        return shown(records.figure())
    if not isinstance(records, Records | Study):
        return shown(shelf.module("board", "page", "the figure of a board").board_figure(records))
    if isinstance(records, Study):
        window = window or records.window
        records = records.records
    forecasts = {"gradient_forecast": gradient_forecast, "logit_forecast": logit_forecast}
    if name in forecasts:
        return shown(forecasts[name](records))
    return shown(FIGURES[name](records, None, window_of(window or WINDOW)))


def card(folder: str | Path, recipe: str = "") -> Card:
    """A card of the crash test: the one that ``lab stress`` left in a folder, or that of a published recipe.

    Args:
        folder: of the card, such as ``runs/stress/mine.yaml``; or with a recipe, of records of the crash test that hold
            its runs, such as ``results/stress/recipes``.
        recipe: the name of a published one, as ``lab list recipes`` has it.

    Raises:
        RequestError: no such folder, or no card or no runs of this recipe in it.
    """
    from lab.analysis.stress.battery import read_battery
    from lab.features.stress.card import card_of, read_card
    from lab.features.stress.reference import outcomes_by_recipe
    from lab.records import store

    if not recipe:
        return read_card(Path(folder))
    battery = read_battery()
    by_recipe = outcomes_by_recipe(store.read(Path(folder)), battery)
    if recipe not in by_recipe:
        raise RequestError(f"{folder} has no runs of recipe {recipe!r}; {nearest(recipe, by_recipe)}")
    tests = battery.on_cards
    return card_of(recipe, f"lab stress recipe={recipe}", Path(folder), tests, by_recipe[recipe], battery)


def recipes() -> pd.DataFrame:
    """The published recipes under the crash test, a row each: what was published, and the value of each test.

    A value is NaN where the test of the recipe is not judged.
    """
    from lab.features.stress.reference import judged_values, published_outcomes, read_reference

    table = read_reference().set_index("recipe")
    tests = [name.removesuffix("_verdict") for name in map(str, table) if name.endswith("_verdict")]
    values = {test: judged_values(table, test) for test in tests}
    return pd.DataFrame(values).assign(published=table.index.map(published_outcomes()))


def board(folder: str | Path) -> Any:
    """The board of a results folder, whose figure ``show`` draws.

    Raises:
        RequestError: as ``leaderboard``.
    """
    return shelf.module("board", "matrix", "lab.analysis.board").read_matrix(Path(folder))


def leaderboard(folder: str | Path) -> pd.DataFrame:
    """The board, as `lab leaderboard` prints it: a row per arm, a column per failure, and what the arm costs.

    Args:
        folder: of results that hold a board, such as ``results/board``.

    Raises:
        RequestError: no such folder, no board in it, or a lab without its studies.
    """
    table: pd.DataFrame = shelf.module("board", "text", "lab.analysis.leaderboard").table(board(folder))
    return table.set_index("arm")


def verdicts(folder: str | Path, *figures: str) -> pd.DataFrame:
    """Judge claims on a folder and those inside it, as ``lab claims`` does.

    Args:
        folder: of records.
        figures: figures of Wortsman et al. 2023, such as ``"1"`` or ``"E.7"``; by default every claim of every source.

    Raises:
        RequestError: no such figure, no such folder, records that cannot be read, or a lab without its studies.
    """
    table: pd.DataFrame = shelf.module("claims", "scoreboard", "lab.analysis.verdicts").verdicts(folder, *figures)
    return table
