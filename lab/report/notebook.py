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
from lab.core.errors import RequestError, nearest
from lab.records.store import Records

if TYPE_CHECKING:
    from lab.analysis.rendering.layout import Drawing
    from lab.studies.stress.card import Card

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


def show(records: Records | Study | Card, name: str = "", window: Sequence[float] | None = None) -> Shown:
    """Draw a figure of the report or of `lab predict`, or the card of a crash test.

    Args:
        records: the records, as ``load`` reads them, a study, as ``lab.sweep`` returns it, or a card.
        name: a name from ``lab list figures``, or ``logit_forecast`` or ``gradient_forecast``; nothing for a card.
        window: the lowest and the highest learning rate over which sensitivity is a mean; that of the study, or the
            paper's.

    Raises:
        RequestError: there is no figure of that name, these records hold nothing that it shows, or the window is
            invalid.
    """
    # here, since matplotlib is slow to import
    from lab.analysis.forecast.figures import gradient_forecast, logit_forecast
    from lab.analysis.rendering import layout
    from lab.studies.figures import FIGURES
    from lab.studies.stress.card import Card

    if isinstance(records, Card):
        drawing = records.figure()
        return Shown(layout.png(drawing, PIXELS * 72), drawing.caption)
    if isinstance(records, Study):
        window = window or records.window
        records = records.records
    forecasts = {"gradient_forecast": gradient_forecast, "logit_forecast": logit_forecast}
    drawing = (
        forecasts[name](records) if name in forecasts else FIGURES[name](records, None, window_of(window or WINDOW))
    )
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
        from lab.analysis.rendering import layout  # matplotlib is slow to import

        if step not in self.drawings:
            raise RequestError(f"no alarm at step {step}; there are some at {listed(map(str, self.drawings))}")
        drawing = self.drawings[step]()
        return Shown(layout.png(drawing, PIXELS * 72), drawing.caption)


def watch(path: str | Path, columns: Mapping[str, str] | None = None) -> Watched:
    """Find the alarms of a log of any program, of a folder of logs, or of records, as `lab watch` does.

    Args:
        path: the log or the folder.
        columns: names of columns that have no usual one, such as ``{"loss": "ce"}``.

    Raises:
        RequestError: the path cannot be read, or no loss recurs in it.
    """
    from lab.studies.alarms.watching import event_figure, find_alarms
    from lab.studies.alarms.words import next_look, what_happened

    logs, notes, events = find_alarms(Path(path), columns=columns)
    rows: list[dict[str, object]] = []
    drawings: dict[int, Callable[[], Drawing]] = {}
    for log in logs:
        for event in events[log.name]:
            row = {name: getattr(event, name) for name in ("run", "step", "kind", "ending")}
            rows.append(row | {"what": what_happened(log, event), "look next at": next_look(log, event, events)})
            drawings[event.step] = partial(event_figure, log, event)
    return Watched(notes, pd.DataFrame(rows), drawings)


def card(folder: str | Path, recipe: str) -> Card:
    """The card of a published recipe, from records of the crash test that hold its runs.

    Args:
        folder: of results, such as ``results/stress/recipes``.
        recipe: its name, as ``lab list recipes`` has it.

    Raises:
        RequestError: no such folder, or no runs of this recipe in it.
    """
    from lab.records import store
    from lab.studies.stress.battery import read_battery
    from lab.studies.stress.card import card_of
    from lab.studies.stress.reference import outcomes_by_recipe

    battery = read_battery()
    by_recipe = outcomes_by_recipe(store.read(Path(folder)), battery)
    if recipe not in by_recipe:
        raise RequestError(f"{folder} has no runs of recipe {recipe!r}; {nearest(recipe, by_recipe)}")
    tests = list(battery.tests.values())
    return card_of(recipe, f"lab stress recipe={recipe}", Path(folder), tests, by_recipe[recipe], battery)


def recipes() -> pd.DataFrame:
    """The published recipes under the crash test, a row each: what was published, and the value of each test."""
    from lab.studies.stress.reference import published_outcomes, read_reference

    table = read_reference()
    values = [name.removesuffix("_verdict") for name in map(str, table) if name.endswith("_verdict")]
    return table.set_index("recipe")[values].assign(published=table["recipe"].map(published_outcomes()).to_numpy())


def leaderboard(folder: str | Path, panel: str = "", window: Sequence[float] = WINDOW) -> pd.DataFrame:
    """The board of interventions, as `lab leaderboard` prints it.

    Args:
        folder: of results that hold the reference.
        panel: its title; the first panel without one.
        window: as for ``show``.

    Returns:
        A row for the reference, then a row for each arm: verdict, differences from the reference in nats per token with
        95 % intervals over seeds, ranks and counts.

    Raises:
        RequestError: no such folder or panel, no reference in it, or the window is invalid.
    """
    from lab.studies.leaderboard import listing

    board = listing.board_of([Path(folder)], window_of(window))
    panels = {shown.title: shown for shown in listing.all_panels(board)}
    if panel and panel not in panels:
        raise RequestError(f"no panel {panel!r}; {nearest(panel, panels)}")
    return listing.table(panels[panel or next(iter(panels))]).set_index("arm")


def transfer(folder: str | Path, *others: str | Path) -> pd.DataFrame:
    """Published orderings of large models and what the board predicts of them.

    Args:
        folder: of results that hold the reference of the board; claims are judged on the folders beside it.
        others: folders with more of the board.

    Returns:
        A row for each pair of arms.

    Raises:
        RequestError: as ``leaderboard``.
    """
    from lab.studies.leaderboard import listing, transfer

    board = listing.board_of([Path(folder), *map(Path, others)])
    return transfer.table(transfer.predict(board, transfer.published(), Path(folder).resolve().parent))
