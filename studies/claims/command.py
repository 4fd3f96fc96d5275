"""What `lab claims` does: judge claims on folders, or say how many seeds decide one."""

from __future__ import annotations

import argparse
from pathlib import Path

from lab.core import shipped
from lab.core.errors import RequestError
from lab.core.printing import say
from lab.report.answer import give_one
from studies.claims import public_table, scoreboard
from studies.claims.power import power_lines


def judge_claims(given: argparse.Namespace) -> None:
    """Judge claims on the folders that were given, or on the committed records, and print or write the verdicts.

    Raises:
        RequestError: the options do not go together, or a folder or a claim does not exist.
    """
    if given.power or given.effect:
        if len(given.folders) != 1 or not given.power:
            raise RequestError("lab claims DIR --power CLAIM [--effect NUMBER]")
        for line in power_lines(given.folders[0], given.power, given.effect):
            say(line)
        return
    if given.source == scoreboard.PUBLIC_RUNS:
        give_one(public_table.answer(), given)
        return
    here = [results] if (results := shipped.results()) == Path("results") else []
    folders = given.folders or here
    rows = scoreboard.chosen(folders, given.source or "", given.figure or "", given.verdict or "")
    if given.markdown and not given.html:
        say(scoreboard.markdown_tables(rows))
        return
    shows = {"all_of_them": bool(given.verdict), "draws": bool(given.source), "is_committed": not folders}
    give_one(scoreboard.answer_of(rows, **shows), given)
