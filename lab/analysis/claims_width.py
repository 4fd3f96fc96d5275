"""Claims on what changes with width: parametrizations, and the scale of attention."""

from __future__ import annotations

import math
from functools import partial

from lab.analysis.claims import ON, QK, Effects, border_over_top, claim, drift, slope
from lab.analysis.evidence import LackingError, Setting

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
def mup_holds_the_optimum(some: Setting) -> Effects:
    """Log10 of eta* (vertex of a parabola) minus that of the smallest size, at each larger one."""
    (simple,) = some.arms(SIMPLE)
    return drift(simple)


@mup("8", "with the standard parametrization the best learning rate falls with size", unit="decades per decade")
def standard_optimum_falls(some: Setting) -> Effects:
    """Minus the slope of log10 eta* (vertex of a parabola) over log10 size."""
    (standard,) = some.arms(STANDARD)
    return -slope(standard.table("log_best"))


@mup("8", "muP (simple) does not lower the best loss by 0.01 or more, at any size", side=NO_BETTER)
def mup_does_not_lower_the_loss(some: Setting) -> Effects:
    """Best loss over the learning rates, muP minus standard, at each size."""
    simple, standard = some.arms(SIMPLE, STANDARD)
    return simple.table("best") - standard.table("best")


@mup(
    "8",
    "muP (simple) does not lower LR sensitivity by a tenth or more, at any size",
    side=(0.9, math.inf),
    unit="ratio",
)
def mup_does_not_lower_sensitivity(some: Setting) -> Effects:
    """S with muP over S with the standard parametrization, at each size."""
    simple, standard = some.arms(SIMPLE, STANDARD)
    return simple.table("total") / standard.table("total")


@mup_without(
    "E.4",
    "without qk-layernorm muP (simple) still keeps the best learning rate within half a decade",
    side=HALF_DECADE,
    unit="decades",
)
def mup_holds_the_optimum_without_qk_layernorm(some: Setting) -> Effects:
    """As with qk-layernorm."""
    (simple,) = some.arms(SIMPLE)
    return drift(simple)


@mup_without("E.4", "without qk-layernorm muP (simple) still loses the top LR, at every size", unit="decades")
def mup_needs_qk_layernorm(some: Setting) -> Effects:
    """Where the border of stability lies below the top of the window."""
    (simple,) = some.arms(SIMPLE)
    return -border_over_top(simple)


@mup("E.5", "with full muP and qk-layernorm LR 1 trains, at every size")
def full_mup_trains_at_one(some: Setting) -> Effects:
    """Loss of the bigram model minus the final one at learning rate 1."""
    (full,) = some.arms(FULL)
    if 1.0 not in full.lrs:
        raise LackingError("no runs at learning rate 1")
    return -full.above_bigram(1.0)


@mup("E.5", "at the largest size full muP reaches no loss lower by 0.01 than simple muP", side=NO_BETTER)
def full_mup_is_no_better(some: Setting) -> Effects:
    """Best loss over the learning rates, full minus simple, at the largest size."""
    full, simple = some.arms(FULL, SIMPLE)
    return (full.table("best") - simple.table("best")).iloc[:, -1]


def _gain(some: Setting, place: int) -> Effects:
    """Best loss with 1/sqrt(head width) minus that with 1/head width, at one of the sizes."""
    root, inverse = some.arms(STANDARD, INVERSE)
    if len(root.sizes) < 2:
        raise LackingError("models of one size only")
    return (root.table("best") - inverse.table("best")).iloc[:, place]


@scale("E.6", "attention scaled by 1/head width is better at the smallest size", holds={QK: ON})
def inverse_scale_helps_the_smallest(some: Setting) -> Effects:
    """Best loss with 1/sqrt(head width) minus that with 1/head width."""
    return _gain(some, 0)


@scale("E.6", "attention scaled by 1/head width is worse at the largest size", holds={QK: ON})
def inverse_scale_hurts_the_largest(some: Setting) -> Effects:
    """The same difference the other way round."""
    return -_gain(some, -1)


@scale(
    "E.6",
    "attention scaled by 1/head width still loses the top LR without qk-layernorm",
    holds={QK: None},
    unit="decades",
)
def inverse_scale_needs_qk_layernorm(some: Setting) -> Effects:
    """Where the border of stability lies below the top of the window, at the largest size."""
    (inverse,) = some.arms(INVERSE)
    return -border_over_top(inverse).iloc[:, -1]
