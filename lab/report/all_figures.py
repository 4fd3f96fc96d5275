"""The figures of reports, by name: those of any sweep, and those of studies; importing this module registers all."""

from lab.analysis.drawing.registry import FIGURES as FIGURES
from lab.core import shelf
from lab.report import figures as figures

FIRST_FIGURES = (
    "learning_rate_sensitivity",
    "failing_learning_rate",
    "loss_by_arm",
    "best_loss_with_size",
    "loss_against_setting",
    "loss_over_steps",
)
OF_STUDIES = shelf.modules("figures")
