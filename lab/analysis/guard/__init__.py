"""Baselines of a recipe's curves, and whether new curves are worse."""
