"""Alarms: which of them sound before the loss spikes, and a watch over anybody's log."""

FIRST_FIGURES = ("detector_scores",)
