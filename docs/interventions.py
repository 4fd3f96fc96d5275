"""Write ``docs/interventions/``: a page for every arm of the board, from ``arms.yaml`` and the results.

``python docs/interventions.py`` writes them anew; a test compares.
"""

from __future__ import annotations

from pathlib import Path

from lab.cli.board import excludes
from lab.core import shipped
from lab.core.errors import RequestError
from lab.studies.leaderboard.documents import markdown_pages
from lab.studies.leaderboard.matrix import read_matrix

FOLDER = Path(__file__).with_name("interventions")


def pages() -> dict[str, str]:
    """The pages by file name."""
    try:
        matrix = read_matrix(shipped.data_folder("results") / "board")
    except RequestError:  # not trained yet
        matrix = None
    return markdown_pages(matrix, excludes())


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    texts = pages()
    for old in FOLDER.iterdir():
        if old.name not in texts:
            old.unlink()
    for name, text in texts.items():
        FOLDER.joinpath(name).write_text(text, encoding="utf-8")
