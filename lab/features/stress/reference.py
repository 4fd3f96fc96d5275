"""The published recipes under the crash test: their recorded runs, and a recipe of the user's beside them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lab.analysis.statistics import Interval
from lab.analysis.stress.battery import FAILS, NOT_JUDGED, OPEN, PASSES, WEAK, Battery, StressTest
from lab.analysis.stress.lines import Line, possible_zones
from lab.analysis.stress.measures import Outcomes, outcomes
from lab.analysis.text import listed
from lab.core import shipped
from lab.records.plans import Setting
from lab.records.store import Records

# Numbers of the published recipes, written by ``make results-readme``.
FILE = Path(__file__).with_name("reference.csv")
# A rule of one bit: a recipe is stable if it has one of these, which bound the scores of attention.
BOUNDS_SCORES = frozenset({"qk_layernorm", "qk_rmsnorm", "qk_l2norm", "ngpt", "score_softcap"})
SAID = {PASSES: "pass it", WEAK: "are weak in it", OPEN: "are open", FAILS: "fail it", NOT_JUDGED: "are not judged"}


def read_reference() -> pd.DataFrame:
    """The numbers of the published recipes: of each its best loss and learning rate, then ``columns_of`` each test."""
    return pd.read_csv(FILE)


def outcomes_by_recipe(records: Records, battery: Battery) -> dict[str, Outcomes]:
    """The runs of each recipe by setting, found in the columns that words of settings name.

    Where a setting says nothing of a column, its runs have the value of most runs of the recipe, as those of the curve.
    """
    runs = records.runs[records.runs["status"] != "failed"]
    settings = dict.fromkeys([(), *(place.words for test in battery.tests.values() for place in test.places)])
    pairs = {words: dict(word.split("=") for word in words) for words in settings}
    pairs = {words: of_words for words, of_words in pairs.items() if all(key in runs for key in of_words)}
    keys = sorted({key for of_words in pairs.values() for key in of_words})
    found = dict[str, Outcomes]()
    for recipe, of_recipe in runs.groupby("recipe"):
        values = of_recipe[keys].astype(str)
        usual = dict(values.mode().iloc[0])
        ids = {
            Setting(words, float(str(lr))): list(of_lr["id"])
            for words, of_words in pairs.items()
            for lr, of_lr in of_recipe[(values == pd.Series(usual | of_words)).all(axis=1)].groupby("optimizer.lr")
        }
        found[str(recipe)] = outcomes(records, ids)
    return found


def columns_of(line: Line) -> dict[str, Any]:
    """The value, interval and verdict of a test, each under its column."""
    name, (mean, low, high) = line.test.name, line.interval[:3]
    interval = {name: mean, f"{name}_low": low, f"{name}_high": high}
    return interval | {f"{name}_verdict": line.verdict, f"{name}_bound": line.is_bound, f"{name}_stuck": line.stuck}


def published_outcomes() -> dict[str, str]:
    """What was published of each recipe's stability, ``stable`` or ``unstable``; without those of which nothing was."""
    recipes = {path.stem: shipped.load(path) for path in shipped.data_folder("conf").glob("recipe/*.yaml")}
    outcomes = {name: tree.get("recipe", {}).get("outcome") for name, tree in recipes.items()}
    return {name: outcome for name, outcome in outcomes.items() if outcome}


def judged_values(table: pd.DataFrame, test: str) -> pd.Series[float]:
    """The values of a test in a table of recipes; NaN where it is not judged."""
    return table[test].where(table[f"{test}_verdict"] != NOT_JUDGED)


def published_verdicts(test: str) -> str:
    """How many published recipes a test passes, fails and so on, as a sentence after a space; empty without records."""
    column = f"{test}_verdict"
    if column not in (table := read_reference()):
        return ""
    tally = table[column].value_counts()
    counts = [f"{tally[verdict]} {words}" for verdict, words in SAID.items() if verdict in tally]
    separates_none = len({*tally.index} - {NOT_JUDGED}) < 2
    return f" Of {len(table)} published recipes, {listed(counts)}{', so it separates none of them' * separates_none}."


def cell_text(row: Mapping[Hashable, Any], test: StressTest) -> str:
    """A test of a row of numbers, for readers: ``at least 1.52 ± 0.20 passes``, or ``not judged``.

    For an open one it says between which verdicts, ``0.96 ± 0.12 weak or fails``.
    """
    mean, low, high, verdict = (row[f"{test.name}{part}"] for part in ("", "_low", "_high", "_verdict"))
    if verdict == NOT_JUDGED:
        return NOT_JUDGED
    if verdict == OPEN and not row[f"{test.name}_bound"]:
        verdict = listed(possible_zones(test, Interval(mean, low, high, 0)), "or")
    bound = "at least " if row[f"{test.name}_bound"] else ""
    return f"{bound}{round(mean, 2) + 0.0:.2f} ± {high - mean:.2f} {verdict}"


def beside_published(recipe: str, lines: Sequence[Line]) -> pd.DataFrame:
    """The published recipes with a row for this one among them, those first that stand the first test of the card best.

    Returns:
        Columns ``recipe``, ``published`` and the title of each test; empty if no test has reference records.
    """
    table, tests = read_reference(), [line.test for line in lines]
    known = [test for test in tests if test.name in table]
    if not known:
        return pd.DataFrame()
    own: dict[str, Any] = {"recipe": recipe, "is_own": True}
    for line in lines:
        own |= columns_of(line)
    both = pd.concat([pd.DataFrame([own]), table.assign(is_own=False)])
    both = both.assign(order=judged_values(both, known[0].name).map(known[0].share)).sort_values("order", kind="stable")
    published = published_outcomes()
    rows = [
        {
            "recipe": f"▶ {row['recipe']}" if row["is_own"] else row["recipe"],
            "published": published.get(row["recipe"], ""),
        }
        | {test.title: cell_text(row, test) for test in known}
        for row in both.to_dict("records")
    ]
    return pd.DataFrame(rows)
