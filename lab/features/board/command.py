"""What `lab leaderboard` does: train what the board lacks, and print it or write its page."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lab.core import shipped
from lab.core.errors import RequestError
from lab.core.printing import say
from lab.core.usage import OptionParser
from lab.features.board import text
from lab.features.board.matrix import read_matrix
from lab.report.answer import give_one


def run(arguments: Sequence[str]) -> None:
    """Show the board that the words of the command line name, and train it first if they ask for that.

    Raises:
        RequestError: the words do not go together, a name is unknown, or the folder holds no board.
        SystemExit: with status 1 when a run failed.
    """
    given = OptionParser("leaderboard").read(arguments)
    if len(given.folders) > 1 or (given.train and not given.folders):
        raise RequestError("lab leaderboard takes one DIR, the folder of the board, and --train needs it")
    if (given.arms or given.failures) and not given.train:
        raise RequestError("--arms and --failures go with --train")
    folder = given.folders[0] if given.folders else shipped.results() / "board"
    if given.train:
        from lab.features.board.training import train_board  # slow to load
        from lab.sweeping import request

        names = {key: getattr(given, key).split(",") if getattr(given, key) else [] for key in ("arms", "failures")}
        train_board(folder, request.command_line(sys.argv[1:]), **names)
    matrix = read_matrix(folder)
    if given.csv and not (given.html or given.json):
        say(text.as_csv(matrix))
        return
    from lab.features.board.page import answer_of, how_made  # slow to load

    give_one(answer_of(matrix, [*how_made(matrix)] if given.html else ()), given)
