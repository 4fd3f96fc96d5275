"""A decoder-only Transformer, and custom models; every weight leads with the run axis."""
