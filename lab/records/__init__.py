"""What a run leaves behind, and where else it is sent: the doorway between training and analysis."""
