"""The question of a results folder, and its answer: a word or the leading arms, and contrasts with the reference."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from lab.analysis import contrasts
from lab.analysis.contrasts import ANY_SWEEP, GENERAL, NO_REFERENCE, Contrast, Measure, by_column
from lab.analysis.curves import arm_factors
from lab.analysis.rendering import html
from lab.analysis.sensitivity import FEWEST_LRS, WINDOW, Study, compares_sensitivity, with_scaled_steps
from lab.analysis.statistics import FEWEST_SEEDS, Interval, zones
from lab.analysis.text import arm_phrase, capitalized, count, first_to_last, format_value
from lab.core import shelf, shipped
from lab.core.files import read_text
from lab.core.shipped import default_recipe
from lab.records import store
from lab.records.imported import is_imported

SENTENCES = html.macros("answers.txt")  # a macro for each kind of sentence
OF_STUDIES = [module.MEASURES for module in shelf.modules("measures", "claims")]
MEASURES: list[Measure] = [*chain(*OF_STUDIES), *GENERAL]


Factors = Mapping[str, Mapping[str, Hashable]]
# The values of config groups that the default recipe does not set.
UNSET: Mapping[str, str] = {"batch.name": "constant", "bad_batches": "none", "response": "none"}


def recipe_of(study: Study) -> Mapping[str, str | float]:
    """The default recipe, with the numbers of the scale of these runs."""
    scales = set(study.records.runs.get("scale.name", pd.Series(dtype=str)).dropna())
    return {**UNSET, **(default_recipe(str(scales.pop())) if len(scales) == 1 else default_recipe())}


def reference_arm(factors: Factors, recipe: Mapping[str, str | float]) -> str:
    """The arm that is most like the default recipe.

    In most of its settings it has the recipe's value, or else the nearest one that was run.

    Args:
        factors: the settings in which each arm differs, as ``curves.arm_factors`` gives them.
        recipe: the recipe, as ``default_recipe`` gives it.
    """
    keys = next(iter(factors.values()))
    usual = {key: nearest([factors[arm][key] for arm in factors], recipe.get(key)) for key in keys}
    return max(factors, key=lambda arm: sum(factors[arm][key] == usual[key] for key in keys))  # of equals the first


def nearest(values: list[Hashable], usual: Hashable) -> Hashable:
    """The value nearest to the usual one; numbers are compared by ratio, and else the first value is taken."""
    if usual in values:
        return usual
    numbers = [value for value in values if isinstance(value, float) and value > 0]
    if not isinstance(usual, float) or usual <= 0 or not numbers:
        return values[0]
    return min(numbers, key=lambda value: abs(math.log(value / usual)))


MOST_VALUES = 4  # with more arms, a sentence names only the lowest and the highest
FALSE_WORDS = 0.05  # largest chance of a false word, over the intervals of all arms together
BELOW, ABOVE = (0, 0), (1, 1)  # the zones of a difference that is certainly below zero, and above
AFFIRMING = {"lower": [BELOW], "different": [BELOW, ABOVE]}  # by ``Measure.affirmed_by``


def dates(folders: Sequence[Path]) -> str:
    """The first and the last recorded day of the commands of these folders."""
    recorded = [request.day for folder in folders for request in store.requests(folder).values() if request.day]
    if not recorded:
        return "date not recorded"
    is_whole = len(recorded) >= sum(len(store.commands(folder)) for folder in folders)
    return first_to_last(sorted(recorded)) + ("" if is_whole else " (and before)")


def questions(folders: Iterable[Path]) -> list[str]:
    """The questions of the sweeps that filled these folders, each once.

    A question is recorded with its command; without a record it comes from the file of the lab's sweep.
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
    return shipped.question(read_text(sweeps[name])) if name in sweeps else ""


class Reply(NamedTuple):
    """The answer to the question of a sweep, in words and numbers.

    Attributes:
        word: yes, no, in part, or undecided; empty if the question asks which or how much.
        text: the evidence for the word; without a word the leading arms, or the values.
        contrasts: the quantities of the question, for every arm.
    """

    word: str
    text: str
    contrasts: list[Contrast]

    def __str__(self) -> str:
        return f"{self.word}: {self.text}" if self.word else self.text

    @property
    def subject(self) -> str:
        """The quantity and the arms, such as ``LR sensitivity: adamw, lion``; empty without contrasts."""
        if not self.contrasts:
            return ""
        measure, arms = self.contrasts[0].measure, list(self.contrasts[0].levels)
        return (
            f"{measure.name} of {len(arms)} arms" if len(arms) > MOST_VALUES else f"{measure.name}: {', '.join(arms)}"
        )

    @property
    def speaks_of_sensitivity(self) -> bool:
        """Whether it quotes a sensitivity."""
        return "sensitiv" in " ".join([self.text, *(contrast.measure.name for contrast in self.contrasts)])


def answer(study: Study, sweeps: Collection[str] = (), word: str = "", text: str = "") -> Reply:
    """Answer the question of these sweeps.

    Args:
        study: a study with at least one run that ended.
        sweeps: the sweeps that trained it.
        word: the answer, where claims that were judged on these runs give it.
        text: the evidence for it.
    """
    points = study.points
    if (points["outcome"] == "diverged").all():
        lowest, highest = (format_value(lr) for lr in (points["lr"].min(), points["lr"].max()))
        return Reply(word, text or str(SENTENCES.diverged(len(points), study.along, lowest, highest)), [])
    if len(points) == 1:
        run = points.iloc[0]
        arm, size, lr = arm_phrase(run["arm"]), count(run["size"]), format_value(run["lr"])
        said = SENTENCES.single_run(arm, size, study.along, lr, run["loss"], run["loss_bigram"])
        return Reply(word, text or str(said), [])
    found = compared(study, sweeps)
    if not word and found:
        first = found[0]
        word, text = _decided(study, first) or (
            "",
            f"{_sentence(study, first)} {_no_sensitivity(study, first)}".rstrip(),
        )
    return Reply(word, text, found)


def _no_sensitivity(study: Study, contrast: Contrast) -> str:
    """Why the best losses over several learning rates are compared, and no sensitivities; empty for anything else."""
    if ANY_SWEEP not in contrast.measure.asked_by or compares_sensitivity(study) or study.points["lr"].nunique() < 2:
        return ""
    if not with_scaled_steps(study).empty:
        return str(SENTENCES.scaled_steps())
    return str(SENTENCES.too_few_values(study.along, FEWEST_LRS, study.window))


def compared(study: Study, sweeps: Collection[str]) -> list[Contrast]:
    """The quantities that these sweeps ask about, or else the first that these runs have; for every arm."""
    if asked := list(_measured(study, sweeps)):
        return asked
    for module in shelf.modules("answer"):
        if hasattr(module, "contrasts") and (found := module.contrasts(study)):
            return list(found)
    return list(islice(_measured(study, [ANY_SWEEP]), 1))


def _measured(study: Study, sweeps: Collection[str]) -> Iterator[Contrast]:
    """Yield the quantities that these sweeps ask about and these runs have."""
    for measure in (measure for measure in MEASURES if set(sweeps) & set(measure.asked_by)):
        points = measure.points(study)
        if points.empty:
            continue
        name = capitalized(measure.name.format(axis=study.along))
        is_windowed = study.window != WINDOW and name == capitalized(study.along.sensitivity)
        named = measure._replace(name=f"{name} from {study.window}" if is_windowed else name)
        contrast = contrasts.contrast(named, points, _reference(study, measure, points), study.window)
        if any(cell.n for cells in contrast.levels.values() for cell in cells.values()):
            yield contrast


def _reference(study: Study, measure: Measure, points: pd.DataFrame) -> str:
    """The arm that the measure names, or else the one most like the default recipe, or the first."""
    arms = list(dict.fromkeys(map(str, points["arm"])))
    if len(arms) == 1 or measure.reference == NO_REFERENCE:
        return ""
    if is_imported(study.records) and not measure.reference:
        return contrasts.baseline_of(arms)
    usual = measure.reference or reference_arm(arm_factors(study.records.runs), recipe_of(study))
    return usual if usual in arms else arms[0]


def _sentence(study: Study, contrast: Contrast) -> str:
    """A sentence with the leading arms, or with the values if no arm is better."""
    cells = [cell for of_arm in (contrast.differences or contrast.levels).values() for cell in of_arm.values()]
    seeds = max(cell.n for cell in cells)
    if not seeds:
        return str(SENTENCES.nothing_shared(study.along, _noun(contrast.reference)))
    if seeds >= FEWEST_SEEDS and contrast.differences and contrast.measure.better:
        columns = contrast.columns if contrast.measure.reduce is by_column else contrast.columns[-1:]
        return " ".join(_leading(study, contrast, column) for column in columns)
    return _values(contrast, seeds if seeds < FEWEST_SEEDS else 0)


def _values(contrast: Contrast, few: int) -> str:
    """A sentence with the lowest and the highest value in the last column, or with all if they are few.

    For a single arm, it has the values in the first and in the last column. ``few`` is the number of seeds if it is too
    small for an interval, else 0.
    """
    measure, last = contrast.measure, contrast.columns[-1]
    if len(contrast.levels) == 1:
        ((arm, cells),) = contrast.levels.items()
        ends = [f"{measure.with_unit(cells[column])} {column}".strip() for column in (contrast.columns[0], last)]
        return str(SENTENCES.values(f"{measure.name} {arm_phrase(arm)}", list(dict.fromkeys(ends)), False, few))
    known = {arm: cells[last] for arm, cells in contrast.levels.items() if cells[last].n}
    rising = sorted(known, key=lambda arm: known[arm].mean)
    shown = known if len(known) <= MOST_VALUES else [rising[0], rising[-1]]
    values = [f"{measure.with_unit(known[arm])} {arm_phrase(arm)}" for arm in shown]
    return str(SENTENCES.values(_place(contrast, last), values, len(shown) < len(known), few))


def _place(contrast: Contrast, column: str) -> str:
    return f"{contrast.measure.name} {column}".rstrip()


def _leading(study: Study, contrast: Contrast, column: str) -> str:
    """A sentence with the best arm, arms not significantly worse, and the reference."""
    measure, sign = contrast.measure, 1 if contrast.measure.better == "lower" else -1
    worse = ABOVE if sign > 0 else BELOW
    known = {arm: cells[column] for arm, cells in contrast.levels.items() if cells[column].n}
    # by what both ran, since the level of an arm that skipped learning rates is another
    above = {arm: cells[column].mean for arm, cells in contrast.differences.items() if cells[column].n}
    compared_arms = [arm for arm in known if arm in above or (above and arm == contrast.reference)]
    best = min(compared_arms or known, key=lambda arm: sign * (above.get(arm, 0.0) if above else known[arm].mean))
    beside = contrasts.contrast(measure, measure.points(study), best, study.window).differences
    ties = [arm for arm in known if arm != best and zones(beside[arm][column], (0.0,)) != worse]
    is_compared = contrast.reference != best and contrast.reference in known
    return str(
        SENTENCES.leading(
            _place(contrast, column),
            "lowest" if sign > 0 else "highest",
            arm_phrase(best),
            list(map(_noun, ties)),
            measure.with_unit(known[best]),
            arm_phrase(contrast.reference) if is_compared else "",
            measure.level(known[contrast.reference]) if is_compared else "",
        )
    )


def _decided(study: Study, contrast: Contrast) -> tuple[str, str] | None:
    """Yes if some arm is certainly what the question asks for, no if certainly none is; and the evidence for that.

    None if the question is another, or seeds are too few.
    """
    measure, column = contrast.measure, contrast.columns[-1]
    if not measure.affirmed_by or not any(cells[column].n >= FEWEST_SEEDS for cells in contrast.differences.values()):
        return None
    joint = _joint_differences(study, contrast)
    zone_of = {arm: zones(interval, (0.0,)) for arm, interval in joint.items()}
    affirming = [arm for zone in AFFIRMING[measure.affirmed_by] for arm in joint if zone_of[arm] == zone]
    word = "Yes" if affirming else "No" if {*zone_of.values()} == {ABOVE} else "Undecided"
    shown = affirming or [min(joint, key=lambda arm: joint[arm].mean)]
    changes = [f"{measure.change(contrast.differences[arm][column])} {arm_phrase(arm)}" for arm in shown]
    name = measure.name if measure.name.startswith("LR ") else measure.name[0].lower() + measure.name[1:]
    said = SENTENCES.decided(_noun(contrast.reference), name, word, measure.affirmed_by, changes, measure.unit)
    return word, str(said)


def _joint_differences(study: Study, contrast: Contrast) -> dict[str, Interval]:
    """By arm the last difference from the reference, with intervals that hold together at 95 % (Bonferroni)."""
    measure, level = contrast.measure, 1 - FALSE_WORDS / len(contrast.differences)
    joint = contrasts.contrast(measure, measure.points(study), contrast.reference, study.window, level).differences
    return {arm: joint[arm][contrast.columns[-1]] for arm in contrast.differences}


def _noun(arm: str) -> str:
    return f"runs {arm}" if arm.startswith(("with ", "without ")) else arm
