"""Scores the crash test on committed records: its published recipes, their spreads, and its trends over size.

``make results-readme`` writes what these functions return.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy  # its parts are loaded when they are used

from lab.analysis.curves import load, points
from lab.analysis.sensitivity import judge
from lab.analysis.statistics import Interval, Spread
from lab.analysis.stress.battery import FAILS, NOT_JUDGED, OPEN, PASSES, Battery
from lab.analysis.stress.lines import lines_of
from lab.analysis.stress.measures import Measured, Outcomes, best_lr, curve, measure, pooled_interval, pooled_sd
from lab.analysis.text import markdown_table
from lab.core import shipped
from lab.features.predict.sizes import make_forecast
from lab.features.stress.reference import BOUNDS_SCORES, cell_text, columns_of, judged_values, outcomes_by_recipe
from lab.features.stress.sizes import FAILING, TOLERANCE, values_by_size
from lab.records.store import Records

UNSTABLE = "unstable"
FEWEST = 4  # recipes that have an order
SCORED = ("qk_layernorm", "logit_growth", "mup", "noise_scale", "rms_scaled_lr", "weight_decay", "leaderboard_sizes")


class Agreement(NamedTuple):
    """How well a number orders the recipes by whether they were stable; only recipes that it judges count.

    Attributes:
        rule: the title of a test, or the rule of one bit.
        auc: the probability that it puts an unstable recipe behind a stable one; ties count half; NaN if all are alike.
        p: of no relation (Mann-Whitney, two-sided), exact: over all ways to call as many of the recipes unstable.
        least_p: the smallest p that so many recipes can have.
        stable: how many stable recipes there are.
        unstable: how many unstable ones.
        within: the same probability among pairs alike in the rule of one bit, and how many pairs these are.
    """

    rule: str
    auc: float
    p: float
    least_p: float
    stable: int
    unstable: int
    within: tuple[float, int]


def reference_table(by_recipe: Mapping[str, Outcomes], battery: Battery) -> pd.DataFrame:
    """A row per recipe: its best loss, its best learning rate, and its value, interval and verdict of each test."""
    rows = []
    for recipe, done in by_recipe.items():
        losses = curve(done)
        row = {"recipe": recipe, "best_loss": float(losses.mean(axis=1).min())}
        row["best_lr"] = best_lr(losses)
        for line in lines_of(battery.tests.values(), done, battery):
            row |= columns_of(line)
        rows.append(row)
    return pd.DataFrame(rows)


def reference_spreads(by_recipe: Mapping[str, Outcomes], battery: Battery) -> dict[str, Spread]:
    """Of each test the standard deviation over seeds, pooled over the recipes."""
    measures = {
        name: [found for done in by_recipe.values() if (found := measure(test, done, battery))]
        for name, test in battery.tests.items()
    }
    return dict(spreads(measures))


def bounds_scores(recipe: str) -> bool:
    """Whether a recipe bounds the scores of attention, by its interventions or the clip of its optimizer."""
    tree = shipped.load(shipped.data_folder("conf") / "recipe" / f"{recipe}.yaml")
    chosen = (value for entry in tree.get("defaults", []) if isinstance(entry, dict) for value in entry.values())
    names = {name for value in chosen for name in (value if isinstance(value, list) else [])}
    return bool(names & BOUNDS_SCORES) or "qk_clip" in tree.get("optimizer", {}).get("chain", [])


def agreements(table: pd.DataFrame, published: Mapping[str, str], battery: Battery) -> Iterator[Agreement]:
    """Yield for each test, and for the rule of one bit, how well it orders the recipes whose outcome was published.

    The rule of one bit counts the recipes that some test judges.
    """
    known = table[table["recipe"].isin(published)].set_index("recipe")
    tests = [test for test in battery.on_cards if test.name in known]
    bit = pd.Series([0.0 if bounds_scores(str(recipe)) else 1.0 for recipe in known.index], known.index)
    scores = {
        test.title: known[test.name].map(test.share).where(known[f"{test.name}_verdict"] != NOT_JUDGED)
        for test in tests
    }
    is_judged = pd.DataFrame(scores).notna().any(axis=1)
    scores["attention scores are bounded or not"] = bit.where(is_judged)
    for rule, score in scores.items():
        judged = score.dropna()
        is_unstable = np.array([published[str(recipe)] == UNSTABLE for recipe in judged.index], dtype=bool)
        if is_unstable.any() and not is_unstable.all():
            yield _agreement(rule, judged.to_numpy(), is_unstable, bit[judged.index].to_numpy())


def _agreement(rule: str, scores: np.ndarray, is_unstable: np.ndarray, bits: np.ndarray) -> Agreement:
    behind, ahead = scores[is_unstable], scores[~is_unstable]
    wins = (behind[:, None] > ahead) + 0.5 * (behind[:, None] == ahead)
    is_alike = bits[is_unstable][:, None] == bits[~is_unstable]
    ranks = scipy.stats.rankdata([*behind, *ahead])
    # the first of these ways is the found one
    sums = np.array([sum(chosen) for chosen in itertools.combinations(ranks, len(behind))])
    away = abs(sums - sums.mean())
    return Agreement(
        rule,
        float(wins.mean()),
        p=float((away >= away[0] - 1e-9).mean()),
        least_p=float((away >= away.max() - 1e-9).mean()),
        stable=len(ahead),
        unstable=len(behind),
        within=(float(wins[is_alike].mean()) if is_alike.any() else math.nan, int(is_alike.sum())),
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


def by_width(records: Records, battery: Battery) -> dict[int, dict[str, Outcomes]]:
    """The runs of each recipe by setting, at each width of the records."""
    return {
        int(str(width)): outcomes_by_recipe(records._replace(runs=runs), battery)
        for width, runs in records.runs.groupby("model.width")
    }


def order_over_size(by_size: Mapping[int, Mapping[str, Outcomes]], battery: Battery) -> pd.DataFrame:
    """Whether recipes have the same order at two widths: the rank correlation of their numbers in each test.

    Only recipes that a test judges at both widths count.

    Returns:
        Columns ``test``, ``small`` and ``large`` (widths), ``order`` (an interval, None with fewer than ``FEWEST``
        recipes) and ``recipes``, which were judged at both.
    """
    numbers = {
        width: pd.DataFrame(
            {
                recipe: {
                    line.test.name: line.interval.mean
                    for line in lines_of(battery.on_cards, done, battery)
                    if line.verdict != NOT_JUDGED
                }
                for recipe, done in by_recipe.items()
            }
        )
        for width, by_recipe in sorted(by_size.items())
    }
    rows = []
    for small, large in itertools.combinations(numbers, 2):
        for test in numbers[small].index.intersection(numbers[large].index, sort=False):
            both = pd.concat([numbers[small].loc[test], numbers[large].loc[test]], axis=1).dropna()
            order = rank_correlation(both) if len(both) >= FEWEST else None
            rows.append({"test": test, "small": small, "large": large, "order": order, "recipes": len(both)})
    return pd.DataFrame(rows)


def rank_correlation(both: pd.DataFrame) -> Interval:
    """Spearman's correlation of two columns, with the 95 % interval of Bonett and Wright (2000).

    Its error is ``sqrt((1 + r^2 / 2) / (n - 3))`` in the inverse hyperbolic tangent of the correlation.
    """
    r = float(scipy.stats.spearmanr(*both.to_numpy().T).statistic)
    half = 1.96 * math.sqrt((1 + r**2 / 2) / (len(both) - 3))
    low, high = np.tanh(np.arctanh(np.clip(r, -0.999, 0.999)) + np.array([-half, half]))
    return Interval(r, float(low), float(high), len(both))


def first_looks(by_recipe: Mapping[str, Outcomes], battery: Battery) -> pd.DataFrame:
    """The verdicts of cards of one minute beside those of five: a row for each recipe, test and half of the seeds.

    A card of one minute has half the seeds of one of five, so each half of the seeds of a curve makes one. The spreads
    that they share come from all records.

    Returns:
        Columns ``recipe``, ``test``, ``first`` (verdict of one minute) and ``second`` (of five).
    """
    rows, tests = [], battery.chosen([], 1)
    for recipe, done in by_recipe.items():
        whole = {line.test.name: line.verdict for line in lines_of(tests, done, battery)}
        seeds = sorted(curve(done).columns)
        for half in (seeds[: len(seeds) // 2], seeds[len(seeds) // 2 :]):
            some = {setting: table[table.index.isin(half)] for setting, table in done.items()}
            for line in lines_of(tests, some, battery):
                if line.test.name in whole and {line.verdict, whole[line.test.name]} != {NOT_JUDGED}:
                    verdicts = {"first": line.verdict, "second": whole[line.test.name]}
                    rows.append({"recipe": recipe, "test": line.test.name, **verdicts})
    return pd.DataFrame(rows)


def first_looks_text(table: pd.DataFrame) -> str:
    """How well cards of one minute agree with those of five, in a sentence."""
    ends = {PASSES, FAILS}
    is_same, is_open = table["first"] == table["second"], table["first"] == OPEN
    opposite = sum({first, second} == ends for first, second in zip(table["first"], table["second"], strict=True))
    return (
        f"in {is_same.sum()} of {len(table)} lines both have the same verdict, in {(~is_same & is_open).sum()} "
        f"the first is open where the second is not, and in {opposite} one passes and the other fails"
    )


def order_markdown(table: pd.DataFrame, battery: Battery) -> str:
    """Whether recipes keep their order over size, as a Markdown table: a row per test, a column per pair of widths."""
    rows: dict[str, dict[str, str]] = {}
    for row in table.to_dict("records"):
        test, order = battery.tests[row["test"]].title, row["order"]
        told = f"{order:.2f}" if order else "too few"
        rows.setdefault(test, {})[f"{row['small']} and {row['large']}"] = f"{told} of {row['recipes']}"
    return markdown_table(pd.DataFrame.from_dict(rows, orient="index").fillna("").rename_axis("test").reset_index())


def recipes_markdown(table: pd.DataFrame, published: Mapping[str, str], battery: Battery) -> str:
    """The published recipes as a Markdown table, those that tolerate most first, with what was published of each."""
    tests = [test for test in battery.on_cards if test.name in table]
    heads = ["recipe", "published", *(f"{test.title}, {test.unit}" for test in tests)]
    lines = [f"| {' | '.join(heads)} |", f"|---|---|{'---|' * len(tests)}"]
    order = judged_values(table, "lr_tolerance").sort_values(ascending=False, kind="stable").index
    for row in table.loc[order].to_dict("records"):
        cells = [cell_text(row, test) for test in tests]
        lines.append(f"| `{row['recipe']}` | {published.get(row['recipe'], '')} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def agreement_markdown(found: Iterable[Agreement]) -> str:
    """How well each number orders the recipes, as a Markdown table."""
    lines = ["| rule | stable | unstable | AUC | p | least p possible | AUC of pairs alike in the bit |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in found:
        share, pairs = row.within
        alike = f"{share:.2f} of {pairs}" if pairs else "no pair"
        numbers = f"{row.stable} | {row.unstable} | {row.auc:.2f} | {row.p:.2g} | {row.least_p:.2g}"
        lines.append(f"| {row.rule} | {numbers} | {alike} |")
    return "\n".join(lines) + "\n"


def spreads(by_test: Mapping[str, Sequence[Measured]]) -> Iterator[tuple[str, Spread]]:
    """Yield for each test the standard deviation over seeds, pooled over recipes, of reference measures."""
    for name, measures in by_test.items():
        spread = pooled_sd([measured.seeds.to_numpy(dtype=float) for measured in measures], Spread())
        if spread.freedom:
            yield name, spread


def score_records(results: Path) -> pd.DataFrame:
    """How well lines through the smaller sizes of each committed arm foretell the largest; see ``make_forecast``."""
    rows = []
    for sweep in SCORED:
        runs = judge(points(load(results / sweep).runs))
        for arm, of_arm in runs.groupby("arm", sort=False):
            losses = {
                int(str(size)): of_size.pivot(index="lr", columns="seed", values="capped").dropna(axis=1)
                for size, of_size in of_arm.groupby("size")
            }
            table = values_by_size({size: curve for size, curve in losses.items() if len(curve) > 3})
            for quantity in (TOLERANCE, FAILING):
                forecast = make_forecast(table.assign(value=table[quantity])) if len(table) else None
                if forecast and forecast.inside is not None:
                    held_out = int((forecast.runs["size"] == forecast.runs["size"].max()).sum())
                    numbers = {"error": forecast.error, "unchanged": forecast.unchanged}
                    rows.append(
                        {"sweep": sweep, "arm": arm, "quantity": quantity, **numbers}
                        | {"inside": forecast.inside, "seeds": held_out}
                    )
    return pd.DataFrame(rows)
