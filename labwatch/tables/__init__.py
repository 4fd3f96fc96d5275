"""Tables of runs of other programs, made into records."""
