"""Alarms: loss spikes and other events in the records or logs of runs, whichever program trained them."""

from labwatch.events.detectors import Event as Event
from labwatch.events.detectors import Log as Log
from labwatch.events.detectors import detect as detect
