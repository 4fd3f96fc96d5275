"""Write ``docs/interventions/``: a page and a drawing for every arm of the board, from ``arms.yaml`` and the results.

``python docs/interventions.py`` writes them anew; a test compares.
"""

from __future__ import annotations

from pathlib import Path

import lab.training.config  # noqa: F401  (fills the registry)
from lab.core.errors import RequestError
from lab.core.registry import INTERVENTIONS
from lab.studies.leaderboard.documents import markdown_pages
from lab.studies.leaderboard.listing import board_of

FOLDER = Path(__file__).with_name("interventions")


def excludes() -> dict[str, set[str]]:
    """By intervention, those that cannot stand beside it."""
    named = {name: set(getattr(INTERVENTIONS[name], "excludes", ())) for name in INTERVENTIONS}
    return {name: named[name] | {other for other in named if name in named[other]} for name in named}


def pages() -> dict[str, str]:
    """The pages and drawings by file name."""
    try:
        board = board_of([])
    except RequestError:  # not trained yet
        board = None
    return markdown_pages(board, excludes())


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    texts = pages()
    for old in FOLDER.iterdir():
        if old.name not in texts:
            old.unlink()
    for name, text in texts.items():
        FOLDER.joinpath(name).write_text(text, encoding="utf-8")
