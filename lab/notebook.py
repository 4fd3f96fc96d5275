"""Figures and tables of notebooks: figures with their captions as in the report, and the board of interventions."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd

from lab.analysis.rendering import html
from lab.analysis.sensitivity import WINDOW, Study, window_of
from lab.analysis.text import listed
from lab.core import shelf
from lab.core.errors import RequestError, nearest
from lab.records.store import Records

if TYPE_CHECKING:
    from lab.analysis.rendering.layout import Drawing
    from lab.features.board.matrix import Matrix
    from lab.features.stress.card import Card

PIXELS = 2  # of a picture, for each point of its width


class Shown(NamedTuple):
    """A drawing as a picture (PNG) and its caption, which notebooks display below it."""

    png: bytes
    caption: str

    def __repr__(self) -> str:
        return self.caption

    def _ipython_display_(self) -> None:
        """Display both: pictures, unlike ``<svg>``, are shown wherever a notebook is, such as on GitHub."""
        from IPython.display import display  # there where a notebook runs

        title, *others = [" ".join(paragraph.split()) for paragraph in self.caption.split("\n\n")]
        picture = {"image/png": b64encode(self.png).decode(), "text/plain": title}
        look = {"width": int.from_bytes(self.png[16:20]) // PIXELS, "alt": title}
        caption = {"text/html": "".join(map(html.paragraph, [title, *others]))}
        for output, metadata in ((picture, {"image/png": look}), (caption, {})):
            display(output, metadata=metadata, raw=True)  # type: ignore[no-untyped-call]


def show(records: Records | Study | Card | Matrix, name: str = "", window: Sequence[float] | None = None) -> Shown:
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
    from lab.features.board.matrix import Matrix
    from lab.features.board.page import board_figure
    from lab.features.predict.figures import gradient_forecast, logit_forecast
    from lab.features.stress.card import Card
    from lab.report.all_figures import FIGURES

    if isinstance(records, Card | Matrix):
        return _shown(records.figure() if isinstance(records, Card) else board_figure(records))
    if isinstance(records, Study):
        window = window or records.window
        records = records.records
    forecasts = {"gradient_forecast": gradient_forecast, "logit_forecast": logit_forecast}
    if name in forecasts:
        return _shown(forecasts[name](records))
    return _shown(FIGURES[name](records, None, window_of(window or WINDOW)))


def _shown(drawing: Drawing) -> Shown:
    from lab.analysis.rendering import layout  # matplotlib is slow to import

    return Shown(layout.png(drawing, PIXELS * 72), drawing.caption)


@dataclass(frozen=True)
class Watched:
    """The alarms of a log or a folder; in a notebook it displays what was read, and the alarms.

    Attributes:
        read: lines that say what was read, and how.
        alarms: a row for each alarm: ``run``, ``step``, ``kind``, ``ending``, what it is, and what to look at next.
        drawings: by step a function that draws the measurements around an alarm.
    """

    read: list[str]
    alarms: pd.DataFrame
    drawings: Mapping[int, Callable[[], Drawing]]

    def _repr_html_(self) -> str:
        return "".join([*map(html.paragraph, self.read), html.table(self.alarms)])

    def show(self, step: int) -> Shown:
        """Draw the run, and a closer view of the alarm at this step.

        Raises:
            RequestError: no alarm begins there.
        """
        if step not in self.drawings:
            raise RequestError(f"no alarm at step {step}; there are some at {listed(map(str, self.drawings))}")
        return _shown(self.drawings[step]())


def watch(path: str | Path, columns: Mapping[str, str] | None = None) -> Watched:
    """Find the alarms of a log of any program, a folder of logs, records or a recording, as `lab watch` does.

    Args:
        path: the log or the folder.
        columns: names of columns that have no usual one, such as ``{"loss": "ce"}``.

    Raises:
        RequestError: the path cannot be read, or no loss recurs in it.
    """
    from lab.analysis.recordings.recording import is_recording
    from lab.analysis.recordings.words import report
    from lab.features.watch.pages import event_figure
    from lab.features.watch.watching import find_alarms
    from lab.features.watch.words import next_look, what_happened

    logs, notes, events = find_alarms(Path(path), columns=columns)
    rows: list[dict[str, object]] = []
    drawings: dict[int, Callable[[], Drawing]] = {}
    for log in logs:
        for event in events[log.name]:
            row = {name: getattr(event, name) for name in ("run", "step", "kind", "ending")}
            rows.append(row | {"what": what_happened(log, event), "look next at": next_look(log, event, events)})
            drawings[event.step] = partial(event_figure, log, event)
    if is_recording(Path(path)):
        notes += report(Path(path), {}).lines
    return Watched(notes, pd.DataFrame(rows), drawings)


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


def board(folder: str | Path) -> Matrix:
    """The board of a results folder, whose figure ``show`` draws.

    Raises:
        RequestError: as ``leaderboard``.
    """
    from lab.features.board.matrix import read_matrix

    return read_matrix(Path(folder))


def leaderboard(folder: str | Path) -> pd.DataFrame:
    """The board, as `lab leaderboard` prints it: a row per arm, a column per failure, and what the arm costs.

    Args:
        folder: of results that hold a board, such as ``results/board``.

    Raises:
        RequestError: no such folder, or no board in it.
    """
    from lab.features.board import text

    return text.table(board(folder)).set_index("arm")


def verdicts(folder: str | Path, *figures: str) -> pd.DataFrame:
    """Judge claims on a folder and those inside it, as ``lab claims`` does.

    Args:
        folder: of records.
        figures: figures of Wortsman et al. 2023, such as ``"1"`` or ``"E.7"``; by default every claim of every source.

    Raises:
        RequestError: no such figure, no such folder, records that cannot be read, or a lab without its studies.
    """
    table: pd.DataFrame = shelf.claims("scoreboard", "lab.analysis.verdicts").verdicts(folder, *figures)
    return table
