"""Crash test: what a recipe cannot stand, how far it is from there, and which single change cures it."""
