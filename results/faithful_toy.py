"""Tables and figures of the search for a small model that fails like a large one: ``python results/faithful_toy.py``.

Reads the records in ``faithful_toy/``, and writes ``screen.csv`` and ``screen.svg`` beside them.
"""

from pathlib import Path

from lab.analysis.curves import load
from lab.analysis.rendering import layout
from lab.core import files
from lab.studies.faithful_toy import figures
from lab.studies.faithful_toy.screen import RESPONSES, effects, rows_of

FOLDER = Path(__file__).with_suffix("")

if __name__ == "__main__":
    rows = rows_of(load(FOLDER / "screen").runs)
    files.write_csv(FOLDER / "screen.csv", rows, float_format="%.4g")
    for response in RESPONSES:
        print(response, *(f"  {name}: {effect}" for name, effect in effects(rows, response).items()), sep="\n")
    (FOLDER / "screen.svg").write_text(layout.svg(figures.screen(rows), "screen"), encoding="utf-8")
