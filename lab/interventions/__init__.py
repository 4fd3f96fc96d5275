"""Interventions: changes to attention, and terms of the loss; the presence of its config key switches one on."""
