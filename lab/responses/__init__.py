"""Responses to loss spikes; importing this package registers all of them."""

from lab.responses import response

__all__ = ["response"]
