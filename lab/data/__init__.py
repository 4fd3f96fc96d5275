"""Corpora and the batches drawn from them; each source is a registered entry of DATA."""

from lab.data import synthetic, text

__all__ = ["synthetic", "text"]
