"""Corpora and the batches drawn from them; importing this package registers all data sources."""

from lab.data import bursts, huggingface, synthetic, text

__all__ = ["bursts", "huggingface", "synthetic", "text"]
