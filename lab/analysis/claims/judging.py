"""Judging claims: sentences of a paper that can be false, the rule of each, and its verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import count as numbers
from typing import NamedTuple

from lab.analysis.claims.effects import Effects, Qualified
from lab.analysis.claims.evidence import (
    ArmTables,
    Choice,
    ComparisonGroup,
    Config,
    Evidence,
    MissingRunsError,
    decay_times_steps_of,
    extent,
    sizes_of,
    steps_of,
)
from lab.analysis.statistics import FEWEST_SEEDS, Interval
from lab.analysis.text import count
from lab.core.registry import Registry

FIGURES_OF_THE_PAPER = (*map(str, range(1, 14)), "C.1", *(f"E.{n}" for n in range(1, 16)))
NOT_TESTABLE = "not testable here"
VERDICTS = ("reproduced", "contradicted", "inconclusive", NOT_TESTABLE, "not run")
ON = "on"
QK, Z_LOSS = "intervention.qk_layernorm", "intervention.z_loss"
FIXED_GAINS = "intervention.fixed_gains"
WIDTH, DEPTH, DECAY, STEPS = "model.width", "model.depth", "optimizer.weight_decay", "steps"
BATCH, OPTIMIZER = "batch_size", "optimizer.name"
# The papers whose claims are judged, in the order of the scoreboard; claims are of the first unless they say otherwise.
SOURCES = (
    *("Wortsman 2023", "McCandlish 2018", "Shallue 2018", "GPT-3", "MT-NLG"),
    *("GLM-130B", "OPT-175B", "PaLM-540B", "WeLM-10B", "Adam instability", "Bai 2025"),
)
# What the runs of a claim are unless it says otherwise.
PLAIN: Config = {
    FIXED_GAINS: None,
    "intervention.kappa_transplant": None,
    "intervention.pointwise_attention": None,
    "intervention.qk_layernorm_model": None,
    "parametrization.name": "standard",
    "optimizer.name": "adamw",
}
# How the unit of an effect begins that is the log10 of a number.
LOG10 = "log10 "
# What sentences claim of an effect: the open range in which it lies.
ABOVE_ZERO, TENFOLD, HALF_DECADE = (0.0, math.inf), (1.0, math.inf), (-0.5, 0.5)
# The unit of what a loss has to spare before a limit: zero is the limit then, not the lack of an effect.
TO_SPARE = "nats/token to spare"
# By unit, the size below which a difference is none; figures 1 and 3 call losses that are this near the same.
NEGLIGIBLE = {"nats/token": 0.02, "nats/token per decade": 0.02}

ChooseArms = Callable[[ComparisonGroup], list[ArmTables]]
EffectsOfArms = Callable[..., Effects]


class Presumption(NamedTuple):
    """The trouble that a setting must show before a claim about its cure can be tested there.

    Attributes:
        effects: of the arms of the claim, one effect per seed (row) for each part (column); every interval must lie
            above zero.
        unmet: what is said where one does not; ``{}`` in it stands for that interval.
    """

    effects: EffectsOfArms
    unmet: str


class Claim(NamedTuple):
    """A sentence of a paper, and how it is judged.

    Attributes:
        figure: the figure of the paper that shows it; of other sources the section, figure or equation.
        arms: picks the arms that it compares from runs alike in all but ``frees``.
        effects: of those arms, one effect per seed (row) for each part (column) of the claim.
        holds: config that its runs must have.
        side: the open range in which the sentence claims each effect to lie; ends are in ``unit``.
        sweep: the sweep that trains its runs.
        shown_in: the figure of a report that shows it.
        order: its position among all claims as they are filed.
        cause: what the sentence says has an effect: config keys, ``step`` or ``where`` of a probe. Of records alike
            in all but these, no claim is reproduced.
        restates: the name of the claim of the paper that it says anew without constants that no small model meets;
            empty for the paper's own.
        source: the paper, one of ``SOURCES``.
        presumes: without which the claim is not testable here, whatever its own effects are; None without one.
    """

    figure: str
    sentence: str
    arms: ChooseArms
    effects: EffectsOfArms
    frees: tuple[str, ...]
    holds: Config
    side: tuple[float, float]
    unit: str
    sweep: str
    shown_in: str
    order: int
    cause: tuple[str, ...]
    restates: str
    source: str
    presumes: Presumption | None


CLAIMS: Registry[Claim] = Registry("claim", "claims")
_orders = numbers()


def claim(
    figure: str,
    sentence: str,
    *,
    arms: Sequence[Choice] | ChooseArms = ({},),
    frees: Sequence[str] = (),
    cause: Sequence[str] = (),
    holds: Config | None = None,
    side: tuple[float, float] = ABOVE_ZERO,
    unit: str = "nats/token",
    sweep: str,
    shown_in: str = "learning_rate_sensitivity",
    restates: str = "",
    source: str = SOURCES[0],
    presumes: Presumption | None = None,
) -> Callable[[EffectsOfArms], EffectsOfArms]:
    """Function decorator: file a claim under the name of the function that computes its effects from its arms.

    Args:
        arms: a config or a condition for each arm, or a function that picks the arms where they depend on which values
            of a key there are; one arm of everything unless given.
        frees: keys in which the runs compared may differ, and those below them; width is always free.
        cause: as in ``Claim``; what is freed unless given, else width.

    The other arguments are the attributes of ``Claim``.
    """

    def file(effects: EffectsOfArms) -> EffectsOfArms:
        free = (WIDTH, *frees)
        config = {key: value for key, value in PLAIN.items() if key not in free} | dict(holds or {})
        causes = tuple(cause or frees or (WIDTH,))
        choose = arms if callable(arms) else lambda group: group.arms(*arms)
        order = next(_orders)
        CLAIMS.register(effects.__name__)(
            Claim(
                figure,
                sentence,
                choose,
                effects,
                free,
                config,
                side,
                unit,
                sweep,
                shown_in,
                order,
                causes,
                restates,
                source,
                presumes,
            )
        )
        return effects

    return file


def decide(intervals: Sequence[Interval], side: tuple[float, float], negligible: float = 0.0) -> tuple[str, Interval]:
    """The one rule: a claim is reproduced where every interval lies wholly inside ``side``, contradicted where one
    lies wholly outside, else inconclusive; below three seeds it is inconclusive.

    A claim of an effect above zero is contradicted too where an interval reaches down to zero and stays below
    ``negligible``: then there is no effect that counts.

    Returns:
        The verdict, and the interval that speaks loudest against the claim.
    """
    low, high = side
    few = [interval for interval in intervals if interval.n < FEWEST_SEEDS]
    if few:
        return "inconclusive", min(few, key=lambda interval: interval.n)
    outside = max(intervals, key=lambda one: max(low - one.high, one.low - high))
    if outside.high < low or outside.low > high:
        return "contradicted", outside
    none = [one for one in intervals if side == ABOVE_ZERO and one.low <= 0 and one.high < negligible]
    if none:
        return "contradicted", min(none, key=lambda one: one.high)
    weakest = max(intervals, key=lambda one: max(low - one.low, one.high - high))
    return ("reproduced" if low < weakest.low and weakest.high < high else "inconclusive"), weakest


class Verdict(NamedTuple):
    """The verdict on a claim.

    Attributes:
        effect: of its weakest part, as are ``low`` and ``high``; NaN where there is none.
        sweep: the one that was judged, or that would train its runs.
        parameters: of the models judged, rising.
        steps: numbers of training steps of the runs judged, rising.
        decay_times_steps: weight decay times steps of the runs judged, rising.
    """

    verdict: str
    effect: float
    low: float
    high: float
    seeds: int
    reason: str
    folder: str
    sweep: str
    parameters: Sequence[int] = ()
    steps: Sequence[int] = ()
    decay_times_steps: Sequence[float] = ()


def judge_claim(claim: Claim, folders: Sequence[Evidence]) -> Verdict:
    """Judge a claim on a group of curves from its own sweep, or from another folder where that has none.

    Of several groups the one with the most runs counts; of equals the one in the earlier folder.
    """
    candidates: list[list[ArmTables]] = []
    missing: list[MissingRunsError] = []
    for group in (group for folder in folders for group in folder.groups(claim.frees) if group.holds(claim.holds)):
        try:
            candidates.append(claim.arms(group))
        except MissingRunsError as error:
            missing.append(error)
    for arms in sorted(candidates, key=lambda arms: _weight(claim, arms), reverse=True):
        try:
            effects = _effects(claim, arms)
        except MissingRunsError as error:
            missing.append(error)
        else:
            return _verdict(claim, arms, effects)
    gap = next((str(error) for error in missing if error.arms_exist), "no folder has its arms")
    reason = f"{gap}; lab sweep {claim.sweep} trains what it takes"
    return Verdict("not run", math.nan, math.nan, math.nan, 0, reason, "", claim.sweep)


def _weight(claim: Claim, arms: list[ArmTables]) -> tuple[bool, int]:
    """Whether the arms come from the claim's own sweep, then how many runs they have."""
    return claim.sweep in arms[0].evidence.sweeps, len(set().union(*(arm.ids for arm in arms)))


def _effects(claim: Claim, arms: list[ArmTables]) -> Qualified:
    effects = _qualified(claim.effects(*arms))
    return effects._replace(presumed=_qualified(claim.presumes.effects(*arms))) if claim.presumes else effects


def _qualified(effects: Effects) -> Qualified:
    return effects if isinstance(effects, Qualified) else Qualified(effects)


def _verdict(claim: Claim, arms: list[ArmTables], effects: Qualified) -> Verdict:
    verdict, interval = _decide(claim, effects)
    reason = ""
    if interval.n < FEWEST_SEEDS:
        reason = "; ".join([f"{interval.n} whole seeds, an interval takes {FEWEST_SEEDS}", *_gaps(arms)])
    elif unmet := _unmet(claim, effects, arms):
        verdict, reason = NOT_TESTABLE, unmet
    elif caution := _undertrained(claim, arms, verdict):
        verdict, reason = "inconclusive", caution
    elif verdict == "reproduced" and (weak := [one for one in effects.control_intervals() if not one.low > 0]):
        verdict, reason = "inconclusive", _vacuous(claim, min(weak, key=lambda one: one.low), arms)
    elif verdict != "reproduced":
        reason = f"the interval {_relation(claim, verdict, interval)}; tried: {extent(arms)}"
    reason = "; ".join(filter(None, [reason, effects.caution]))
    folder = arms[0].evidence
    sweep = claim.sweep if claim.sweep in folder.sweeps else folder.sweeps[-1]
    tried = sizes_of(arms), steps_of(arms), decay_times_steps_of(arms)
    return Verdict(verdict, *interval[:4], reason, folder.name, sweep, *tried)


def _decide(claim: Claim, effects: Qualified) -> tuple[str, Interval]:
    return decide(effects.intervals(), claim.side, NEGLIGIBLE.get(claim.unit, 0.0))


def _relation(claim: Claim, verdict: str, interval: Interval) -> str:
    """How an interval lies to what is claimed."""
    low, high = claim.side
    if verdict == "inconclusive":
        return f"reaches beyond what is claimed, {_range(claim)}"
    if interval.high < low or interval.low > high:
        return f"lies wholly on the other side of what is claimed, {_range(claim)}"
    return f"reaches down to 0 and stays below {NEGLIGIBLE[claim.unit]:g} {claim.unit}, which counts as none"


def _unmet(claim: Claim, effects: Qualified, arms: list[ArmTables]) -> str:
    """What the claim presumes and the setting does not show; empty where it shows all."""
    weak = [one for one in effects.presumed_intervals() if not one.low > 0]
    if not claim.presumes or not weak:
        return ""
    return f"{claim.presumes.unmet.format(_spell(min(weak, key=lambda one: one.low)))}; tried: {extent(arms)}"


def _undertrained(claim: Claim, arms: list[ArmTables], verdict: str) -> str:
    """A caution where S decides a claim and its instability part alone does not, or decides it otherwise."""
    if verdict == "inconclusive" or not any(arm.reads_sensitivity for arm in arms):
        return ""
    effects = _effects(claim, [arm.without_undertraining() for arm in arms])
    stability, interval = _decide(claim, effects)
    if stability == verdict:
        return ""
    return (
        f"undertrained: {verdict} by S, but {stability} by its instability part, {_spell(interval)}; "
        f"tried: {extent(arms)}"
    )


def _vacuous(claim: Claim, control: Interval, arms: list[ArmTables]) -> str:
    return (
        f"the control shows no effect of {' and '.join(claim.cause)}: {_spell(control)}, which must lie above 0; "
        f"tried: {extent(arms)}"
    )


def _spell(interval: Interval) -> str:
    if interval.n < FEWEST_SEEDS:
        return interval.bare
    return f"{interval.mean:.3g} [{interval.low:.3g}, {interval.high:.3g}]"


def amount(value: float, unit: str) -> str:
    """An effect without its unit; the number itself, to three digits, where the unit is the log10 of one."""
    return count(10**value) if unit.startswith(LOG10) else f"{value:.3g}"


def _range(claim: Claim) -> str:
    low, high = (amount(end, claim.unit) for end in claim.side)
    unit = claim.unit.removeprefix(LOG10)
    if math.isinf(claim.side[1]):
        return f"above {low} {unit}".rstrip()
    return f"below {high} {unit}" if math.isinf(claim.side[0]) else f"from {low} to {high} {unit}"


def _gaps(arms: list[ArmTables]) -> list[str]:
    """What keeps seeds from counting."""
    summaries = {(summary.curve, summary.seed): summary for arm in arms for summary in arm.summaries}
    curves, seeds = ({key[part] for key in summaries} for part in (0, 1))
    sizes = {size for arm in arms for size in arm.sizes}
    expected = len(curves) * len(seeds) * len(arms[0].lrs)
    missing = expected - sum(len(summary.runs) for summary in summaries.values())
    gaps = [f"partial: {missing} of {expected} runs missing"] if missing else []
    if any(set(arm.sizes) != sizes for arm in arms):
        gaps.append("not every arm has every size")
    if not all(summary.alive for summary in summaries.values()):
        gaps.append("an arm is nothing but NaN")
    elif not all(summary.learned for summary in summaries.values()):
        gaps.append("a curve never fell below the bigram model's loss")
    return gaps
