"""Claims on width, depth and muParam."""

from __future__ import annotations

import math
from functools import partial

import pandas as pd

from lab.analysis.claims.evidence import ArmTables, ComparisonGroup, MissingRunsError
from lab.analysis.claims.judging import (
    DEPTH,
    ON,
    QK,
    WIDTH,
    Effects,
    border_over_top,
    claim,
    drift,
    extrapolated,
    log10,
    slope,
    watch_training,
)

NAME, BASE = "parametrization.name", "parametrization.base_width"
STANDARD, SIMPLE, FULL, INVERSE = (
    {NAME: name} for name in ("standard", "mup_simple", "mup_full", "inverse_head_width")
)
HALF_DECADE = (-0.5, 0.5)
NO_BETTER = (-0.01, math.inf)

mup = partial(claim, frees=[NAME, BASE], holds={QK: ON}, sweep="mup")
mup_without = partial(claim, frees=[NAME, BASE], holds={QK: None}, sweep="mup")
scale = partial(claim, frees=[NAME], sweep="attention_scale")


@mup(
    "8",
    "with muP (simple) the best learning rate stays within half a decade over sizes",
    side=HALF_DECADE,
    unit="decades",
)
def mup_holds_the_optimum(some: ComparisonGroup) -> Effects:
    """Log10 of eta* (vertex of a parabola) minus that of the smallest size, at each larger one."""
    (simple,) = some.arms(SIMPLE)
    return drift(simple)


@mup("8", "with the standard parametrization the best learning rate falls with size", unit="decades per decade")
def standard_optimum_falls(some: ComparisonGroup) -> Effects:
    """Minus the slope of log10 eta* (vertex of a parabola) over log10 size."""
    (standard,) = some.arms(STANDARD)
    return -slope(standard.table("log_best"))


@mup("8", "muP (simple) does not lower the best loss by 0.01 or more, at any size", side=NO_BETTER)
def mup_does_not_lower_the_loss(some: ComparisonGroup) -> Effects:
    """Best loss over the learning rates, muP minus standard, at each size."""
    simple, standard = some.arms(SIMPLE, STANDARD)
    return simple.table("best") - standard.table("best")


@mup(
    "8",
    "muP (simple) does not lower LR sensitivity by a tenth or more, at any size",
    side=(0.9, math.inf),
    unit="ratio",
)
def mup_does_not_lower_sensitivity(some: ComparisonGroup) -> Effects:
    """S with muP over S with the standard parametrization, at each size."""
    simple, standard = some.arms(SIMPLE, STANDARD)
    return simple.table("total") / standard.table("total")


@mup_without(
    "E.4",
    "without qk-layernorm muP (simple) still keeps the best learning rate within half a decade",
    side=HALF_DECADE,
    unit="decades",
)
def mup_holds_the_optimum_without_qk_layernorm(some: ComparisonGroup) -> Effects:
    """As with qk-layernorm."""
    (simple,) = some.arms(SIMPLE)
    return drift(simple)


@mup_without("E.4", "without qk-layernorm muP (simple) still loses the top LR, at every size", unit="decades")
def mup_needs_qk_layernorm(some: ComparisonGroup) -> Effects:
    """Where the border of stability lies below the top of the window."""
    (simple,) = some.arms(SIMPLE)
    return -border_over_top(simple)


@mup("E.5", "with full muP and qk-layernorm LR 1 trains, at every size")
def full_mup_trains_at_one(some: ComparisonGroup) -> Effects:
    """Loss of the bigram model minus the final one at learning rate 1."""
    (full,) = some.arms(FULL)
    if 1.0 not in full.lrs:
        raise MissingRunsError("no runs at learning rate 1")
    return -full.above_bigram(1.0)


@mup("E.5", "at the largest size full muP reaches no loss lower by 0.01 than simple muP", side=NO_BETTER)
def full_mup_is_no_better(some: ComparisonGroup) -> Effects:
    """Best loss over the learning rates, full minus simple, at the largest size."""
    full, simple = some.arms(FULL, SIMPLE)
    return (full.table("best") - simple.table("best")).iloc[:, -1]


def _gain(some: ComparisonGroup, place: int) -> Effects:
    """Best loss with 1/sqrt(head width) minus that with 1/head width, at one of the sizes."""
    root, inverse = some.arms(STANDARD, INVERSE)
    if len(root.sizes) < 2:
        raise MissingRunsError("models of one size only")
    return (root.table("best") - inverse.table("best")).iloc[:, place]


@scale("E.6", "attention scaled by 1/head width is better at the smallest size", holds={QK: ON})
def inverse_scale_helps_the_smallest(some: ComparisonGroup) -> Effects:
    """Best loss with 1/sqrt(head width) minus that with 1/head width."""
    return _gain(some, 0)


@scale("E.6", "attention scaled by 1/head width is worse at the largest size", holds={QK: ON})
def inverse_scale_hurts_the_largest(some: ComparisonGroup) -> Effects:
    """The same difference the other way round."""
    return -_gain(some, -1)


@scale(
    "E.6",
    "attention scaled by 1/head width still loses the top LR without qk-layernorm",
    holds={QK: None},
    unit="decades",
)
def inverse_scale_needs_qk_layernorm(some: ComparisonGroup) -> Effects:
    """Where the border of stability lies below the top of the window, at the largest size."""
    (inverse,) = some.arms(INVERSE)
    return -border_over_top(inverse).iloc[:, -1]


COMPARABLE_SIZES = 1.3

shape = partial(claim, frees=[DEPTH], holds={QK: ON}, sweep="depth_width")
shape_without = partial(claim, frees=[DEPTH], holds={QK: None}, sweep="depth_width")


def _grown(some: ComparisonGroup, *ways: str) -> list[ArmTables]:
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
        raise MissingRunsError("no models that grow in depth and others that grow in width", near=False)
    largest = [arm.sizes[-1] for arm in arms]
    if max(largest) > COMPARABLE_SIZES * min(largest):
        raise MissingRunsError("models that grow in depth and in width end at unlike sizes")
    return arms


@shape("7", "LR sensitivity rises faster with depth than with width", unit="nats/token per decade")
def depth_raises_sensitivity_faster(some: ComparisonGroup) -> Effects:
    """Slope of S over log10 size, depth minus width."""
    deep, wide = _grown(some, "depth", "width")
    for arm in (deep, wide):
        watch_training(some, arm)
    return slope(deep.table("total")) - slope(wide.table("total"))


@shape("7", "the instability part rises faster with depth than with width", unit="nats/token per decade")
def depth_raises_instability_faster(some: ComparisonGroup) -> Effects:
    """Slope of S's part above the best learning rate over log10 size, depth minus width."""
    deep, wide = _grown(some, "depth", "width")
    return slope(deep.table("above")) - slope(wide.table("above"))


@shape("7", "at the largest size depth reaches a lower loss than width")
def depth_is_better_at_the_largest_size(some: ComparisonGroup) -> Effects:
    """Best loss over the learning rates, width minus depth."""
    deep, wide = _grown(some, "depth", "width")
    return _largest(wide) - _largest(deep)


def _largest(arm: ArmTables) -> pd.Series:
    return arm.table("best").iloc[:, -1]


@shape_without(
    "E.2", "without qk-layernorm the first learning rate to be lost falls with width", unit="decades per decade"
)
def eta_div_falls_with_width(some: ComparisonGroup) -> Effects:
    """Minus the slope of log10 eta_div over log10 size; one grid step above the grid where nothing is lost."""
    (wide,) = _grown(some, "width")
    return -slope(wide.table("log_lost"))


@shape_without(
    "E.2", "without qk-layernorm the first learning rate to be lost falls with depth", unit="decades per decade"
)
def eta_div_falls_with_depth(some: ComparisonGroup) -> Effects:
    """As with width."""
    (deep,) = _grown(some, "depth")
    return -slope(deep.table("log_lost"))


@shape("E.3", "at the largest size growing in both reaches a lower loss than in depth or in width alone")
def both_is_best(some: ComparisonGroup) -> Effects:
    """Best loss of depth, and of width, minus that of both."""
    deep, wide, both = _grown(some, "depth", "width", "both")
    return pd.concat([_largest(deep) - _largest(both), _largest(wide) - _largest(both)], axis=1)


@shape(
    "E.3",
    "the best loss of growing in both extrapolates with a smaller error than that of either alone",
    unit="decades",
)
def both_extrapolates_best(some: ComparisonGroup) -> Effects:
    """|told - seen| of log10 of the largest size's best loss, straight in log-log; depth's and width's minus both's."""
    deep, wide, both = (_error(arm) for arm in _grown(some, "depth", "width", "both"))
    return pd.concat([deep - both, wide - both], axis=1)


def _error(arm: ArmTables) -> pd.Series:
    best = log10(arm.table("best"))
    if len(arm.sizes) < 3:
        raise MissingRunsError("an extrapolation takes three sizes")
    smaller = best.iloc[:, :-1]
    return (extrapolated(smaller, arm.sizes[-1]) - best.iloc[:, -1]).abs()
