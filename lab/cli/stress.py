"""The crash test of a recipe: train what its tests need, round after round, and make the card."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from lab.cli import launch
from lab.cli.compose import Composer, Tree, Word, expand, hydra_configs, parse
from lab.cli.request import Request, read_request
from lab.core import files
from lab.core.errors import RequestError
from lab.core.printing import printable, say
from lab.records import store
from lab.studies.stress.battery import Setting, StressTest, read_battery
from lab.studies.stress.card import Card, card_of
from lab.studies.stress.lines import STRIP, Line, strips, zone_at
from lab.studies.stress.measures import Outcomes, outcomes, wanted
from lab.sweeping import pipeline
from lab.sweeping.progress import FleetProgress, summary

if TYPE_CHECKING:
    from lab.sweeping.planner import Point

LONGEST_NAME = 60  # of a folder, in characters
# Words that say how a recipe is trained here, and so are no part of its name.
NO_RECIPE = ("out", "seed", "device", "engine", "hydra")
USUAL_BEST = 0.03  # learning rate that --dry-run takes for the best one as long as that is not known
COLOURS = {"passes": "green", "weak": "yellow", "fails": "red"}


@dataclass(frozen=True)
class Plan:
    """A crash test that was asked for.

    Attributes:
        request: the words of the recipe, with those of the battery before them.
        recipe: the name of the recipe for readers.
        tests: the tests, in their order.
        folder: of the records.
    """

    request: Request
    recipe: str
    tests: Sequence[StressTest]
    folder: Path


def read_plan(
    words: Sequence[str], names: Sequence[str], minutes: int, command: str, options: Sequence[str] = ()
) -> Plan:
    """Read the words of a crash test.

    Args:
        words: overrides of the recipe.
        names: of the tests; none means all that fit.
        minutes: the minutes on two cores.
        command: the command line as the user can type it again.
        options: ``--config-dir`` with its folder.

    Raises:
        RequestError: a word, a test or the number of minutes is none, or the words sweep over more than seeds.
    """
    tests = read_battery().chosen(names, minutes)
    own = [word for word in words if not word.lstrip("+~").startswith(NO_RECIPE)]
    seeds = ",".join(map(str, range(read_battery().seeds[minutes])))
    given = _last_of_each_key([*read_battery().runs, f"seed={seeds}", *words])
    request = read_request([*given, *options], command, name=f"stress/{_folder_name(own)}")
    if swept := [word.key for word in request.words if word.is_swept and word.key != "seed"]:
        raise RequestError(f"lab stress tests one recipe, and {swept[0]} has several values; only seed may")
    out = next(word.value for word in request.words if word.key == "out")
    return Plan(request, _recipe_name(own), tests, Path(str(out)))


def _last_of_each_key(words: Iterable[str]) -> list[str]:
    return list({word.partition("=")[0].lstrip("+~"): word for word in words}.values())


def _folder_name(words: Sequence[str]) -> str:
    text = re.sub(r"[^\w.,=-]+", "_", "+".join(words).removeprefix("recipe=")).strip("_.") or "default"
    return text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}-{files.text_digest(text)[:6]}"


def _recipe_name(words: Sequence[str]) -> str:
    named = [word.removeprefix("recipe=") for word in words if word.startswith("recipe=")]
    changes = [word for word in words if not word.startswith("recipe=")]
    name = named[0] if named else "the default recipe"
    return f"{name} with {' '.join(changes)}" if changes else name


def make_card(plan: Plan) -> Card:
    """Train what is missing and make the card, with its page and its JSON beside the records.

    Raises:
        RequestError: a run is invalid, or the folder cannot take records.
        SystemExit: with status 1 when a run failed.
    """
    composed = launch.compose(plan.request)
    ids: dict[Setting, list[str]] = {}
    done: Outcomes = {}
    progress = Progress()
    try:
        while settings := wanted(read_battery(), plan.tests, done):
            trees = compose_settings(plan.request, settings)
            every = [tree for of_setting in trees.values() for tree in of_setting]
            planned = launch.plan(composed._replace(trees=every), plan.request, cautions=not ids)
            ids |= _ids(trees, planned.requested)
            launch.train_runs(composed.launcher, planned, plan.request.command, progress)
            done = outcomes(store.read(plan.folder), ids)
            if set(settings) - set(done):
                say(f"lab: {plan.recipe}: some runs failed, so the card is not complete", error=True)
                raise SystemExit(1)
            progress.add(card_of(plan.recipe, "", plan.folder, plan.tests, done, read_battery()).lines)
    finally:
        progress.end()
    card = card_of(plan.recipe, plan.request.command, plan.folder, plan.tests, done, read_battery())
    store.gather(plan.folder)
    files.write_text(plan.folder / "card.html", card.page())
    files.write_text(plan.folder / "card.json", card.as_json() + "\n")
    return card


def dry_run(plan: Plan) -> None:
    """Print what the crash test would cost, if the best learning rate is the usual one."""
    settings = wanted(read_battery(), plan.tests, {})
    settings += [place.setting(USUAL_BEST) for test in plan.tests for place in test.places]
    composed, trees = launch.compose(plan.request), compose_settings(plan.request, list(dict.fromkeys(settings)))
    every = [tree for of_setting in trees.values() for tree in of_setting]
    planned = launch.plan(composed._replace(trees=every), plan.request, cautions=False)
    say(f"for a best learning rate of {USUAL_BEST:g}, without learning rates by which the curve is extended:")
    pipeline.print_estimate(planned, full=False)


def compose_settings(request: Request, settings: Sequence[Setting]) -> dict[Setting, list[Tree]]:
    """The config trees of each setting of a recipe, one for each seed.

    Raises:
        RequestError: the words of a setting cannot be composed with those of the recipe.
    """
    own = [word for word in request.words if not word.is_setting]
    with hydra_configs(request.files):
        composer = Composer(request.config_dir)
        return {setting: _trees(composer, own, setting, request.config_dir) for setting in settings}


def _trees(composer: Composer, own: Sequence[Word], setting: Setting, config_dir: Path | None) -> list[Tree]:
    added = parse([*setting.words, f"optimizer.lr={setting.lr!r}"], config_dir)
    words = {word.key: word for word in (*own, *added)}
    return [composer.tree(point) for point in expand(list(words.values()), config_dir)]


def _ids(trees: Mapping[Setting, Sequence[Tree]], points: Sequence[Point]) -> dict[Setting, list[str]]:
    """The ids of the runs of each setting."""
    id_of = {id(point.tree): point.id for point in points}
    return {setting: [id_of[id(tree)] for tree in of_setting] for setting, of_setting in trees.items()}


class Progress:
    """Shows the strips of the tests that have ended: on a terminal above a line of progress, elsewhere as they end."""

    def __init__(self) -> None:
        self.lines: dict[str, Line] = {}
        self.live = (
            Live(console=Console(stderr=True), transient=True, auto_refresh=False) if sys.stderr.isatty() else None
        )
        if self.live:
            self.live.start()

    def add(self, lines: Sequence[Line]) -> None:
        """Show the tests that have ended since."""
        new = [line for line in lines if line.test.name not in self.lines]
        self.lines |= {line.test.name: line for line in new}
        if not self.live:
            for text in strips(new):
                say(text, error=True)

    def show(self, fleets: Mapping[int, FleetProgress], done: float, elapsed: float) -> None:
        """Redraw: progress of each fleet that has started, the share of work done, and the seconds elapsed."""
        if self.live:
            head = Text(summary(fleets, len(fleets), done, elapsed), no_wrap=True, overflow="crop")
            self.live.update(Group(*coloured(list(self.lines.values())), head), refresh=True)

    def close(self) -> None:
        """Leave the strips on the screen until the next round."""

    def end(self) -> None:
        """Clear the screen for the card."""
        if self.live:
            self.live.stop()


def coloured(lines: Sequence[Line]) -> list[Text]:
    """The strips of a card with zones in colour."""
    texts = []
    for plain in strips(lines):
        text = Text(printable(plain), no_wrap=True, overflow="crop")
        start = plain.index("[") + 1
        for place in range(STRIP):
            text.stylize(COLOURS[zone_at((place + 0.5) / STRIP)], start + place, start + place + 1)
        texts.append(text)
    return texts


def print_card(card: Card) -> None:
    """Print a card, its strips in colour on a terminal."""
    plain, pretty = list(strips(card.lines)), dict(zip(strips(card.lines), coloured(card.lines), strict=True))
    console = Console() if sys.stdout.isatty() else None
    for line in card.text():
        if console and line in plain:
            console.print(pretty[line])
        else:
            say(line)
    say(f"page: {card.folder / 'card.html'}")
