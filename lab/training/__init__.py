"""One fleet, from its config to its records."""
