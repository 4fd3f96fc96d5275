"""The reference: the arm that is most like the default recipe."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

import pandas as pd

from lab.analysis.sensitivity import Study
from lab.core.shipped import default_recipe

Factors = Mapping[str, Mapping[str, Hashable]]
# The values of config groups that the default recipe does not set.
UNSET: Mapping[str, str] = {"batch.name": "constant", "burst": "none", "response": "none"}


def recipe_of(study: Study) -> Mapping[str, str | float]:
    """The default recipe, with the numbers of the scale of these runs."""
    scales = set(study.records.runs.get("scale.name", pd.Series(dtype=str)).dropna())
    return {**UNSET, **(default_recipe(str(scales.pop())) if len(scales) == 1 else default_recipe())}


def reference_arm(factors: Factors, recipe: Mapping[str, str | float]) -> str:
    """The arm that is most like the default recipe.

    Args:
        factors: the settings in which each arm differs, as ``curves.arm_factors`` gives them.
        recipe: the recipe, as ``default_recipe`` gives it.
    """
    return max(factors, key=lambda arm: len(_usual(factors, recipe)[arm]))  # of equals the first


def _usual(factors: Factors, recipe: Mapping[str, str | float]) -> dict[str, set[str]]:
    """The keys in which each arm has the recipe's value, or the nearest one that was run; by arm."""
    keys = next(iter(factors.values()))
    values = {key: nearest([factors[arm][key] for arm in factors], recipe.get(key)) for key in keys}
    return {arm: {key for key in keys if factors[arm][key] == values[key]} for arm in factors}


def nearest(values: list[Hashable], usual: Hashable) -> Hashable:
    """The value nearest to the usual one; numbers are compared by ratio, and else the first value is taken."""
    if usual in values:
        return usual
    numbers = [value for value in values if isinstance(value, float) and value > 0]
    if not isinstance(usual, float) or usual <= 0 or not numbers:
        return values[0]
    return min(numbers, key=lambda value: abs(math.log(value / usual)))
