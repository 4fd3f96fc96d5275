"""A decoder-only Transformer whose every weight leads with the run axis."""
