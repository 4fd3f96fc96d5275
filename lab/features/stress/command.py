"""What `lab stress` does on the command line: read its words, show the progress, and print the card."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from lab.analysis.stress.lines import strips
from lab.core import machine
from lab.core.errors import RequestError
from lab.core.printing import say
from lab.features.stress.card import Card
from lab.features.stress.pair import CardPair
from lab.features.stress.plan import USUAL_BEST, Plan, read_plans
from lab.features.stress.progress import coloured
from lab.features.stress.training import Stopped, make_card, make_pair, pair_file, possible_plan, try_own_code
from lab.sweeping import launch, own_code, request
from lab.sweeping.bench import Bench, compose_settings


def run(arguments: Sequence[str]) -> None:
    """Crash-test what the words of the command line name, and print the card.

    Raises:
        RequestError: a word, a test, a cure or the number of minutes is unknown, or they do not go together.
        SystemExit: with status 1 when a run failed.
    """
    given, words = request.options_and_overrides("stress", arguments)
    minutes = given.minutes or "1"
    if not minutes.isdecimal():
        raise RequestError(f"--minutes takes 1, 5 or 30, not {minutes}")
    if given.arms and given.cures not in (None, "all"):
        raise RequestError("--arms goes with --cures all")
    plans = read_plans(
        list(map(str, given.folders)),
        words,
        request.command_line(sys.argv[1:]),
        code=own_code.read_options(given),
        names=given.tests.split(",") if given.tests else [],
        minutes=int(minutes),
        cures=given.cures,
        arms=given.arms.split(",") if given.arms else [],
        budget=_seconds(given.budget) if given.budget else math.inf,
        options=["--config-dir", given.config_dir] if given.config_dir else [],
    )
    if given.check:
        if not plans[0].own_model and len(plans) == 1:
            raise RequestError("--check tries code of your own, which --model FILE.py:NAME or --optimizer names")
        say(try_own_code(plans[0]))
        return
    if given.dry_run:
        for plan in plans:
            dry_run(plan)
        return
    machine.clean_process_context()  # where jobs are forked, torch is loaded while this process composes
    try:
        card = make_card(*plans) if len(plans) == 1 else make_pair(plans)
    except Stopped as end:
        _print(end.card, end.card.folder / "card.html", as_json=given.json)
        raise
    _print(card, plans[0].folder / "card.html" if len(plans) == 1 else pair_file(plans, ".html"), as_json=given.json)


def _print(card: Card | CardPair, page: Path, *, as_json: bool) -> None:
    if as_json:
        say(card.answer.json())
    else:
        print_card(card, page)


def _seconds(text: str) -> float:
    """The seconds of a time such as ``20min``, ``90s`` or ``1.5h``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", text)
    if not found or not float(found[1]):
        raise RequestError(f"--budget takes a time such as 20min, 90s or 1.5h, not {text!r}")
    return float(found[1]) * {"s": 1, "min": 60, "h": 3600}[found[2]]


def dry_run(plan: Plan) -> None:
    """Print what the crash test would cost, if the best learning rate is the usual one."""
    plan = possible_plan(plan)
    settings = [*plan.settings(), *plan.finer_settings()]
    planned = Bench(plan.request).plan(compose_settings(plan.request, settings), cautions=False)
    best = f"for a best learning rate of {USUAL_BEST:g}, without learning rates by which the curve is extended"
    say(f"{plan.recipe}, {best}:")
    launch.print_estimate(planned, plan.request)


def print_card(card: Card | CardPair, page: Path) -> None:
    """Print a card or two, their strips in colour on a terminal, and the place of the page."""
    shown = card.strips() if isinstance(card, CardPair) else (card.lines, [])
    pretty = dict(zip(strips(*shown), coloured(*shown), strict=True)) if sys.stdout.isatty() else {}
    console = Console()
    for line in card.answer.text().splitlines():
        if line in pretty:
            console.print(pretty[line])
        else:
            say(line)
    say(f"page: {page}")
