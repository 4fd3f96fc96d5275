"""Probes: numbers per run, measured in a training step."""
