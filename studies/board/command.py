"""What `lab leaderboard` does in a clone: train what the board lacks, and print it or write its page."""

from __future__ import annotations

import argparse
import sys

from lab.core import shipped
from lab.core.printing import say
from lab.report.answer import give_one
from studies.board import text
from studies.board.matrix import read_matrix


def show_board(given: argparse.Namespace) -> None:
    """Show the board that was asked for, and train it first if that was asked for, too.

    Raises:
        RequestError: a name is unknown, or the folder holds no board.
        SystemExit: with status 1 when a run failed.
    """
    folder = given.folders[0] if given.folders else shipped.results() / "board"
    if given.train:
        from lab.sweeping import request
        from studies.board.training import train_board  # slow to load

        names = {key: getattr(given, key).split(",") if getattr(given, key) else [] for key in ("arms", "failures")}
        train_board(folder, request.command_line(sys.argv[1:]), **names)
    matrix = read_matrix(folder)
    if given.csv and not (given.html or given.json):
        say(text.as_csv(matrix))
        return
    from studies.board.page import answer_of, how_made  # slow to load

    give_one(answer_of(matrix, [*how_made(matrix)] if given.html else ()), given)
