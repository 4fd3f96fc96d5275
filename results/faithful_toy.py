"""Tables and figures of the search for a small model that fails like a large one: ``python results/faithful_toy.py``.

Reads the records in ``faithful_toy/``, and writes ``screen.csv``, ``screen.svg`` and ``changes.csv`` beside them.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from lab.analysis.curves import load
from lab.analysis.rendering import layout
from lab.analysis.sensitivity import LOST
from lab.core import files
from lab.data.corpus import Corpus
from lab.data.text import StandardLibrary
from lab.studies.faithful_toy import figures, yardstick
from lab.studies.faithful_toy.screen import RESPONSES, effects, rows_of
from lab.studies.faithful_toy.single_changes import single_changes_of

FOLDER = Path(__file__).with_suffix("")
LR = "learning_rate"


def unigram_loss(text: Corpus) -> float:
    """The entropy of the tokens of the training part, nats."""
    share = np.asarray(text.pair_counts().sum(axis=1), float).ravel()
    share = share[share > 0] / share.sum()
    return float(-(share * np.log(share)).sum())


if __name__ == "__main__":
    unigram = {256: unigram_loss(StandardLibrary().open()), 2048: unigram_loss(StandardLibrary("bpe", 2048).open())}
    rows = rows_of(load(FOLDER / "screen").runs, unigram)
    print("loss of a unigram model, by vocabulary:", unigram)
    files.write_csv(FOLDER / "screen.csv", rows, float_format="%.4g")
    for response in RESPONSES:
        print(response, *(f"  {name}: {effect}" for name, effect in effects(rows, response).items()), sep="\n")
    made = single_changes_of(load(FOLDER / "changes").runs)
    files.write_csv(FOLDER / "changes.csv", made, float_format="%.4g")
    marin = yardstick.read_changes()
    for title, changes in {"all changes": marin, "without the learning rate": marin[marin["key"] != LR]}.items():
        changes = changes.reset_index(drop=True)
        said = yardstick.toy_scores(changes, made)
        print(f"{title}: {said.notna().sum()} of {len(changes)}", yardstick.score(changes, made))
        print("by chance as concordant:", yardstick.chance_of_concordance(changes, said))
    factors = {"Marin": yardstick.factors_to_failure(marin), "here": yardstick.factors_to_failure(made, LOST)}
    print("first failing multiple of the best rate:", (10 ** pd.DataFrame(factors)).dropna().round(1), sep="\n")
    (FOLDER / "screen.svg").write_text(layout.svg(figures.screen(rows), "screen"), encoding="utf-8")
