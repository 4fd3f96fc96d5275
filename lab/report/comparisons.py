"""Which arms to compare: the arm of the default recipe, and pairs of arms that differ in one thing only."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from itertools import combinations

import pandas as pd

from lab.analysis.curves import arm_factors
from lab.analysis.sensitivity import PARTS, Study
from lab.core.shipped import default_recipe

# With more pairs than this, only pairs with the reference arm are singled out.
MOST_PAIRS = 6

Factors = Mapping[str, Mapping[str, Hashable]]
# The values of groups that the default recipe leaves out.
UNSET: Mapping[str, str] = {"batch.name": "constant", "burst": "none", "response": "none"}


def recipe_of(study: Study) -> Mapping[str, str | float]:
    """The default recipe, in the numbers of the scale of these runs."""
    scales = set(study.records.runs.get("scale.name", pd.Series(dtype=str)).dropna())
    return {**UNSET, **(default_recipe(str(scales.pop())) if len(scales) == 1 else default_recipe())}


def reference_arm(factors: Factors, recipe: Mapping[str, str | float]) -> str:
    """The arm that is most like the default recipe.

    Args:
        factors: what sets each arm apart, as ``curves.arm_factors`` gives it.
        recipe: as ``default_recipe`` gives it.
    """
    return max(factors, key=lambda arm: len(_usual(factors, recipe)[arm]))  # of equals the first


def _usual(factors: Factors, recipe: Mapping[str, str | float]) -> dict[str, set[str]]:
    """Of each arm the keys in which it has the recipe's value, or of those that ran the one nearest to it."""
    keys = next(iter(factors.values()))
    values = {key: nearest([factors[arm][key] for arm in factors], recipe.get(key)) for key in keys}
    return {arm: {key for key in keys if factors[arm][key] == values[key]} for arm in factors}


def nearest(values: list[Hashable], usual: Hashable) -> Hashable:
    """The value nearest to the usual one, between numbers by ratio; without a nearest one the first."""
    if usual in values:
        return usual
    numbers = [value for value in values if isinstance(value, float) and value > 0]
    if not isinstance(usual, float) or usual <= 0 or not numbers:
        return values[0]
    return min(numbers, key=lambda value: abs(math.log(value / usual)))


def contrasts(study: Study) -> pd.DataFrame:
    """Rows of ``study.pairs`` whose arms differ in one thing, of which the second arm has the recipe's value.

    Of more than ``MOST_PAIRS`` pairs only those with the reference arm. Arms none of which differ in one thing are all
    paired with the reference arm.
    """
    factors, recipe = arm_factors(study.records.runs), recipe_of(study)
    usual, reference = _usual(factors, recipe), reference_arm(factors, recipe)
    pairs = []
    for one, other in combinations(factors, 2):
        unlike = {key for key in factors[one] if factors[one][key] != factors[other][key]}
        if len(unlike) == 1 and (unlike <= usual[one]) != (unlike <= usual[other]):
            pairs.append((other, one) if unlike <= usual[one] else (one, other))
    if len(pairs) > MOST_PAIRS:
        pairs = [pair for pair in pairs if pair[1] == reference]
    pairs = pairs or [(arm, reference) for arm in factors if arm != reference]
    tables = [oriented(study.pairs, *pair) for pair in pairs]
    return pd.concat(tables, ignore_index=True) if tables else study.pairs.head(0)


def oriented(pairs: pd.DataFrame, first: str, second: str) -> pd.DataFrame:
    """The differences ``first`` minus ``second``, in whichever order ``pairs`` has them."""
    table = pairs[(pairs["first"] == first) & (pairs["second"] == second)]
    if len(table):
        return table
    turned = pairs[(pairs["first"] == second) & (pairs["second"] == first)]
    negated = {part: turned[part].map(lambda interval: -interval) for part in PARTS}
    return turned.assign(first=first, second=second, **negated)
