"""Claims of papers, judged by the records."""

from lab.analysis.claims import attention, gradients, output, recipe, size

__all__ = ["attention", "gradients", "output", "recipe", "size"]  # importing them fills the registry of claims
