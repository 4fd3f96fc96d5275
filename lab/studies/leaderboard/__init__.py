"""Leaderboard: which published changes of a recipe make training less sensitive to its learning rate, at what cost."""

FIRST_FIGURES = ("leaderboard",)
