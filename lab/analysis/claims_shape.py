"""Claims on shape: what growing in depth, in width or in both does."""

from __future__ import annotations

from functools import partial

import pandas as pd

from lab.analysis.claims import DEPTH, ON, QK, WIDTH, Effects, claim, extrapolated, log10, slope, watch_training
from lab.analysis.evidence import Arm, LackingError, Setting

SAME_SIZE = 1.3

shape = partial(claim, frees=[DEPTH], holds={QK: ON}, sweep="depth_width")
shape_without = partial(claim, frees=[DEPTH], holds={QK: None}, sweep="depth_width")


def _grown(some: Setting, *ways: str) -> list[Arm]:
    """Arms that grow in ``depth``, in ``width`` or in ``both``, from the shape that all of them start with."""
    shapes = {(curve[DEPTH], curve[WIDTH]) for curve in some.curves.values()}
    depth, width = min(shapes)
    width = min(w for d, w in shapes if d == depth)
    choices = {
        "depth": lambda c: c[WIDTH] == width,
        "width": lambda c: c[DEPTH] == depth,
        "both": lambda c: (c[WIDTH] == width) == (c[DEPTH] == depth),
    }
    arms = some.arms(*(choices[way] for way in ways))
    if min(len(arm.sizes) for arm in arms) < 2:
        raise LackingError("no models that grow in depth and others that grow in width", near=False)
    largest = [arm.sizes[-1] for arm in arms]
    if max(largest) > SAME_SIZE * min(largest):
        raise LackingError("models that grow in depth and in width end at unlike sizes")
    return arms


@shape("7", "LR sensitivity rises faster with depth than with width", unit="nats/token per decade")
def depth_raises_sensitivity_faster(some: Setting) -> Effects:
    """Slope of S over log10 size, depth minus width."""
    deep, wide = _grown(some, "depth", "width")
    for arm in (deep, wide):
        watch_training(some, arm)
    return slope(deep.table("total")) - slope(wide.table("total"))


@shape("7", "the instability part rises faster with depth than with width", unit="nats/token per decade")
def depth_raises_instability_faster(some: Setting) -> Effects:
    """Slope of S's part above the best learning rate over log10 size, depth minus width."""
    deep, wide = _grown(some, "depth", "width")
    return slope(deep.table("above")) - slope(wide.table("above"))


@shape("7", "at the largest size depth reaches a lower loss than width")
def depth_is_better_at_the_largest_size(some: Setting) -> Effects:
    """Best loss over the learning rates, width minus depth."""
    deep, wide = _grown(some, "depth", "width")
    return _largest(wide) - _largest(deep)


def _largest(arm: Arm) -> pd.Series:
    return arm.table("best").iloc[:, -1]


@shape_without(
    "E.2", "without qk-layernorm the first learning rate to be lost falls with width", unit="decades per decade"
)
def eta_div_falls_with_width(some: Setting) -> Effects:
    """Minus the slope of log10 eta_div over log10 size; one grid step above the grid where nothing is lost."""
    (wide,) = _grown(some, "width")
    return -slope(wide.table("log_lost"))


@shape_without(
    "E.2", "without qk-layernorm the first learning rate to be lost falls with depth", unit="decades per decade"
)
def eta_div_falls_with_depth(some: Setting) -> Effects:
    """As with width."""
    (deep,) = _grown(some, "depth")
    return -slope(deep.table("log_lost"))


@shape("E.3", "at the largest size growing in both reaches a lower loss than in depth or in width alone")
def both_is_best(some: Setting) -> Effects:
    """Best loss of depth, and of width, minus that of both."""
    deep, wide, both = _grown(some, "depth", "width", "both")
    return pd.concat([_largest(deep) - _largest(both), _largest(wide) - _largest(both)], axis=1)


@shape(
    "E.3",
    "the best loss of growing in both extrapolates with a smaller error than that of either alone",
    unit="decades",
)
def both_extrapolates_best(some: Setting) -> Effects:
    """|told - seen| of log10 of the largest size's best loss, straight in log-log; depth's and width's minus both's."""
    deep, wide, both = (_error(arm) for arm in _grown(some, "depth", "width", "both"))
    return pd.concat([deep - both, wide - both], axis=1)


def _error(arm: Arm) -> pd.Series:
    best = log10(arm.table("best"))
    if len(arm.sizes) < 3:
        raise LackingError("an extrapolation takes three sizes")
    smaller = best.iloc[:, :-1]
    return (extrapolated(smaller, arm.sizes[-1]) - best.iloc[:, -1]).abs()
