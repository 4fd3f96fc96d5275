"""The claims of all studies, by name; importing this module files them."""

from importlib import import_module

from lab.analysis.judging.verdicts import CLAIMS as CLAIMS
from lab.studies import HOME

for _path in sorted(HOME.glob("*/*.py")):
    if "judging.verdicts import" in _path.read_text(encoding="utf-8"):
        import_module(f"lab.studies.{_path.parent.name}.{_path.stem}")
