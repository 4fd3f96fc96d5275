"""Small Transformers that show the training instabilities of large ones.

The names of this module are what a recipe, a script or another package needs; ``lab.analysis`` reads the records.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # "as" says that the name is public
    from lab.__main__ import main as main
    from lab.analysis.stress.battery import add_stress_tests as add_stress_tests
    from lab.cli.in_python import numbers as numbers
    from lab.cli.in_python import stress as stress
    from lab.cli.in_python import sweep as sweep
    from lab.cli.in_python import train as train
    from lab.core.axes import over as over
    from lab.core.axes import per_run_max as per_run_max
    from lab.core.axes import per_run_mean as per_run_mean
    from lab.core.axes import per_run_norm as per_run_norm
    from lab.core.axes import per_run_rms as per_run_rms
    from lab.core.hooks import Act as Act
    from lab.core.hooks import HookIntervention as HookIntervention
    from lab.core.hooks import LossTerm as LossTerm
    from lab.core.hooks import Predictions as Predictions
    from lab.core.hooks import Probe as Probe
    from lab.core.hooks import WeightIntervention as WeightIntervention
    from lab.core.registry import register as register
    from lab.core.roles import Role as Role
    from lab.core.schema import PerRun as PerRun
    from lab.core.schema import PerRunSeed as PerRunSeed
    from lab.core.schema import bounded as bounded
    from lab.core.schema import one_of as one_of
    from lab.core.schema import seed as seed
    from lab.data.corpus import Corpus as Corpus
    from lab.data.corpus import fingerprint as fingerprint
    from lab.data.corpus import once as once
    from lab.data.packing import PackedCorpus as PackedCorpus
    from lab.model.parametrization import Factors as Factors
    from lab.model.parametrization import Standard as Standard
    from lab.optim.links import Link as Link
    from lab.training.config import RunConfig as RunConfig
    from lab.training.config import run_config as run_config
    from lab.training.fleet import Fleet as Fleet
    from labwatch.recorder.recorder import record as record

# Imported when first asked for, since importing the lab must load no torch.
_MODULES = {
    "lab.__main__": ("main",),
    "lab.cli.in_python": ("numbers", "stress", "sweep", "train"),
    "lab.core.axes": ("over", "per_run_max", "per_run_mean", "per_run_norm", "per_run_rms"),
    "lab.core.hooks": ("Act", "HookIntervention", "LossTerm", "Predictions", "Probe", "WeightIntervention"),
    "lab.core.registry": ("register",),
    "lab.core.roles": ("Role",),
    "lab.core.schema": ("PerRun", "PerRunSeed", "bounded", "one_of", "seed"),
    "lab.data.corpus": ("Corpus", "fingerprint", "once"),
    "lab.data.packing": ("PackedCorpus",),
    "lab.model.parametrization": ("Factors", "Standard"),
    "lab.optim.links": ("Link",),
    "labwatch.recorder.recorder": ("record",),
    "lab.analysis.stress.battery": ("add_stress_tests",),
    "lab.training.config": ("RunConfig", "run_config"),
    "lab.training.fleet": ("Fleet",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = [*_MODULE_OF]


_CALLBACKS = ("hf", "lightning")  # modules that need a package of others


def __getattr__(name: str) -> Any:
    if name in _CALLBACKS:
        return import_module(f"labwatch.recorder.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'lab' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
