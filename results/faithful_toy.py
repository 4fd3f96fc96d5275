"""Tables and figures of the search for a small model that fails like a large one: ``python results/faithful_toy.py``.

Reads the records in ``faithful_toy/``, and writes ``screen.csv`` and ``screen.svg`` beside them.
"""

from pathlib import Path

import numpy as np

from lab.analysis.curves import load
from lab.analysis.rendering import layout
from lab.core import files
from lab.data.corpus import Corpus
from lab.data.text import StandardLibrary
from lab.studies.faithful_toy import figures
from lab.studies.faithful_toy.screen import RESPONSES, effects, rows_of

FOLDER = Path(__file__).with_suffix("")


def unigram_loss(text: Corpus) -> float:
    """The entropy of the tokens of the training part, nats."""
    share = np.asarray(text.pair_counts().sum(axis=1), float).ravel()
    share = share[share > 0] / share.sum()
    return float(-(share * np.log(share)).sum())


if __name__ == "__main__":
    unigram = {256: unigram_loss(StandardLibrary()), 2048: unigram_loss(StandardLibrary("bpe", 2048))}
    rows = rows_of(load(FOLDER / "screen").runs, unigram)
    print("loss of a unigram model, by vocabulary:", unigram)
    files.write_csv(FOLDER / "screen.csv", rows, float_format="%.4g")
    for response in RESPONSES:
        print(response, *(f"  {name}: {effect}" for name, effect in effects(rows, response).items()), sep="\n")
    (FOLDER / "screen.svg").write_text(layout.svg(figures.screen(rows), "screen"), encoding="utf-8")
