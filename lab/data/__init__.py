"""Corpora and the batches drawn from them; importing this package registers all data sources."""

from lab.data import huggingface, synthetic, text, trigram

__all__ = ["huggingface", "synthetic", "text", "trigram"]
