"""`lab leaderboard`: the committed board, or in a clone of the lab that of a folder, judged anew and maybe trained."""

from __future__ import annotations

from collections.abc import Sequence

from lab.core import files, shelf, shipped
from lab.core.errors import RequestError
from lab.core.printing import say
from lab.core.usage import OptionParser


def run(arguments: Sequence[str]) -> None:
    """Show the board that the words of the command line name, and train it first if they ask for that.

    Raises:
        RequestError: the words do not go together or ask for what an installed package lacks, a name is unknown, or the
            folder holds no board.
        SystemExit: with status 1 when a run failed.
    """
    given = OptionParser("leaderboard").read(arguments)
    if len(given.folders) > 1 or (given.train and not given.folders):
        raise RequestError("lab leaderboard takes one DIR, the folder of the board, and --train needs it")
    if (given.arms or given.failures) and not given.train:
        raise RequestError("--arms and --failures go with --train")
    if not (given.folders or given.html or given.json):
        say(files.read_text(shipped.data_folder("results") / f"board.{'csv' if given.csv else 'txt'}").rstrip())
    else:
        shelf.module("board", "command", "lab leaderboard with a folder, --html or --json").show_board(given)
