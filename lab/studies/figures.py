"""The figures of all studies, by name; importing this module imports those that register them."""

from lab.analysis.drawing.registry import FIGURES as FIGURES
from lab.studies import modules

modules("figures")
