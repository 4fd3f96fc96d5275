"""Alarms: which of them are raised before the loss spikes; and `lab watch`, which finds alarms in any log."""

FIRST_FIGURES = ("detector_scores",)
