"""Spikes: alarms on the losses and norms of a run, whoever trained it."""

from lab.analysis.events.detectors import Event as Event
from lab.analysis.events.detectors import Log as Log
from lab.analysis.events.detectors import detect as detect
