"""`lab check`, and `lab compare` of two results folders."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lab.analysis.guard.compare import UNCLEAR, margin_of
from lab.analysis.sensitivity import WINDOW, window_of
from lab.analysis.text import listed
from lab.core.errors import RequestError
from lab.core.printing import say
from lab.core.usage import OptionParser
from lab.features.guard import baselines, cards, side_by_side
from lab.features.guard.answer import answer_of
from lab.report.answer import give, note_damage


def run(arguments: Sequence[str]) -> None:
    """Compare a folder with its baseline, keep or show a baseline, or judge a card by itself.

    Raises:
        SystemExit: with the status of the comparison.
    """
    given = OptionParser("check").read(arguments)
    if given.save or given.show:
        _keep_baseline(given)
        return
    by_itself = given.fail_on in cards.FAILING and not given.baseline
    if given.fail_on and given.fail_on != UNCLEAR and not by_itself:
        verdicts = listed(cards.FAILING, "or")
        raise RequestError(f"--fail-on takes {UNCLEAR}, or without --baseline {verdicts}, not {given.fail_on!r}")
    if by_itself:
        _check_verdicts(given)
    if len(given.folders) != 1 or not given.baseline:
        raise RequestError("lab check DIR --baseline FILE|DIR [--margin 5%] [--strict]")
    folder, margin = given.folders[0], margin_of(given.margin or "5%")
    window = window_of(given.window) if given.window else None
    comparison = baselines.check(folder, Path(given.baseline), margin, given.strict, window)
    comparison = comparison._replace(fails_on_unclear=bool(given.fail_on))
    note_damage(folder)
    give(answer_of(comparison), given)
    raise SystemExit(comparison.exit_code)


def _check_verdicts(given: argparse.Namespace) -> NoReturn:
    """Judge a card by its own verdicts, without a baseline, and end with the exit code."""
    others = ("margin", "strict", "junit", "markdown", "window", "json")
    if len(given.folders) != 1 or any(getattr(given, name) for name in others):
        raise RequestError(f"lab check DIR --fail-on {given.fail_on} takes the folder of a card and no more")
    lines, code = cards.check_verdicts(given.folders[0], given.fail_on)
    say("\n".join(lines))
    raise SystemExit(code)


def _keep_baseline(given: argparse.Namespace) -> None:
    """Save a baseline, or show one."""
    others = ("baseline", "margin", "strict", "fail_on", "junit", "markdown", "json", *["window"] * bool(given.show))
    if (
        any(getattr(given, name) for name in others)
        or len(given.folders) != bool(given.save)
        or (given.save and given.show)
    ):
        raise RequestError(
            "lab check DIR --save FILE [--window LOW HIGH], or lab check --show FILE, with no other option"
        )
    if given.show:
        give(baselines.show(Path(given.show)), given)
    else:
        give(baselines.save(given.folders[0], Path(given.save), window_of(given.window or WINDOW)), given)


def compare(given: argparse.Namespace) -> None:
    """Compare two results folders, arm by arm."""
    if len(given.folders) != 2 or given.within or given.html or given.siblings:
        raise RequestError("lab compare A B takes two results folders; --within, --html and --siblings go with logs")
    compared = side_by_side.compare_folders(given.folders[0], given.folders[1], window_of(given.window or WINDOW))
    give(side_by_side.answer_of(compared), given)
