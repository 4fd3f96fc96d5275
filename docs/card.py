"""Draw docs/card.svg, the card of GLM-130B of the page on crash tests, from the committed records: ``python docs/card.py``."""

from pathlib import Path

from lab.analysis import card
from lab.analysis.rendering import layout

HOME = Path(__file__).parents[1]

drawing = card(HOME / "results" / "stress" / "recipes", "glm130b").figure()
(HOME / "docs" / "card.svg").write_text(layout.svg(drawing, "card"), encoding="utf-8")
