"""What `lab stress --params` does: say what the committed records know of a run by its numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.core import files
from lab.core.errors import RequestError
from lab.features.predict.by_numbers import answer_of
from lab.features.predict.numbers import read_numbers
from lab.report.answer import give
from lab.sweeping.request import command_line, options_and_overrides


def run(arguments: Sequence[str]) -> None:
    """Print the page of a run by its numbers, and write what the options ask for.

    Raises:
        RequestError: an option does not go with ``--params``, or a number is unknown or none.
        SystemExit: with status 1 if ``--fail-on`` fails.
    """
    given, words = options_and_overrides("stress", arguments)
    if given.fail_on not in (None, "stop"):
        raise RequestError(f"--fail-on takes stop, which means a number beyond its limit, not {given.fail_on!r}")
    others = ("model", "optimizer", "minutes", "tests", "cures", "arms", "budget", "dry_run", "config_dir")
    if unfit := next((name for name in others if getattr(given, name)), ""):
        raise RequestError(f"--params trains nothing, so --{unfit.replace('_', '-')} does not go with it")
    if given.folders:
        raise RequestError(f"--params takes numbers, such as lr=3e-4, and no recipe {str(given.folders[0])!r}")
    found = answer_of(read_numbers([f"params={given.params}", *words]), command_line(sys.argv[1:]))
    if given.thresholds:
        files.write_output(Path(given.thresholds), json.dumps(found.data["thresholds"], indent=1) + "\n")
    give(found, given)
    if given.fail_on and found.data["is_beyond"]:
        raise SystemExit(1)
