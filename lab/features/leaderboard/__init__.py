"""`lab leaderboard`, the board of interventions."""
