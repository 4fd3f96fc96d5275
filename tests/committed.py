"""The committed results, judged once for all tests of a process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from studies.claims import scoreboard
from studies.claims.scoreboard import ScoreboardRow

RESULTS = Path(__file__).parents[1] / "results"
in_one_process = pytest.mark.xdist_group("committed")


@cache
def judged() -> list[ScoreboardRow]:
    """The rows of ``lab claims results``."""
    return scoreboard.judge_all(scoreboard.read([RESULTS]), other_text=scoreboard.read_other_text([RESULTS]))
