"""The published recipes under the crash test, and how well its numbers agree with what was published of them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy  # its parts are loaded when they are used

from lab.core import shipped
from lab.records.store import Records
from lab.studies.stress.battery import Battery, Setting, Spread
from lab.studies.stress.lines import Line, lines_of
from lab.studies.stress.measures import (
    Outcomes,
    best_lr,
    curve,
    measure,
    outcomes,
    pooled_interval,
    spreads,
)

# Numbers of the published recipes, which ``reference_table`` makes of the committed records.
FILE = Path(__file__).with_name("reference.csv")
# A rule of one bit: a recipe is stable if it has one of these, which bound the scores of attention.
BOUNDS_SCORES = frozenset({"qk_layernorm", "qk_rmsnorm", "qk_l2norm", "ngpt", "score_softcap"})
UNSTABLE = "unstable"


class Agreement(NamedTuple):
    """How well a number orders the recipes by whether they were stable.

    Attributes:
        rule: the title of a test, or the rule of one bit.
        auc: the probability that it puts an unstable recipe behind a stable one; ties count half.
        p: of no relation (Mann-Whitney, two-sided).
        stable: how many stable recipes there are.
        unstable: how many unstable ones.
    """

    rule: str
    auc: float
    p: float
    stable: int
    unstable: int


def read_reference() -> pd.DataFrame:
    """The numbers of the published recipes that come with the lab; see ``reference_table``."""
    return pd.read_csv(FILE)


def outcomes_by_recipe(records: Records, battery: Battery) -> dict[str, Outcomes]:
    """The runs of each recipe by setting, found in the columns that words of settings name.

    Where a setting says nothing of a column, its runs have the value of most runs of the recipe, as those of the curve.
    """
    runs = records.runs[records.runs["status"] != "failed"]
    settings = {place.words for test in battery.tests.values() for place in test.places} | {()}
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


def reference_table(by_recipe: Mapping[str, Outcomes], battery: Battery) -> pd.DataFrame:
    """A row per recipe: its best loss, its best learning rate, and its value, interval and verdict of each test."""
    rows = []
    for recipe, done in by_recipe.items():
        losses = curve(done)
        row = {"recipe": recipe, "best_loss": float(losses.mean(axis=1).min())}
        row["best_lr"] = best_lr(losses)
        for line in lines_of(battery.tests.values(), done, battery):
            row |= _columns(line)
        rows.append(row)
    return pd.DataFrame(rows)


def _columns(line: Line) -> dict[str, Any]:
    """The value, interval and verdict of a test, each under its column."""
    name, (mean, low, high) = line.test.name, line.interval[:3]
    interval = {name: mean, f"{name}_low": low, f"{name}_high": high}
    return interval | {f"{name}_verdict": line.verdict, f"{name}_bound": line.is_bound, f"{name}_stuck": line.stuck}


def reference_spreads(by_recipe: Mapping[str, Outcomes], battery: Battery) -> dict[str, Spread]:
    """Of each test the standard deviation over seeds, pooled over the recipes."""
    measures = {
        name: [found for done in by_recipe.values() if (found := measure(test, done, battery))]
        for name, test in battery.tests.items()
    }
    return dict(spreads(measures))


def published_outcomes() -> dict[str, str]:
    """What was published of each recipe's stability, ``stable`` or ``unstable``; without those of which nothing was."""
    recipes = {path.stem: shipped.load(path) for path in shipped.data_folder("conf").glob("recipe/*.yaml")}
    told = {name: tree.get("recipe", {}).get("outcome") for name, tree in recipes.items()}
    return {name: outcome for name, outcome in told.items() if outcome}


def bounds_scores(recipe: str) -> bool:
    """Whether a recipe bounds the scores of attention, by its interventions or the clip of its optimizer."""
    tree = shipped.load(shipped.data_folder("conf") / "recipe" / f"{recipe}.yaml")
    chosen = (value for entry in tree.get("defaults", []) if isinstance(entry, dict) for value in entry.values())
    names = {name for value in chosen for name in (value if isinstance(value, list) else [])}
    return bool(names & BOUNDS_SCORES) or "qk_clip" in tree.get("optimizer", {}).get("chain", [])


def agreements(table: pd.DataFrame, published: Mapping[str, str], battery: Battery) -> Iterator[Agreement]:
    """Yield for each test, and for the rule of one bit, how well it orders the recipes whose outcome was published."""
    known = table[table["recipe"].isin(published)].set_index("recipe")
    is_unstable = known.index.map(published) == UNSTABLE
    scores = {test.title: known[name].map(test.share) for name, test in battery.tests.items() if name in known}
    scores["attention scores are bounded or not"] = pd.Series(
        [0.0 if bounds_scores(str(recipe)) else 1.0 for recipe in known.index], known.index
    )
    for rule, score in scores.items():
        behind, ahead = score[is_unstable].dropna(), score[~is_unstable].dropna()
        test = scipy.stats.mannwhitneyu(behind, ahead)
        yield Agreement(
            rule, float(test.statistic) / len(behind) / len(ahead), float(test.pvalue), len(ahead), len(behind)
        )


def coverage(by_recipe: Mapping[str, Outcomes], battery: Battery, seeds: int, draws: int = 2000) -> dict[str, float]:
    """How often the pooled 95 % interval of so many seeds holds the mean of its recipe, by test: a simulation.

    Each draw takes a recipe, and seeds with its residuals, which are scaled up since the mean was fitted to them. The
    spread is that of the other recipes, so the recipes need not have one spread.
    """
    random, covered = np.random.default_rng(0), dict[str, float]()
    for name, test in battery.tests.items():
        found = {recipe: measure(test, done, battery) for recipe, done in by_recipe.items()}
        known = {recipe: measured for recipe, measured in found.items() if measured and len(measured.seeds) > 1}
        if len(known) < 2:
            continue
        of_others = {
            recipe: dict(spreads({name: [known[other] for other in known if other != recipe]}))[name]
            for recipe in known
        }
        hits = 0
        for recipe in random.choice(list(known), draws):
            own = known[recipe].seeds.to_numpy()
            residuals = (own - own.mean()) * math.sqrt(len(own) / (len(own) - 1))
            interval = pooled_interval(random.choice(residuals, seeds).tolist(), of_others[recipe])
            hits += interval.low <= 0 <= interval.high
        covered[name] = hits / draws
    return covered


def recipes_markdown(table: pd.DataFrame, published: Mapping[str, str], battery: Battery) -> str:
    """The published recipes as a Markdown table, those that tolerate most first, with what was published of each."""
    tests = [test for test in battery.tests.values() if test.name in table]
    heads = ["recipe", "published", *(f"{test.title}, {test.unit}" for test in tests)]
    lines = [f"| {' | '.join(heads)} |", f"|---|---|{'---|' * len(tests)}"]
    for row in table.sort_values("lr_tolerance", ascending=False).to_dict("records"):
        cells = [_cell(row, test.name) for test in tests]
        lines.append(f"| `{row['recipe']}` | {published.get(row['recipe'], '')} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(row: Mapping[Hashable, Any], test: str) -> str:
    half = row[f"{test}_high"] - row[test]
    bound = "at least " if row[f"{test}_bound"] else ""
    return f"{bound}{round(row[test], 2) + 0.0:.2f} ± {half:.2f} {row[f'{test}_verdict']}"


def agreement_markdown(found: Iterable[Agreement]) -> str:
    """How well each number orders the recipes, as a Markdown table."""
    lines = ["| rule | AUC | p |", "|---|---|---|"]
    lines += [f"| {agreement.rule} | {agreement.auc:.2f} | {agreement.p:.2g} |" for agreement in found]
    return "\n".join(lines) + "\n"


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
        own |= _columns(line)
    both = pd.concat([pd.DataFrame([own]), table.assign(is_own=False)])
    both = both.iloc[both[known[0].name].map(known[0].share).argsort(kind="stable")]
    published = published_outcomes()
    rows = [
        {
            "recipe": f"▶ {row['recipe']}" if row["is_own"] else row["recipe"],
            "published": published.get(row["recipe"], ""),
        }
        | {test.title: _cell(row, test.name) for test in known}
        for row in both.to_dict("records")
    ]
    return pd.DataFrame(rows)
