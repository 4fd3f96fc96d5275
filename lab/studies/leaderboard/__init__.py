"""Leaderboard: which published change of a recipe makes training less sensitive to its learning rate, and its cost."""

FIRST_FIGURES = ()
