"""What was tried, as tables and sentences: single changes of a base, and trials of which some were kept."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from lab.analysis import changes
from lab.analysis.sensitivity import LOST, Study
from lab.analysis.statistics import FEWEST_SEEDS
from lab.analysis.text import few, shortened
from lab.records.imported import PER_BYTE

FALSE_SHARE = 0.025  # of changes that do nothing, which end lower than the interval of the noise allows


class Section(NamedTuple):
    """A section of a report: a title, a table for readers, one of numbers for a file, and sentences."""

    name: str
    title: str
    table: pd.DataFrame
    numbers: pd.DataFrame
    notes: list[str]


def sections(study: Study) -> list[Section]:
    """What an imported table says of changes, each beside what it was a change of; empty for any other."""
    shown = list[Section]()
    if len(found := changes.single_changes(study)):
        table = changes.changes_as_text(study, found)
        shown.append(Section("single_changes", "Single changes of a base", table, found, _of_changes(study, found)))
    unit = "nats/byte" if study.runs["data_notes"].eq(PER_BYTE).any() else "nats/token"
    names = changes.tables_of_trials(study)
    for place, name in enumerate(names):
        trials = changes.trials(study, name)
        table = trials.kept.assign(
            change=trials.kept["change"].map(lambda text: shortened(str(text), 60)),
            loss=trials.kept["loss"].map("{:.4f}".format),
            effect=trials.kept["effect"].map("{:+.4f}".format).mask(trials.kept["effect"].isna(), ""),
        )
        of_table, number = (f" of {name}", f"_{place + 1}") if len(names) > 1 else ("", "")
        notes = _of_trials(trials, unit)
        shown.append(Section(f"trials{number}", f"Trials{of_table} that were kept", table, trials.kept, notes))
    return shown


def _of_changes(study: Study, found: pd.DataFrame) -> list[str]:
    broke, noise = int(found["broke"].sum()), changes.noise_of_bases(study)
    bases = len(found[["arm", "size"]].drop_duplicates())
    notes = [
        f"{len(found)} single changes of {bases} base{'s' * (bases != 1)}. {broke or 'None'} of them broke: diverged, "
        f"or ended more than {LOST:g} above the base or above the loss at initialization. An effect is the loss of a "
        "change minus that of its base, the run without a change that is like it in most columns."
    ]
    if noise is None:
        notes.append("No base was run with several seeds, so nobody knows which of the small effects are noise.")
    else:
        notes.append(f"Noise of a seed: {noise.sd:.2g}, from repeats of bases, {noise.freedom} degrees of freedom.")
    return notes


def _of_trials(trials: changes.Trials, unit: str) -> list[str]:
    noise, notes = trials.noise, [f"Best of {trials.tried + 1} settings that ended: {trials.best}."]
    if noise is None:
        return [
            *notes,
            "Nothing says how large the noise of a seed is: no trial was repeated, and fewer than "
            f"{changes.FEWEST_NEIGHBOURS + 1} that follow one another were discarded. Run the baseline "
            f"{FEWEST_SEEDS} times with other seeds.",
        ]
    if noise.is_repeated:
        source = f"from {', '.join(few(trials.repeated))}, which repeat one another"
    else:
        source = (
            f"from {noise.freedom} differences of neighbours that were discarded, since no trial was repeated; it "
            "holds what these changes did, so the noise may be smaller"
        )
    notes.append(f"Noise of a seed: {noise.sd:.2g} {unit}, {source}.")
    notes.append(
        f"A change is {changes.BEYOND} if the 95 % interval of its effect excludes zero, and {changes.WITHIN} if more "
        f"than {changes.MOST_REPEATS} runs of it and of its baseline would be needed to find such an effect with a "
        f"probability of {changes.POWER:.0%}; else as many runs of both as are named tell. What is kept is what came "
        f"out lower: of {trials.tried} changes that were tried, one in {1 / FALSE_SHARE:.0f} would pass by luck alone."
    )
    return notes
