"""What a user types: commands, overrides, configs, and their errors in one line."""
