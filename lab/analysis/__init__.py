"""From records to curves, sensitivity, figures and pages: tables in, tables out, and neither torch nor Hydra.

The names of this module are what notebooks, scripts and other packages need.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # "as" says that the name is public
    from lab.analysis import guard as guard
    from lab.analysis import probe_values as probe_values
    from lab.analysis import runaway as runaway
    from lab.analysis.crossings import crossing as crossing
    from lab.analysis.crossings import over_seeds as over_seeds
    from lab.analysis.curves import load as load
    from lab.analysis.curves import points as points
    from lab.analysis.sensitivity import Study as Study
    from lab.analysis.sensitivity import all_pairs as all_pairs
    from lab.analysis.sensitivity import by_curve as by_curve
    from lab.analysis.sensitivity import judge as judge
    from lab.analysis.sensitivity import paired as paired
    from lab.analysis.sensitivity import per_seed as per_seed
    from lab.analysis.sensitivity import study as study
    from lab.features import predict as forecast  # noqa: F401
    from lab.notebook import board as board
    from lab.notebook import card as card
    from lab.notebook import leaderboard as leaderboard
    from lab.notebook import recipes as recipes
    from lab.notebook import show as show
    from lab.notebook import verdicts as verdicts
    from lab.records.store import Records as Records
    from lab.report import findings as findings
    from lab.report import tables as tables
    from labwatch.notebook import watch as watch
    from labwatch.tables.frames import from_frame as from_frame

# Imported on first use, since matplotlib and scipy take long to load.
_MODULES = {
    "lab.analysis.crossings": ("crossing", "over_seeds"),
    "lab.analysis.curves": ("load", "points"),
    "lab.notebook": ("board", "card", "leaderboard", "recipes", "show", "verdicts"),
    "lab.analysis.sensitivity": (
        "Study",
        "all_pairs",
        "by_curve",
        "judge",
        "paired",
        "per_seed",
        "study",
    ),
    "lab.records.store": ("Records",),
    "labwatch.notebook": ("watch",),
    "labwatch.tables.frames": ("from_frame",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
# Modules that are themselves names of this one.
_PUBLIC_MODULES = {
    "findings": "lab.report.findings",
    "forecast": "lab.features.predict",
    "guard": "lab.analysis.guard",
    "probe_values": "lab.analysis.probe_values",
    "runaway": "lab.analysis.runaway",
    "tables": "lab.report.tables",
}
__all__ = [*_MODULE_OF, *_PUBLIC_MODULES]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC_MODULES:
        return import_module(_PUBLIC_MODULES[name])
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'lab.analysis' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
