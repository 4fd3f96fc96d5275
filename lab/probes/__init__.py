"""Probes: numbers measured in a training step."""
