"""The measures of all studies, in the order of studies: rows of ``measures.yaml``, with functions of ``answer.py``."""

from lab.analysis.contrasts import read_measures
from lab.studies import HOME, modules

MEASURES = [
    measure
    for path in sorted(HOME.glob("*/measures.yaml"))
    for measure in read_measures(path, modules("answer", path.parent.name))
]
