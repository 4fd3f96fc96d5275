"""The records of a run, and where else they are sent: the doorway between training and analysis."""
