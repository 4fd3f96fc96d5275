"""The measures of answers: rows of the ``measures.yaml`` of each study."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from lab.analysis import contrasts
from lab.analysis.contrasts import Measure
from lab.core import shelf, shipped
from lab.core.schema import build
from studies.claims import points

USUAL = {"points": "own_points", "reduce": "by_size"}


def read_measures(path: Path, of_study: Iterable[ModuleType]) -> list[Measure]:
    """Read the measures of a study: a list of rows with the fields of ``Measure``.

    ``points`` and ``reduce`` name a function of the modules ``points`` and ``contrasts`` or of those ``of_study``, or
    with arguments one that makes it: ``{of_table: {table: own, column: rate}}``. Without them a row is about the
    study's own arms, by size.
    """
    modules = (contrasts, points, *of_study)
    known = {name: named for module in modules for name, named in vars(module).items()}

    def function(spec: Any) -> Any:
        if isinstance(spec, str):
            return known[spec]
        ((name, arguments),) = spec.items()
        return known[name](**arguments) if isinstance(arguments, dict) else known[name](arguments)

    measures = []
    for row in shipped.load(path):
        functions = {key: function(row.get(key, usual)) for key, usual in USUAL.items()}
        measures.append(build(Measure, {"unit": "", **row, **functions}, f"{path}"))
    return measures


MEASURES = [
    measure
    for path in sorted(shelf.HOME.glob("*/measures.yaml"))
    for measure in read_measures(path, shelf.modules("answer", path.parent.name))
]
