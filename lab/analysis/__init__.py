"""From records to curves, sensitivity, figures and a page; pandas and matplotlib only, never torch."""

from lab.analysis.curves import load
from lab.store import Records

__all__ = ["Records", "load"]
