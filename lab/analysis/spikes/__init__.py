"""Loss spikes: the detector that finds them above the trend of a loss, and what those of our own runs cost."""
