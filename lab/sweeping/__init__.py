"""Many fleets: planned, costed, trained as jobs, watched, gathered."""
