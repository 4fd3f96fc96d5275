"""`lab selftest`, a check of the machine."""
