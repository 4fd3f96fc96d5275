"""The question of a results folder, and its answer in a sentence that follows from intervals by rule."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from lab.analysis.curves import arm_factors, significant
from lab.analysis.sensitivity import Study
from lab.analysis.statistics import FEWEST_SEEDS, Interval, student_t, thousandths
from lab.analysis.text import count, listed, of_arm, spell
from lab.core import shipped
from lab.records import store
from lab.report.comparisons import contrasts, recipe_of, reference_arm
from lab.report.findings import part_subjects, with_scaled_steps
from lab.studies import modules

# On fewer learning rates inside the window, sensitivity says little, and arms are compared by their best losses.
FEWEST_LRS = 4
UNIT = "nats/token"


def dates(folders: Sequence[Path]) -> str:
    """The first and the last day on which the commands of these folders were given, as far as they are recorded."""
    recorded = [request.day for folder in folders for request in store.requests(folder).values() if request.day]
    if not recorded:
        return "date not recorded"
    is_whole = len(recorded) >= sum(len(store.commands(folder)) for folder in folders)
    return " to ".join(dict.fromkeys([min(recorded), max(recorded)])) + ("" if is_whole else " (and before)")


def questions(folders: Iterable[Path]) -> list[str]:
    """The questions of the sweeps that filled these folders, each once.

    A question is on record with its command; for a sweep of the lab without such a record its file says it.
    """
    texts = []
    for folder in folders:
        requests = store.requests(folder)
        for command in store.commands(folder):
            recorded = requests[command].question if command in requests else ""
            texts.append(recorded or _question_of_shipped_sweep(command))
    return [text for text in dict.fromkeys(texts) if text]


def _question_of_shipped_sweep(command: str) -> str:
    try:
        words = shlex.split(command)
    except ValueError:  # a quotation that never ends
        return ""
    name = words[words.index("sweep") + 1] if "sweep" in words[:-1] else ""
    sweeps = shipped.sweeps()
    return shipped.question(sweeps[name].read_text(encoding="utf-8")) if name in sweeps else ""


def answer(study: Study, special: str | None = None) -> str:
    """One sentence on what came out: on batches, spikes or alarms where these are compared, else how arms differ.

    Args:
        study: of at least one run that ended.
        special: its ``special_answer``, where a caller has it already.
    """
    points = study.points
    if (points["outcome"] == "diverged").all():
        runs = "The only run" if len(points) == 1 else f"All {len(points)} runs"
        lrs = sorted(points["lr"].unique())
        span = (
            f"learning rate {spell(lrs[0])}" if len(lrs) == 1 else f"learning rates {spell(lrs[0])} to {spell(lrs[-1])}"
        )
        return f"{runs} diverged, at {span}, so there is no final loss to compare."
    if len(points) == 1:
        return _one_run(points.iloc[0])
    if sentence := special_answer(study) if special is None else special:
        return sentence
    return _many_arms(study) if points["arm"].nunique() > 1 else _one_arm(study)


def special_answer(study: Study) -> str:
    """The answer of the study whose quantity these runs compare, where sensitivity says little; else empty.

    Empty, too, where all runs diverged.
    """
    if (study.points["outcome"] == "diverged").all():
        return ""
    return next(filter(None, (module.sentence(study) for module in modules("answer"))), "")


def _one_run(run: pd.Series) -> str:
    side = "below" if run["loss"] < run["loss_bigram"] else "not below"
    return (
        f"One run {of_arm(run['arm'])}, of {count(run['size'])} parameters at learning rate {spell(run['lr'])}, ended "
        f"at a loss of {run['loss']:.3f} {UNIT}, {side} the {run['loss_bigram']:.3f} of a bigram model."
    )


def _one_arm(study: Study) -> str:
    """How sensitive the only arm is at its sizes; its best loss where that says more."""
    measure, values = _measure(study)
    sizes = sorted(study.points["size"].unique())
    ends = dict.fromkeys([sizes[0], sizes[-1]])
    parts = [
        f"{_level(student_t(values[values['size'] == size]['value']))} at {count(size)} parameters" for size in ends
    ]
    largest = study.points[study.points["size"] == sizes[-1]]
    lrs = sorted(largest.loc[largest["lr"] == largest["best_lr"], "lr"].unique())
    there = " there" if len(sizes) > 1 else ""
    if not lrs:
        tail = f"; all runs{there} diverged"
    elif study.points["lr"].nunique() > 1:
        tail = f"; the best learning rate{there} is {' to '.join(spell(lr) for lr in dict.fromkeys([lrs[0], lrs[-1]]))}"
    else:
        tail = ""
    few = "" if values["seed"].nunique() >= FEWEST_SEEDS else f" ({_seeds(values)}, so no interval)"
    return f"{measure} {of_arm(study.points['arm'].iloc[0])} is {listed(parts)}{few}{tail}."


def _level(interval: Interval) -> str:
    return _range(interval) if interval.n >= FEWEST_SEEDS else f"{thousandths(interval.mean)} {UNIT}"


def _seeds(values: pd.DataFrame) -> str:
    seeds = values["seed"].nunique()
    return "one seed" if seeds == 1 else f"{seeds} seeds"


def _measure(study: Study) -> tuple[str, pd.DataFrame]:
    """What arms are compared by, and its columns ``size``, ``seed``, ``value``."""
    if _by_sensitivity(study):
        return part_subjects(study.window)["total"], study.seeds.assign(value=study.seeds["total"])
    best = study.points.groupby(["size", "seed"])["capped"].min().reset_index(name="value")
    return _loss_name(study), best


def _by_sensitivity(study: Study) -> bool:
    """Whether sensitivity compares: on enough learning rates, which mean the same in all arms."""
    inside = study.points[study.points["lr"].between(*significant(study.window))]
    lrs = inside.groupby("curve")["lr"].nunique()
    return len(lrs) > 0 and lrs.max() >= FEWEST_LRS and with_scaled_steps(study).empty


def _loss_name(study: Study) -> str:
    return "The best loss over the learning rates" if study.points["lr"].nunique() > 1 else "The final loss"


class ArmDifference(NamedTuple):
    """An arm against its reference at one size, as an interval over seeds."""

    arm: str
    size: float
    interval: Interval

    @property
    def direction(self) -> str:
        """``lower``, ``higher``, or empty where the interval holds zero or there is none."""
        return "lower" if self.interval.high < 0 else "higher" if self.interval.low > 0 else ""


def _many_arms(study: Study) -> str:
    reference = reference_arm(arm_factors(study.records.runs), recipe_of(study))
    subjects, pairs = compared(study)
    groups = pairs[pairs["second"] == reference].groupby("first", sort=False)
    differences = [table for _, group in groups if (table := list(_differences(group)))]
    if not differences:
        return f"No arm has runs of the same size, seed and learning rate as {_runs(reference)} to compare with."
    if len(differences) == 1:
        return _two_arms(subjects["total"], differences[0], reference)
    return _against(subjects["total"], [table[-1] for table in differences], reference, _idle(study))


def _idle(study: Study) -> list[str]:
    """Arms of which no run beat a bigram model, where sensitivity compares: theirs is low because none has learned."""
    arms = study.points.groupby("arm", sort=False) if _by_sensitivity(study) else ()
    return [str(arm) for arm, runs in arms if (runs["capped"] > runs["loss_bigram"]).all()]


def _differences(pairs: pd.DataFrame) -> Iterator[ArmDifference]:
    """The differences of one pair of arms, the largest size last."""
    for arm, size, interval in zip(pairs["first"], pairs["size"], pairs["total"], strict=True):
        if interval.n:
            yield ArmDifference(arm, float(size), interval)


def compared(study: Study) -> tuple[dict[str, str], pd.DataFrame]:
    """What a report says of pairs of arms: the columns compared, each with its name, and the pairs singled out.

    Pairs are rows as of ``study.pairs``; where sensitivity compares nothing, ``total`` is a difference of best losses.
    """
    pairs = contrasts(study)
    if _by_sensitivity(study):
        return part_subjects(study.window), pairs
    best = [_best_losses(study, *names) for names in dict.fromkeys(zip(pairs["first"], pairs["second"], strict=True))]
    return {"total": _loss_name(study)}, pd.concat(best, ignore_index=True) if best else pairs


def _best_losses(study: Study, first: str, second: str) -> pd.DataFrame:
    """Best loss of the first arm minus that of the second, paired by seed, over the learning rates of both."""
    key = ["size", "seed", "lr"]
    one, other = (study.points[study.points["arm"] == name].set_index(key)["capped"] for name in (first, second))
    best = pd.DataFrame({"one": one, "other": other}).dropna().groupby(level=["size", "seed"]).min()
    rows = [
        {"first": first, "second": second, "size": size, "total": student_t(seeds["one"] - seeds["other"])}
        for size, seeds in best.groupby(level="size")
    ]
    return pd.DataFrame(rows, columns=["first", "second", "size", "total"])


def _runs(arm: str) -> str:
    """An arm as a noun."""
    return f"runs {arm}" if arm.startswith(("with ", "without ")) else arm


def _two_arms(measure: str, differences: Sequence[ArmDifference], reference: str) -> str:
    arm, largest = differences[-1].arm, differences[-1]
    directions = {difference.direction for difference in differences}
    at = f"at {count(largest.size)} parameters"
    if largest.interval.n < FEWEST_SEEDS:
        return (
            f"{measure} {of_arm(arm)} minus that {of_arm(reference)} is {largest.interval.mean:.3f} {UNIT} {at}, from "
            f"{_few(largest.interval)}: too few to tell a difference from noise."
        )
    if directions == {""}:
        everywhere = "at any size" if len(differences) > 1 else at
        return (
            f"No difference in {_lower_first(measure)} between {_runs(arm)} and {_runs(reference)} is certain "
            f"{everywhere}{'; ' + at + ' it is' if len(differences) > 1 else ': it is'} {_range(largest.interval)}."
        )
    if len(directions) == 1:
        everywhere = f" at every size, by {_by(largest)} {at}" if len(differences) > 1 else f", by {_by(largest)}, {at}"
        low, high = (arm, reference) if largest.direction == "lower" else (reference, arm)
        return f"{measure} is lower {of_arm(low)} than {_than(low, high)}{everywhere}."
    sides = {
        direction: [count(one.size) for one in differences if one.direction == direction]
        for direction in ("lower", "higher", "")
    }
    parts = [
        f"{direction} {of_arm(arm)} at {listed(sides[direction])}"
        for direction in ("lower", "higher")
        if sides[direction]
    ]
    parts += [f"not certainly different at {listed(sides[''])}"] if sides[""] else []
    return f"{measure} is, against that {of_arm(reference)}, {listed(parts)} parameters."


def _than(arm: str, other: str) -> str:
    """``without it`` behind ``with qk-layernorm``; else the other arm as it is."""
    word, _, switch = arm.partition(" ")
    opposite = {"with": "without", "without": "with"}.get(word)
    return f"{opposite} it" if opposite and other == f"{opposite} {switch}" else of_arm(other)


def _few(interval: Interval) -> str:
    return "one seed" if interval.n == 1 else f"{interval.n} seeds"


def _lower_first(measure: str) -> str:
    return measure if measure.startswith("LR") else measure[0].lower() + measure[1:]


def _by(difference: ArmDifference) -> str:
    """``0.2 nats/token (95 % interval 0.1 to 0.3)``: how far apart, without a sign."""
    return _range(-difference.interval if difference.interval.mean < 0 else difference.interval)


def _range(interval: Interval) -> str:
    scale = max(abs(interval.low), abs(interval.high))
    mean, low, high = (thousandths(value, scale) for value in (interval.mean, interval.low, interval.high))
    return f"{mean} {UNIT} (95 % interval {low} to {high})"


def _against(measure: str, differences: Sequence[ArmDifference], reference: str, idle: Sequence[str]) -> str:
    """Several arms against the reference, each at the largest size that both have; ``idle`` ones learn nothing."""
    if learned := [one for one in differences if one.arm not in idle]:
        differences = learned
    sizes = {difference.size for difference in differences}
    at = f"at {count(sizes.pop())} parameters" if len(sizes) == 1 else "at the largest size they share"
    if any(one.interval.n < FEWEST_SEEDS for one in differences):
        low, high = (end(one.interval.mean for one in differences) for end in (min, max))
        return (
            f"Against {_runs(reference)}, {_lower_first(measure)} {at} differs by {low:.3f} to {high:.3f} {UNIT}, "
            "from too few seeds to tell a difference from noise."
        )
    parts = []
    for direction in ("lower", "higher"):
        group = [one for one in differences if one.direction == direction]
        if group:
            widest = max(group, key=lambda one: abs(one.interval.mean))
            most = "by" if len(group) == 1 else "by up to"
            parts.append(f"{direction} {_of_arms(one.arm for one in group)}, {most} {_by(widest)}")
    undecided = [one.arm for one in differences if not one.direction]
    parts += [f"not certainly different {_of_arms(undecided)}"] if undecided else []
    parts += [f"meaningless {_of_arms(idle)}, no run of which beat a bigram model"] if idle else []
    against = f"Against {_runs(reference)}, the arm nearest the default recipe"
    return f"{against}, {_lower_first(measure)} {at} is {'; '.join(parts)}."


def _of_arms(arms: Iterable[str]) -> str:
    return listed([of_arm(arm) for arm in arms]).replace(" and for ", " and ").replace(", for ", ", ")
