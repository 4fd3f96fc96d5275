"""Regression guard: baselines of a recipe's curves, and whether new curves are worse."""

from lab.analysis.guard.baseline import Baseline
from lab.analysis.guard.compare import Change, Comparison, check_folder, compare_baselines

__all__ = ["Baseline", "Change", "Comparison", "check_folder", "compare_baselines"]
