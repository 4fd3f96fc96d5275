"""Spikes: alarms on the losses and norms of a run, whoever trained it."""

from lab.analysis.spikes.detectors import Event as Event
from lab.analysis.spikes.detectors import Log as Log
from lab.analysis.spikes.detectors import detect as detect
