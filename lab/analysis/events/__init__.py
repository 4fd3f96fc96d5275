"""Alarms: loss spikes and other events in the records or logs of runs, whichever program trained them."""

from lab.analysis.events.detectors import Event as Event
from lab.analysis.events.detectors import Log as Log
from lab.analysis.events.detectors import detect as detect
