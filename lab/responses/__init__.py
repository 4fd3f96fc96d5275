"""Responses to loss spikes; importing this package registers all of them."""

from lab.responses import between_steps, within_step

__all__ = ["between_steps", "within_step"]
