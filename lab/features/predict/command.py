"""What `lab predict` does: forecast from the records of a folder, or hold the numbers of a run against public runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.analysis.text import positive
from lab.core import files
from lab.core.errors import RequestError
from lab.core.usage import OptionParser
from lab.report.answer import give, note_damage
from lab.sweeping.request import command_line

BY_NUMBERS = ("html", "thresholds", "fail_on")  # options that go with --params


def run(arguments: Sequence[str]) -> None:
    """Print what the words of the command line ask for, and write what its options name.

    Raises:
        RequestError: the words do not go together, a number is unknown or none, or nothing can be forecast.
        SystemExit: with status 1 if ``--fail-on`` fails.
    """
    given = OptionParser("predict").read(arguments)
    if given.params:
        _by_numbers(given)
        return
    if unfit := next((name for name in BY_NUMBERS if getattr(given, name)), ""):
        raise RequestError(f"--{unfit.replace('_', '-')} goes with --params, which asks by numbers")
    if len(given.folders) != 1:
        raise RequestError("predict from which folder? lab predict DIR, or lab predict --params 7e9 lr=3e-4")
    _from_records(given)


def _by_numbers(given: argparse.Namespace) -> None:
    from lab.features.predict.numbers import answer_of, read_numbers

    if given.fail_on not in (None, "stop"):
        raise RequestError(f"--fail-on takes stop, which means a number beyond its limit, not {given.fail_on!r}")
    if unfit := next((name for name in ("size", "lr") if getattr(given, name)), ""):
        raise RequestError(f"--params takes numbers such as lr=3e-4, and --{unfit} goes with a folder")
    found = answer_of(read_numbers([f"params={given.params}", *map(str, given.folders)]), command_line(sys.argv[1:]))
    if given.thresholds:
        files.write_output(Path(given.thresholds), json.dumps(found.data["thresholds"], indent=1) + "\n")
    give(found, given)
    if given.fail_on and found.data["is_beyond"]:
        raise SystemExit(1)


def _from_records(given: argparse.Namespace) -> None:
    from lab.analysis.curves import load, without_single_changes
    from lab.features.predict.answer import predict
    from lab.features.predict.at_size import predict_at

    (folder,) = given.folders
    every = load(folder)
    records = every.of(set(without_single_changes(every.runs)["id"]))
    note_damage(folder)
    size, lr = positive("--size", given.size), positive("--lr", given.lr)
    if lr and not size:
        raise RequestError("--lr asks at a size: lab predict DIR --size 7B --lr 3e-4")
    give(predict_at(records, size, lr) if size else predict(records, folder), given)
