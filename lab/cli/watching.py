"""`lab watch`: alarms of a log as it is, or as it grows."""

from __future__ import annotations

import argparse
from pathlib import Path

from lab.analysis.events.log_formats import given_columns
from lab.analysis.logit_rounding import mantissa_bits_of
from lab.core.errors import RequestError
from lab.core.printing import say


def watch(given: argparse.Namespace) -> int:
    """Watch what the words of a command line name; returns 1 if an alarm was raised, 0 if none."""
    from lab.studies.alarms import watching

    if len(given.folders) != 1:
        raise RequestError("watch which folder or log? lab watch DIR|LOG [--replay DIR|LOG] [--follow] [--json]")
    columns = given_columns(given.columns) if given.columns else {}
    bits = mantissa_bits_of(given.mantissa_bits) if given.mantissa_bits else None
    lines, alarmed = watching.watch(
        given.folders[0],
        replays=[Path(each) for each in given.replay],
        mantissa_bits=bits,
        columns=columns,
        as_json=given.json,
    )
    for line in lines:
        say(line)
    return int(alarmed)
