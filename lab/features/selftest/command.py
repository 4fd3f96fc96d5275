"""`lab selftest`."""

from __future__ import annotations

from collections.abc import Sequence

from lab.core.errors import RequestError
from lab.core.usage import OptionParser
from lab.features.selftest.machine import check_machine


def run(arguments: Sequence[str]) -> None:
    """Check the machine.

    Raises:
        SystemExit: with status 1 if a check fails, else 0.
    """
    given = OptionParser("selftest").read(arguments)
    if given.folders:
        raise RequestError(f"lab selftest takes no {str(given.folders[0])!r}")
    raise SystemExit(check_machine(given.json))
