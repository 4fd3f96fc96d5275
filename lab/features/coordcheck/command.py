"""`lab coordcheck`."""

from __future__ import annotations

from collections.abc import Sequence

from lab.core.printing import say
from lab.features.coordcheck.coordinates import DEFAULTS, check_coordinates
from lab.sweeping import launch


def run(arguments: Sequence[str]) -> None:
    """Check how changes of the coordinates grow with the size.

    Raises:
        SystemExit: with status 1 if the check fails.
    """
    check = check_coordinates(launch.compose_points([*DEFAULTS, *arguments]))
    check.write()
    for line in check.lines():
        say(line)
    if not check.passed:
        raise SystemExit(1)
