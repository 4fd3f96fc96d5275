"""Draw docs/card.svg, the card of Llama's recipe in the README, from the committed records: ``python docs/card.py``."""

from pathlib import Path

from lab.analysis.rendering import layout
from lab.records import store
from lab.studies.stress.battery import read_battery
from lab.studies.stress.card import card_of
from lab.studies.stress.reference import outcomes_by_recipe

HOME = Path(__file__).parents[1]
RECIPE = "llama"

battery = read_battery()
folder = HOME / "results" / "stress" / "recipes"
done = outcomes_by_recipe(store.read(folder), battery)[RECIPE]
card = card_of(RECIPE, f"lab stress recipe={RECIPE}", folder, list(battery.tests.values()), done, battery)
(HOME / "docs" / "card.svg").write_text(layout.svg(card.figure(), "card"), encoding="utf-8")
