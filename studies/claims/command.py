"""What `lab claims` does: judge claims on folders, or say how many seeds decide one."""

from __future__ import annotations

import argparse
from pathlib import Path

from lab.core import files, shipped
from lab.core.errors import RequestError
from lab.core.printing import say
from studies.claims import ruled, scoreboard
from studies.claims.power import power_lines
from studies.claims.registry import RULED


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
    options = {"--json": given.json, "--markdown": given.markdown, "--html": given.html}
    formats = [option for option, is_given in options.items() if is_given]
    chosen = {name: getattr(given, name) or "" for name in ("source", "figure", "verdict")}
    if given.source in RULED:
        text = ruled.render(given.source, formats[-1] if formats else "")
    else:
        here = [results] if (results := shipped.results()) == Path("results") else []
        text = scoreboard.render(given.folders or here, *formats, **chosen)
    if given.html:
        files.write_output(Path(given.html), text)
    say(f"page: {given.html}" if given.html else text)
