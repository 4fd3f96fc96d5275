"""Drawing figures: their registry, and panels that several studies share."""
