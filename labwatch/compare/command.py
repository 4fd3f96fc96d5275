"""`lab compare` of logs."""

from __future__ import annotations

import argparse

from lab.core.errors import RequestError
from lab.report.answer import give
from labwatch.compare.answer import answer_of, siblings_answer
from labwatch.compare.two_logs import compare_logs, follow_siblings, margin_of


def compare(given: argparse.Namespace) -> None:
    """Compare logs of one recipe, or a log with its smaller siblings."""
    if given.window:
        raise RequestError("--window goes with two results folders, and these are logs")
    if given.siblings:
        if given.within:
            raise RequestError("--siblings goes without --within")
        give(siblings_answer(follow_siblings(given.folders)), given)
    else:
        margin = margin_of(given.within) if given.within else None
        give(answer_of(compare_logs(given.folders, margin)), given)
