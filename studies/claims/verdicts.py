"""Judging claims: sentences of a paper that can be false, the rule of each, and its verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from lab.analysis.rendering import html
from lab.analysis.statistics import FEWEST_SEEDS
from lab.analysis.text import count
from lab.core import files, shipped
from studies.claims.decision import (
    ABOVE_ZERO,
    DECIDED,
    INCONCLUSIVE,
    NOT_RUN,
    NOT_TESTABLE,
    Decision,
    alpha_of,
    decide,
    next_reading,
)
from studies.claims.effects import EffectsOfArms, Qualified, qualified
from studies.claims.evidence import (
    ArmTables,
    ComparisonGroup,
    Config,
    Evidence,
    MissingRunsError,
    config_digest,
    decay_times_steps_of,
    extent,
    sizes_of,
    steps_of,
)

FIGURES_OF_THE_PAPER = (*map(str, range(1, 14)), "C.1", *(f"E.{n}" for n in range(1, 16)))
ON = "on"
QK, Z_LOSS = "intervention.qk_layernorm", "intervention.z_loss"
FIXED_GAINS = "intervention.fixed_gains"
WIDTH, DEPTH, DECAY, STEPS = "model.width", "model.depth", "optimizer.weight_decay", "steps"
BATCH, OPTIMIZER = "batch_size", "optimizer.name"
# The papers whose claims are judged, in the order of the scoreboard; claims are of the first unless they say otherwise.
SOURCES = (
    *("Wortsman 2023", "McCandlish 2018", "Shallue 2018", "GPT-3", "MT-NLG"),
    *("GLM-130B", "OPT-175B", "PaLM-540B", "WeLM-10B", "Adam instability", "Bai 2025"),
    *("Lee 2024", "Fishman 2024", "Su 2025"),
    *("Switch 2021", "ST-MoE 2022", "Wang 2024", "KempnerForge"),
)
# The config that the runs of a claim have unless the claim says otherwise.
PLAIN: Config = {
    FIXED_GAINS: None,
    "intervention.kappa_transplant": None,
    "intervention.pointwise_attention": None,
    "intervention.qk_layernorm_model": None,
    "parametrization.name": "standard",
    "optimizer.name": "adamw",
}
# Beginning of the unit of an effect that is the log10 of a number.
LOG10 = "log10 "
# By unit, the size below which an effect does not count. Figures 1 and 3 of the paper call losses this near the same;
# half a spike is about a quarter of what a run without a remedy had in pilots of `own_spike_remedies`.
MARGINS = {"nats/token": 0.02, "nats/token per decade": 0.02, "spikes in 1,000 updates": 0.5}
# Beginnings of reasons that withhold a verdict which the effects alone would give.
UNDERTRAINED, CONTROLLED = "undertrained: ", "the control shows no effect of "

# Kinds of claims.
CLAIM, CONSTANT, QUESTION = KINDS = ("claim", "constant", "question")

ChooseArms = Callable[[ComparisonGroup], list[ArmTables]]


class Presumption(NamedTuple):
    """The trouble that a setting must show before a claim about its cure can be tested there.

    Attributes:
        effects: makes from the arms of the claim one effect per seed (row) for each part (column); every interval must
            lie above zero.
        unmet: the reason given if one does not; ``{}`` in it stands for that interval.
    """

    effects: EffectsOfArms
    unmet: str


class Claim(NamedTuple):
    """A sentence of a paper, and how it is judged.

    Attributes:
        name: its name, a key of ``CLAIMS``.
        about: its subject, in words.
        figure: the figure of the paper that shows it; for other sources the section, figure or equation.
        sweep: the sweep that trains its runs.
        arms: picks the arms that it compares from runs that agree in everything except ``frees``.
        effects: makes from these arms one effect per seed (row) for each part (column) of the claim.
        order: its position among all claims.
        frees: keys in which the compared runs may differ, with all keys below them; the width is always one.
        cause: what causes the effect by the sentence: config keys, ``step`` or ``where`` of a probe. If records do not
            depend on these, the claim must not be reproduced.
        holds: config values that its runs must have.
        side: the open range in which the sentence claims each effect to lie, in ``unit``.
        shown_in: the figure of a report that shows it.
        restates: the name of the claim that it restates without constants that no small model can reach; empty for a
            claim in the paper's own terms.
        ours: whether its bound, or the comparison, is the lab's and not the paper's, though it restates no other claim.
        source: the paper, one of ``SOURCES``.
        presumes: the trouble without which the claim is not testable here, whatever its own effects are; None if there
            is none.
        untestable: the reason why runs of its sweep cannot test it; empty if they can.
        affirms: sweeps whose question this claim answers with yes if it is reproduced.
        denies: sweeps whose question it answers with no if it is reproduced.
        kind: ``claim``; ``constant``, if its sentence has a number or a size of large models, so that failing at a
            small size is no evidence against it; or ``question``, if the source asks it and does not claim it.
    """

    name: str
    about: str
    figure: str
    sentence: str
    sweep: str
    arms: ChooseArms
    effects: EffectsOfArms
    order: int
    frees: tuple[str, ...] = (WIDTH,)
    cause: tuple[str, ...] = (WIDTH,)
    holds: Config = PLAIN
    side: tuple[float, float] = ABOVE_ZERO
    unit: str = "nats/token"
    shown_in: str = "learning_rate_sensitivity"
    restates: str = ""
    ours: bool = False
    source: str = SOURCES[0]
    presumes: Presumption | None = None
    untestable: str = ""
    affirms: tuple[str, ...] = ()
    denies: tuple[str, ...] = ()
    kind: str = CLAIM


class Verdict(NamedTuple):
    """The verdict on a claim.

    Attributes:
        effect: the effect in the part with the strongest evidence against the claim, and ``low`` and ``high`` its
            interval; NaN if no part has one.
        sweep: the sweep that was judged, or that would train the runs.
        parameters: parameters of the models judged, in rising order.
        steps: numbers of training steps of the runs judged, in rising order.
        decay_times_steps: weight decay times steps of the runs judged, in rising order.
        p: see ``Decision``; NaN if nothing was tested.
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
    p: float = math.nan


@cache
def committed() -> Mapping[str, Mapping[str, Any]]:
    """The entry of each claim in ``results/verdicts.json``, by its name: the fields of ``Verdict``, and more."""
    entries = files.read_json(shipped.data_folder("results") / "verdicts.json", list)
    return {entry["name"]: entry for entry in entries}


def verdict_of(entry: Mapping[str, Any]) -> Verdict:
    """The verdict in an entry of ``committed``."""
    fields: dict[str, Any] = {field: math.nan if entry[field] is None else entry[field] for field in Verdict._fields}
    return Verdict(**fields)


def judge_claim(claim: Claim, folders: Sequence[Evidence]) -> Verdict:
    """Judge a claim on the runs that ``effects_of`` finds.

    On runs of its own sweep it is the last of its ``readings``: each that came before it and left the claim undecided
    takes part of alpha. Decided ones do not count, since only reading on until an interval decides costs alpha.
    """
    try:
        arms, effects = effects_of(claim, folders)
    except MissingRunsError as error:
        reason = f"{error}; lab sweep {claim.sweep} trains what it takes"
        return Verdict(NOT_RUN, math.nan, math.nan, math.nan, 0, reason, "", claim.sweep)
    evidence = arms[0].evidence
    earlier = evidence.readings.get(claim.name, ())[:-1] if claim.sweep in evidence.sweeps else ()
    return _verdict(claim, arms, effects, next_reading(earlier))


def effects_of(claim: Claim, folders: Sequence[Evidence]) -> tuple[list[ArmTables], Qualified]:
    """The arms of a claim and its effects, on a group of curves from its own sweep, or else from another.

    Of several groups the one with the most runs counts; of equal ones that in the earlier folder.

    Raises:
        MissingRunsError: no folder has the runs that it takes.
    """
    candidates: list[list[ArmTables]] = []
    missing: list[MissingRunsError] = []
    for group in (group for folder in folders for group in folder.groups(claim.frees) if group.holds(claim.holds)):
        try:
            candidates.append(claim.arms(group))
        except MissingRunsError as error:
            missing.append(error)

    def weight(arms: list[ArmTables]) -> tuple[bool, int]:
        return claim.sweep in arms[0].evidence.sweeps, len(set().union(*(arm.ids for arm in arms)))

    for arms in sorted(candidates, key=weight, reverse=True):
        try:
            return arms, _effects_of_arms(claim, arms)
        except MissingRunsError as error:
            missing.append(error)
    raise MissingRunsError(next((str(error) for error in missing if error.arms_exist), "no folder has its arms"))


def _effects_of_arms(claim: Claim, arms: list[ArmTables], table: str = "effect") -> Qualified:
    """Effects per seed, including earlier seeds of the same config."""
    effects, earlier = qualified(claim.effects(*arms)), arms[0].evidence.earlier_seeds
    if claim.presumes:
        effects = effects._replace(presumed=qualified(claim.presumes.effects(*arms)))
    alike = earlier.get((claim.name, config_digest(arms))) if earlier else None
    return effects if alike is None else effects.with_earlier_seeds(alike, table)


def instability_effects(claim: Claim, arms: list[ArmTables]) -> Qualified:
    """Effects per seed, with the instability part of each S in place of S."""
    return _effects_of_arms(claim, [arm.without_undertraining() for arm in arms], "instability part")


def _verdict(claim: Claim, arms: list[ArmTables], effects: Qualified, reading: int) -> Verdict:
    decision = _decide(claim, effects, reading)
    verdict, shown, p, inside, against = decision
    unmet, uncontrolled = effects.weak_presumptions(), effects.weak_controls()
    weak = min(unmet or uncontrolled, key=lambda interval: interval.low, default=shown)
    stability, why, part = decision, "", ""
    if shown.n < FEWEST_SEEDS:
        why = "few seeds"
    elif claim.untestable or unmet:
        verdict, p, why = NOT_TESTABLE, math.nan, "untestable" if claim.untestable else "unmet"
    else:
        if verdict != INCONCLUSIVE and any(arm.reads_sensitivity for arm in arms):
            stability = _decide(claim, instability_effects(claim, arms), reading)
        if stability.verdict != verdict:
            verdict, why = INCONCLUSIVE, "undertrained"
        elif verdict in DECIDED and uncontrolled:
            verdict, why = (NOT_TESTABLE if weak.high <= 0 else INCONCLUSIVE), "vacuous"
            if effects.control and len(effects.control.parts) > 1:
                part = effects.control.parts[effects.control_intervals().index(weak)]
    reason = html.render(
        "reason.txt",
        claim=claim,
        arms=arms,
        decision=decision,
        why=why,
        weak=weak,
        part=part,
        stability=stability,
        fewest_seeds=FEWEST_SEEDS,
        undertrained=UNDERTRAINED,
        controlled=CONTROLLED,
        is_inside=claim.side[0] < shown.low and shown.high < claim.side[1],
        is_outside=shown.high < claim.side[0] or shown.low > claim.side[1],
        level=100 * (1 - alpha_of(reading)),
        margin=MARGINS.get(claim.unit, math.nan),
        claimed=_range(claim),
        inside=[effects.parts[number] for number in inside],
        against=[effects.parts[number] for number in against],
        open=[name for number, name in enumerate(effects.parts) if number not in against],
        gaps=_gaps,
        extent=extent,
    )
    reason = "; ".join(filter(None, [reason.strip(), effects.caution]))
    folder = arms[0].evidence
    sweep = claim.sweep if claim.sweep in folder.sweeps else folder.sweeps[-1]
    tried = sizes_of(arms), steps_of(arms), decay_times_steps_of(arms)
    return Verdict(verdict, *shown[:4], reason, folder.name, sweep, *tried, math.nan if verdict == NOT_TESTABLE else p)


def _decide(claim: Claim, effects: Qualified, reading: int) -> Decision:
    return decide(effects.intervals(), claim.side, MARGINS.get(claim.unit, 0.0), reading)


def amount(value: float, unit: str) -> str:
    """An effect without its unit, to three digits; if the unit is the log10 of a number, the number itself."""
    return count(10**value) if unit.startswith(LOG10) else f"{value:.3g}"


def _range(claim: Claim) -> str:
    low, high = (amount(end, claim.unit) for end in claim.side)
    unit = claim.unit.removeprefix(LOG10)
    if math.isinf(claim.side[1]):
        return f"above {low} {unit}".rstrip()
    return f"below {high} {unit}" if math.isinf(claim.side[0]) else f"from {low} to {high} {unit}"


def _gaps(arms: list[ArmTables]) -> list[str]:
    """Reasons why seeds do not count."""
    summaries = {(summary.curve, summary.seed): summary for arm in arms for summary in arm.summaries}
    curves, seeds = ({key[part] for key in summaries} for part in (0, 1))
    expected = len(curves) * len(seeds) * len(arms[0].lrs)
    missing = expected - sum(len(summary.runs.keys() & set(arms[0].lrs)) for summary in summaries.values())
    gaps = [f"partial: {missing} of {expected} runs missing"] if missing else []
    if any(arm.sizes != sizes_of(arms) for arm in arms):
        gaps.append("not every arm has every size")
    if not all(summary.alive for summary in summaries.values()):
        gaps.append("an arm is nothing but NaN")
    elif not all(summary.learned for summary in summaries.values()):
        gaps.append("a curve never fell below the bigram model's loss")
    return gaps
