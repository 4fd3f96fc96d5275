"""The measures of answers: rows of the ``measures.yaml`` of each study, then of the one here, for any sweep."""

from pathlib import Path

from lab.analysis.contrasts import read_measures
from lab.core import shelf

OF_STUDIES = sorted(shelf.HOME.glob("*/measures.yaml"))
MEASURES = [
    *(measure for path in OF_STUDIES for measure in read_measures(path, shelf.modules("answer", path.parent.name))),
    *read_measures(Path(__file__).with_suffix(".yaml"), []),
]
