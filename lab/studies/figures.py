"""The figures of all studies, by name; importing this module imports those that register them."""

from lab import studies
from lab.analysis.drawing.registry import FIGURES as FIGURES

studies.modules("figures")
