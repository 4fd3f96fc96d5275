"""The command line: commands, overrides and configs, and their errors in one line."""
