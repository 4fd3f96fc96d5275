"""Draw docs/card.svg, the card of Llama's recipe in the README, from the committed records: ``python docs/card.py``."""

from pathlib import Path

from lab.analysis import card
from lab.analysis.rendering import layout

HOME = Path(__file__).parents[1]

drawing = card(HOME / "results" / "stress" / "recipes", "llama").figure()
(HOME / "docs" / "card.svg").write_text(layout.svg(drawing, "card"), encoding="utf-8")
