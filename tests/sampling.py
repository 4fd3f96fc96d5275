"""Samples of long lists of cases: the tests before a commit take a few of them, those of every push take all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import pytest


def few(cases: Iterable[Any], count: int) -> list[Any]:
    """All cases, of which so many, spread evenly, are quick and the others slow; several values are a pytest.param."""
    every = list(cases)
    quick = {round(place) for place in np.linspace(0, len(every) - 1, count)}
    return [case if n in quick else _slow(case) for n, case in enumerate(every)]


def some(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """All cases, of which these are quick and the others slow."""
    return [case if case in quick else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    if hasattr(case, "marks"):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)
    return pytest.param(case, marks=pytest.mark.slow)
