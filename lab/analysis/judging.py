"""Judging: a claim and the folders given become a verdict with its reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.claims import Claim, Effects, decide
from lab.analysis.evidence import Arm, Evidence, LackingError, Setting, extent
from lab.analysis.statistics import FEWEST_SEEDS, Interval, student_t


class Verdict(NamedTuple):
    """How a claim came out; ``effect``, ``low`` and ``high`` are of its weakest part, NaN where there is none."""

    verdict: str
    effect: float
    low: float
    high: float
    seeds: int
    reason: str
    folder: str


def verdict(claim: Claim, folders: Sequence[Evidence]) -> Verdict:
    """Judge a claim on the setting, of all folders, that lends it most runs; the earlier folder among equals."""
    found: list[tuple[int, Setting, Effects]] = []
    lacking: list[LackingError] = []
    for some in (setting for folder in folders for setting in folder.settings(claim.frees)):
        if not some.holds(claim.holds):
            continue
        try:
            effects = claim.effects(some)
            found.append((len(set().union(*(arm.ids for arm in some.used))), some, effects))
        except LackingError as gap:
            lacking.append(gap)
    if found:
        _, some, effects = max(found, key=lambda one: one[0])
        return _on(claim, some, effects)
    near = [str(reason) for reason in lacking if reason.near]
    needed = f"lab sweep {claim.sweep} trains what it takes"
    reason = f"{near[0]}; {needed}" if near else f"no folder has its arms; {needed}"
    return Verdict("not run", math.nan, math.nan, math.nan, 0, reason, "")


def _on(claim: Claim, some: Setting, effects: Effects) -> Verdict:
    table = effects.to_frame() if isinstance(effects, pd.Series) else effects
    table = table.set_axis(range(table.shape[1]), axis=1)
    # rounded, since what is equal but for the arithmetic must not count as a difference
    whole = table.replace([np.inf, -np.inf], math.nan).dropna().round(9)
    came, interval = decide([student_t(whole[part]) for part in whole], claim.side)
    few = interval.n < FEWEST_SEEDS
    if some.caution and not few:
        came = "inconclusive"
    reason = "" if came == "reproduced" else _why(came, claim, some, interval)
    return Verdict(came, *interval[:4], reason, some.evidence.name)


def _why(came: str, claim: Claim, some: Setting, interval: Interval) -> str:
    tried = f"tried: {extent(some.used)}"
    if interval.n < FEWEST_SEEDS:
        return "; ".join([f"{interval.n} whole seeds, an interval takes {FEWEST_SEEDS}", *_gaps(some.used)])
    if some.caution:
        return some.caution
    if came == "contradicted":
        return f"the interval lies wholly on the other side of what is claimed, {_spell(claim)}; {tried}"
    return f"the interval reaches beyond what is claimed, {_spell(claim)}; {tried}"


def _spell(claim: Claim) -> str:
    low, high = claim.side
    if math.isinf(high):
        return f"above {low:g} {claim.unit}".rstrip()
    return f"below {high:g} {claim.unit}" if math.isinf(low) else f"from {low:g} to {high:g} {claim.unit}"


def _gaps(arms: list[Arm]) -> list[str]:
    """What keeps seeds from counting."""
    known = {(outline.curve, outline.seed): outline for arm in arms for outline in arm.known}
    curves, seeds = ({key[part] for key in known} for part in (0, 1))
    sizes = {size for arm in arms for size in arm.sizes}
    wanted = len(curves) * len(seeds) * len(arms[0].lrs)
    missing = wanted - sum(len(outline.runs) for outline in known.values())
    said = [f"partial: {missing} of {wanted} runs missing"] if missing else []
    if any(set(arm.sizes) != sizes for arm in arms):
        said.append("not every arm has every size")
    if not all(outline.alive for outline in known.values()):
        said.append("an arm is nothing but NaN")
    elif not all(outline.learned for outline in known.values()):
        said.append("a curve never fell below the bigram model's loss")
    return said
