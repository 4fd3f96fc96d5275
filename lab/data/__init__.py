"""Corpora and the batches drawn from them; importing this package registers all data sources."""

from lab.data import bursts, echo, escapes, huggingface, mixture, synthetic, text, trigram

__all__ = ["bursts", "echo", "escapes", "huggingface", "mixture", "synthetic", "text", "trigram"]
