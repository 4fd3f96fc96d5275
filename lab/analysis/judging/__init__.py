"""Judging claims: evidence from runs, named effects, and the rule from intervals to a verdict."""
